"""Normalizers of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.normalize.base import Normalizer, Value, strict, whole
from weft.normalize.base import text as checked_text

if TYPE_CHECKING:
    from sqlglot import exp

    from weft.normalize.dialects.base import Words
    from weft.normalize.patterns import Replacement


@dataclass(frozen=True)
class OfText(Normalizer):
    """A step from text to text."""

    def apply(self, value: Value, words: Words) -> Value:
        """The same for all of them: null stays null."""
        self.needs(value, "text")
        return value._replace(sql=self.changed(value.sql, words))

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """The text that comes out."""
        raise NotImplementedError


@dataclass(frozen=True)
class Trim(OfText):
    """See `trim`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """By the word itself."""
        return words.trim(x)


@strict
def trim() -> Normalizer:
    """Take white space off both ends: spaces, tabs, line ends and every other one of Unicode, such as U+00A0. A text of
    nothing else becomes empty. Null stays null."""
    return Trim()


@dataclass(frozen=True)
class Lower(OfText):
    """See `lower`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """By the word itself."""
        return words.lower(x)


@strict
def lower() -> Normalizer:
    """Every letter in lower case, in all alphabets and whatever the database's locale is: `É` becomes `é`, `Σ` always
    `σ`. Null stays null."""
    return Lower()


@dataclass(frozen=True)
class Upper(OfText):
    """See `upper`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """By the word itself."""
        return words.upper(x)


@strict
def upper() -> Normalizer:
    """Every letter in upper case, in all alphabets and whatever the database's locale is. A letter may become several:
    `ß` is `SS`. Null stays null."""
    return Upper()


@dataclass(frozen=True)
class EmptyToNull(OfText):
    """See `empty_to_null`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """Null where it is the empty text."""
        return words.nullif(x, words.text(""))


@strict
def empty_to_null() -> Normalizer:
    """The empty text becomes null. One of spaces is not empty: see `whitespace_to_null`."""
    return EmptyToNull()


@dataclass(frozen=True)
class WhitespaceToNull(OfText):
    """See `whitespace_to_null`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """Null where trimming leaves nothing."""
        return words.once(x, lambda x: words.case((words.is_not_null(words.nullif(words.trim(x), words.text(""))), x)))


@strict
def whitespace_to_null() -> Normalizer:
    """The empty text, and one of nothing but white space (as in `trim`), becomes null; any other stays as it is, with
    the white space at its ends."""
    return WhitespaceToNull()


@dataclass(frozen=True)
class Replace(OfText):
    """See `replace`."""

    old: str
    new: str

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """By the word itself."""
        return words.replace(x, self.old, self.new)


@strict
def replace(old: str, new: str) -> Normalizer:
    """Every occurrence of `old` becomes `new`, from left to right; letters of another case are other letters. `new` may
    be empty. Null stays null."""
    return Replace(
        checked_text(old, "The old text of replace()"), checked_text(new, "The new text of replace()", empty=True)
    )


@dataclass(frozen=True)
class RegexReplace(OfText):
    """See `regex_replace`."""

    pattern: str
    replacement: Replacement

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """By the word itself."""
        return words.regex_replace(x, self.pattern, self.replacement)

    def refusal(self, dialect: str) -> str | None:
        """PostgreSQL takes the longest match where all others take the first one that they find."""
        from weft.normalize import patterns

        if dialect == "postgres" and not patterns.is_plain(self.pattern):
            return (
                "PostgreSQL would take another match than the others do: the longest one, where a pattern has |, a "
                "quantifier behind a group, or a lazy one"
            )
        return None


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
    return RegexReplace(pattern, patterns.replacement(replacement, patterns.check(pattern)))


@dataclass(frozen=True)
class Truncate(OfText):
    """See `truncate`."""

    length: int

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """By the word itself."""
        return words.left(x, self.length)


@strict
def truncate(length: int) -> Normalizer:
    """The first `length` characters, each a code point of Unicode; a shorter text stays as it is. Null stays null."""
    return Truncate(whole(length, "The length of truncate()", 1, 1_000_000_000))


@dataclass(frozen=True)
class EmailNormalize(OfText):
    """See `email_normalize`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """Trimmed, in lower case."""
        return words.nullif(words.lower(words.trim(x)), words.text(""))


@strict
def email_normalize() -> Normalizer:
    """Like `trim()`, `lower()` and `empty_to_null()`. Nothing is checked: what is no address stays."""
    return EmailNormalize()


@dataclass(frozen=True)
class PhoneNormalize(OfText):
    """See `phone_normalize`."""

    def changed(self, x: exp.Expr, words: Words) -> exp.Expr:
        """The digits, and a plus sign if there was one before them."""

        def digits(x: exp.Expr) -> exp.Expr:
            left = words.nullif(words.substitute(x, "[^0-9]+", ()), words.text(""))
            with_plus = words.matches(words.substitute(x, "[^0-9+]+", ()), "[+][0-9+]*")
            return words.case((with_plus, words.joined("+", left)), otherwise=left)

        return words.once(x, digits)


@strict
def phone_normalize() -> Normalizer:
    """The digits 0 to 9 alone, with a `+` before them if there was one: `+1 (555) 010-9999` becomes `+15550109999`. A
    text without digits becomes null, and so does the empty one."""
    return PhoneNormalize()
