"""Normalizers of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.normalize.base import Normalizer, Value, strict, whole
from weft.normalize.base import text as checked_text

if TYPE_CHECKING:
    from weft.normalize.dialects.base import SqlWriter


@dataclass(frozen=True)
class TextStep(Normalizer):
    """A step from text to text, by the method of `SqlWriter` that has its name. Null stays null."""

    method: str
    arguments: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """What the user called, for errors."""
        return f"{self.method}()"

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Call the method."""
        self.needs(value, "text")
        return value._replace(sql=getattr(writer, self.method)(value.sql, *self.arguments))


@strict
def trim() -> Normalizer:
    """Take white space off both ends: spaces, tabs, line ends and every other one of Unicode, such as U+00A0. A text of
    nothing else becomes empty. Null stays null."""
    return TextStep("trim")


@strict
def lower() -> Normalizer:
    """Every letter in lower case, in all alphabets and whatever the database's locale is: `É` becomes `é`, `Σ` always
    `σ`. Null stays null."""
    return TextStep("lower")


@strict
def upper() -> Normalizer:
    """Every letter in upper case, in all alphabets and whatever the database's locale is. A letter may become several:
    `ß` is `SS`. Null stays null."""
    return TextStep("upper")


@strict
def empty_to_null() -> Normalizer:
    """The empty text becomes null. One of spaces is not empty: see `whitespace_to_null`."""
    return TextStep("empty_to_null")


@strict
def whitespace_to_null() -> Normalizer:
    """The empty text, and one of nothing but white space (as in `trim`), becomes null; any other stays as it is, with
    the white space at its ends."""
    return TextStep("whitespace_to_null")


@strict
def replace(old: str, new: str) -> Normalizer:
    """Every occurrence of `old` becomes `new`, from left to right; letters of another case are other letters. `new` may
    be empty. Null stays null."""
    checked_text(old, "The old text of replace()")
    checked_text(new, "The new text of replace()", empty=True)
    return TextStep("replace", (old, new))


@dataclass(frozen=True)
class RegexReplace(TextStep):
    def refusal(self, dialect: str) -> str | None:
        """Databases may differ in which match they take for a pattern that is not plain."""
        from weft.normalize import patterns
        from weft.normalize.dialects import writer_for

        return None if patterns.is_plain(self.arguments[0]) else writer_for(dialect).why_only_plain_patterns


@strict
def regex_replace(pattern: str, replacement: str) -> Normalizer:
    r"""Every match of a regular expression becomes `replacement`, in which `\1` to `\9` are groups and `\\` is a
    backslash. Null stays null.

    A pattern has literals, `.` (anything but a newline), `[sets]`, `\d`, `\w`, `\s` (of ASCII), `(groups)`, `|`, `^`
    and `$` (the very ends of the text) and quantifiers. What not every database reads alike is refused: flags, looking
    ahead, and patterns that can match nothing.
    """
    from weft.normalize import patterns

    checked_text(pattern, "The pattern of regex_replace()")
    checked_text(replacement, "The replacement of regex_replace()", empty=True)
    return RegexReplace("regex_replace", (pattern, patterns.replacement(replacement, patterns.check(pattern))))


@strict
def truncate(length: int) -> Normalizer:
    """The first `length` characters, each a code point of Unicode; a shorter text stays as it is. Null stays null."""
    return TextStep("truncate", (whole(length, "The length of truncate()", 1, 1_000_000_000),))


@strict
def email_normalize() -> Normalizer:
    """Like `trim()`, `lower()` and `empty_to_null()`. Nothing is checked: a text that is not an address stays."""
    return TextStep("email_normalize")


@strict
def phone_normalize() -> Normalizer:
    """The digits 0 to 9 alone, with a `+` before them if there was one: `+1 (555) 010-9999` becomes `+15550109999`. A
    text without digits becomes null, and so does the empty one."""
    return TextStep("phone_normalize")
