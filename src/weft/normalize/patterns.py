"""Regular expressions that mean the same in Python, PostgreSQL, MariaDB, DuckDB and Spark.

A pattern is read by Python's own parser; what only some of them have, or read differently, is refused. Then it is
written in each one's way: `\\d`, `\\w` and `\\s` are ASCII, `.` is anything but a newline, `$` is the very end.
"""

from __future__ import annotations

import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from weft.errors import DeclarationError

Replacement = tuple[str | int, ...]
"""Texts, and the numbers of groups."""

_CATEGORIES = {
    codes.CATEGORY_DIGIT: "0-9",
    codes.CATEGORY_WORD: "A-Za-z0-9_",
    codes.CATEGORY_SPACE: " \t\n\r\f\v",
}
_OPPOSITES = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
}
_ENDS = {"postgres": "$", "sqlite": r"\Z"}
_REFUSED = {
    "ASSERT": "looking ahead or behind",
    "ASSERT_NOT": "looking ahead or behind",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a condition",
    "AT": r"\b or \B",
}
# PostgreSQL allows no more.
_MAX_REPEAT = 255


def check(pattern: str) -> int:
    """Refuse what does not mean the same everywhere; gives the number of groups."""
    tree = _parsed(pattern)
    if tree.getwidth()[0] == 0:
        raise DeclarationError(
            f"The pattern {pattern!r} also matches nothing at all, and databases disagree where nothing is.",
            hint="Let it match at least one character: x+ in place of x*.",
        )
    _write(tree, "spark")
    return int(tree.state.groups) - 1


def is_plain(pattern: str) -> bool:
    """Whether the longest match is the first one found: PostgreSQL prefers the longest, all others the first."""
    return _is_plain(_parsed(pattern))


def written(pattern: str, dialect: str) -> str:
    """Write the pattern for a dialect."""
    return _write(_parsed(pattern), dialect)


def end(dialect: str) -> str:
    """The very end of a text: to most `$` is also before a newline there."""
    return _ENDS.get(dialect, r"\z")


def replacement(text: str, groups: int) -> Replacement:
    """A replacement's texts and groups: `\\1` to `\\9`, and `\\\\` for a backslash."""
    parts: list[str | int] = []
    for literal, escaped in re.findall(r"([^\\]+)|\\(.?)", text, re.S):
        if (not escaped and not literal) or (escaped and escaped not in "\\123456789"):
            raise DeclarationError(
                f"The replacement {text!r} has a backslash that means nothing.",
                hint=r"\1 to \9 are groups; write \\ for a backslash.",
            )
        if escaped.isdigit() and int(escaped) > groups:
            raise DeclarationError(
                f"The replacement {text!r} names the group {escaped}; the pattern has {groups}.",
                hint="Groups are in parentheses.",
            )
        parts.append(int(escaped) if escaped.isdigit() else literal or escaped)
    return tuple(parts)


def _parsed(pattern: str) -> Any:
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise DeclarationError(f"The pattern {pattern!r} is not a regular expression: {error}.") from None
    if tree.state.flags & ~re.UNICODE:
        raise DeclarationError(
            f"The pattern {pattern!r} sets flags, which not every database has.",
            hint="For any case, put lower() before it, or write [Aa].",
        )
    return tree


def _write(tree: Any, dialect: str) -> str:
    return "".join(_one(code, argument, dialect) for code, argument in tree)


def _one(code: Any, argument: Any, dialect: str) -> str:
    if code is codes.LITERAL:
        return escaped(argument)
    if code is codes.NOT_LITERAL:
        return f"[^{escaped(argument)}]"
    if code is codes.ANY:
        return "[^\n]"
    if code is codes.IN:
        return _set(argument)
    if code is codes.AT and argument in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
        return "^"
    if code is codes.AT and argument in (codes.AT_END, codes.AT_END_STRING):
        return end(dialect)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return _repeated(*argument, lazy=code is codes.MIN_REPEAT, dialect=dialect)
    if code is codes.BRANCH:
        return f"(?:{'|'.join(_write(each, dialect) for each in argument[1])})"
    if code is codes.SUBPATTERN:
        number, added, removed, inside = argument
        if not added and not removed:
            return f"({'' if number else '?:'}{_write(inside, dialect)})"
    what = _REFUSED.get(str(code), f"a part ({code})")
    raise DeclarationError(
        f"A pattern has {what}, which not every database knows.",
        hint="Use literals, ., [sets], (groups), |, ^, $ and quantifiers.",
    )


def _repeated(low: int, high: Any, inside: Any, *, lazy: bool, dialect: str) -> str:
    bounds = [low] if high is codes.MAXREPEAT else [low, high]
    if max(bounds) > _MAX_REPEAT:
        raise DeclarationError(f"A pattern repeats more than {_MAX_REPEAT} times, which PostgreSQL refuses.")
    body = _write(inside, dialect)
    if len(inside) != 1 or inside[0][0] in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.AT):
        body = f"(?:{body})"
    count = (
        "+" if bounds == [1] else "*" if bounds == [0] else f"{{{','.join(map(str, bounds))}{',' * (2 - len(bounds))}}}"
    )
    return body + count + ("?" if lazy else "")


def _set(items: list[Any]) -> str:
    negated = bool(items) and items[0][0] is codes.NEGATE
    items = items[1:] if negated else items
    if len(items) == 1 and items[0][0] is codes.CATEGORY and items[0][1] in _OPPOSITES:
        negated, items = not negated, [(codes.CATEGORY, _OPPOSITES[items[0][1]])]
    inside = ""
    for code, argument in items:
        if code is codes.LITERAL:
            inside += escaped(argument)
        elif code is codes.RANGE:
            inside += f"{escaped(argument[0])}-{escaped(argument[1])}"
        elif argument in _CATEGORIES:
            inside += _CATEGORIES[argument]
        else:
            raise DeclarationError(
                r"A pattern has \D, \W or \S inside a set, which not every database knows.",
                hint=r"Outside of [ ] they are fine; or write the set the other way round: [^0-9a].",
            )
    return f"[{'^' if negated else ''}{inside}]"


def escaped(number: int) -> str:
    """A character as itself, in a pattern or a set."""
    character = chr(number)
    is_mark = number < 128 and not character.isalnum() and character.isprintable() and character not in " _"
    return f"\\{character}" if is_mark else character


def _is_plain(tree: Any) -> bool:
    for code, argument in tree:
        if code in (codes.BRANCH, codes.MIN_REPEAT):
            return False
        if code is codes.MAX_REPEAT:
            inside = argument[2]
            if len(inside) != 1 or inside[0][0] not in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
                return False
        if code is codes.SUBPATTERN and not _is_plain(argument[3]):
            return False
    return True
