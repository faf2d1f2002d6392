"""Formats of dates and times in the manner of `strptime`, made into ISO 8601 by regular expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import DeclarationError

if TYPE_CHECKING:
    from sqlglot import exp

    from weft.normalize.dialects.base import SqlWriter

_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)


def _any_case(*names: str) -> str:
    return "|".join("".join(f"[{c.upper()}{c}]" for c in name) for name in names)


# What each field looks like: with two digits, and where it may have one, with one or two. The longer comes first.
_TWO = {
    "Y": "[0-9]{4}",
    "y": "[0-9]{2}",
    "m": "0[1-9]|1[0-2]",
    "d": "0[1-9]|[12][0-9]|3[01]",
    "H": "[01][0-9]|2[0-3]",
    "I": "0[1-9]|1[0-2]",
    "M": "[0-5][0-9]",
    "S": "[0-5][0-9]",
}
_NUMBERS = {
    **_TWO,
    **{letter: f"{_TWO[letter]}|[1-9]" for letter in "mdI"},
    **{letter: f"{_TWO[letter]}|[0-9]" for letter in "HMS"},
    "f": "[0-9]{1,6}",
}
_FIELDS = {
    **_NUMBERS,
    "b": _any_case(*(month[:3] for month in _MONTHS)),
    "B": _any_case(*_MONTHS),
    "p": _any_case("am", "pm"),
    "z": "Z|[+-][0-9:]{2,5}",
}
_MEANINGS = {"year": "Yy", "month": "mbB", "day": "d", "hour": "HI", "minute": "M", "second": "S", "fraction": "f"}
_PART = re.compile(r"%(?P<field>.)|(?P<literal>[^%])|%$", re.S)


@dataclass(frozen=True)
class Format:
    """A format that `checked` made."""

    text: str
    parts: tuple[str, ...]
    """Fields as `%Y`, literals as single characters."""

    def iso(self, x: exp.Expr, writer: SqlWriter, *, clock: bool) -> exp.Expr:
        """The day, and with `clock` the time, that a text says in this format, as ISO 8601; null where it is of another
        format. Half a day is missing in the afternoon where the format has AM and PM."""
        return writer.once(
            x, lambda x: writer.case((writer.matches(x, self.pattern()), self._rearranged(x, writer, clock=clock)))
        )

    @property
    def fields(self) -> str:
        """The letters of the fields in their order."""
        return "".join(part[1] for part in self.parts if len(part) > 1)

    def is_afternoon(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr | None:
        """Whether a text of this format says PM; `None` where the format has no such thing."""
        return writer.matches(x, self.pattern(p=_any_case("pm"))) if "%p" in self.parts else None

    def pattern(self, **fields: str) -> str:
        """A regular expression with a group for each field."""
        from weft.normalize.patterns import escaped

        written = ""
        for number, part in enumerate(self.parts):
            if len(part) == 1:
                written += escaped(ord(part))
                continue
            neighbours = self.parts[max(number - 1, 0) : number] + self.parts[number + 1 : number + 2]
            # Where numbers touch, two digits each show where one ends.
            touches = any((len(each) > 1 and each[1] in _NUMBERS) or each.isdigit() for each in neighbours)
            letter = part[1]
            written += f"({fields.get(letter) or (_TWO if touches else _FIELDS).get(letter) or _FIELDS[letter]})"
        return written

    def _rearranged(self, x: exp.Expr, writer: SqlWriter, *, clock: bool) -> exp.Expr:
        """First `2026-<1>-<2>T<3>:<4>:<5>`; then what is between angles gets two digits."""
        groups = {letter: number for number, letter in enumerate(self.fields, 1)}

        def field(meaning: str) -> tuple[str | int, ...]:
            numbers = [groups[letter] for letter in _MEANINGS[meaning] if letter in groups]
            return ("<", numbers[0], ">") if numbers else ("00",)

        parts: list[str | int] = [field("year")[1], "-", *field("month"), "-", *field("day")]
        if clock:
            parts += ["T", *field("hour"), ":", *field("minute"), ":", *field("second")]
            parts += [".", groups["f"]] if "f" in groups else []
            parts += [groups["z"]] if "z" in groups else []
        iso = writer.substitute(x, writer.whole(self.pattern()), tuple(parts))
        if "b" in groups or "B" in groups:
            iso = writer.lower(iso)
            for number, month in enumerate(_MONTHS, 1):
                iso = writer.replace(iso, f"<{month if 'B' in groups else month[:3]}>", f"{number:02}")
            iso = writer.replace(writer.replace(iso, "t", "T"), "z", "Z")
        iso = writer.substitute(iso, "<([0-9])>", ("0", 1))
        iso = writer.replace(writer.replace(iso, "<", ""), ">", "")
        if "I" in groups:
            iso = writer.replace(iso, "T12:", "T00:")
        if "y" in groups:
            # As strptime and POSIX have it.
            recent = "([0-5][0-9]|6[0-8])-.*"
            iso = writer.once(
                iso,
                lambda iso: writer.case(
                    (writer.matches(iso, recent), writer.joined("20", iso)), otherwise=writer.joined("19", iso)
                ),
            )
        return iso


def checked(text: object, who: str) -> Format:
    """A format, or a `DeclarationError` that says what is wrong with it."""
    if not isinstance(text, str) or not text or "\0" in text:
        raise DeclarationError(f"A format of {who} is a text such as '%Y-%m-%d', not {text!r}.")
    parts = []
    for match in _PART.finditer(text):
        letter, literal = match["field"], match["literal"]
        if literal or letter == "%":
            parts.append(literal or "%")
        elif letter in _FIELDS:
            parts.append(f"%{letter}")
        else:
            hint = _HINTS.get(
                letter or "", f"Known: {', '.join(f'%{each}' for each in _FIELDS)}, and %% for a percent."
            )
            raise DeclarationError(
                f"The format {text!r} of {who} has {match[0]!r}, which is not a field of it.", hint=hint
            )
    counts = {meaning: sum(parts.count(f"%{c}") for c in letters) for meaning, letters in _MEANINGS.items()}
    missing = [meaning for meaning in ("year", "month", "day") if not counts[meaning]]
    if missing:
        raise DeclarationError(
            f"The format {text!r} of {who} has no {missing[0]}.", hint="A day is a year, a month and a day: %Y, %m, %d."
        )
    double = next((meaning for meaning, count in counts.items() if count > 1), None)
    if double or parts.count("%p") > 1 or parts.count("%z") > 1:
        raise DeclarationError(f"The format {text!r} of {who} has the {double or 'same field'} twice.")
    if ("%I" in parts) != ("%p" in parts):
        raise DeclarationError(
            f"The format {text!r} of {who} has one of %I and %p.",
            hint="%I is an hour from 1 to 12 and needs %p (AM or PM); %H is one from 0 to 23.",
        )
    return Format(text, tuple(parts))


_HINTS = {
    "T": "Write %H:%M:%S.",
    "F": "Write %Y-%m-%d.",
    "D": "Write %m/%d/%y.",
    "s": "Seconds since 1970: sql('TO_TIMESTAMP(value)', TimestampTZ) on PostgreSQL, or divide them in the source.",
    "Z": "Names of zones are not read; %z reads +02:00 and Z.",
    "L": "Fractions of a second are %f.",
    "N": "Fractions of a second are %f.",
    "h": "Hours are %H; short names of months %b.",
    "i": "Minutes are %M.",
    "e": "Days are %d.",
}
