"""What each normalizer does, in plain Python: written from their descriptions, with nothing of Weft's."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any
from zoneinfo import ZoneInfo

SPACE = "".join(
    map(chr, [*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F])
)
SPACE += "\u3000"


def trim(text: str) -> str:
    return text.strip(SPACE)


def lower(text: str) -> str:
    return "".join(c.lower() for c in text)


def phone(text: str) -> str | None:
    digits = "".join(c for c in text if c in "0123456789")
    first = next((c for c in text if c in "0123456789+"), "")
    return ("+" if first == "+" else "") + digits if digits else None


def iso_instant(text: str) -> datetime | None:
    found = re.fullmatch(
        r"(?P<day>\d{4}-\d\d-\d\d)"
        r"([T ](?P<clock>\d\d:\d\d(:\d\d)?)(\.(?P<part>\d{1,9}))?(?P<zone>Z|[+-]\d\d(:?\d\d)?)?)?",
        text,
        re.A,
    )
    if not found or (found["part"] and len(found["clock"]) != 8):
        return None
    zone = found["zone"] or ""
    if zone not in ("", "Z") and (int(zone[1:3]) > 14 or int(zone[3:].strip(":") or 0) > 59):
        return None
    try:
        clock = found["clock"] or "00:00"
        parts = [*map(int, clock.split(":")), 0][:3]
        moment = datetime(*map(int, found["day"].split("-")), *parts, int((found["part"] or "0").ljust(6, "0")[:6]))
    except ValueError:
        return None
    if zone in ("", "Z"):
        return moment.replace(tzinfo=UTC)
    if moment.date() in (date.min, date.max):
        return None
    shift = timedelta(hours=int(zone[1:3]), minutes=int(zone[3:].strip(":") or 0))
    return (moment - shift if zone[0] == "+" else moment + shift).replace(tzinfo=UTC)


def iso_day(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.A) else None
    except ValueError:
        return None


def by_format(*formats: str) -> Callable[[str], datetime | None]:
    """By Python's own strptime, which takes more: foreign digits, any space for a space, a letter in any case."""

    def read(text: str) -> datetime | None:
        for format in formats:
            # "%z" also takes seconds, and "%d" a space before one digit. Where numbers touch, each has all its digits.
            if (("T" in format) != ("T" in text) and "%Y-%m" in format) or ("%Y%m" in format and len(text) != 14):
                continue
            if (
                text.count(" ") != format.count(" ")
                or not text.isascii()
                or re.search(r"[+-]\d\d:?\d\d:?\d\d|\s\s|[^\S ]|[+-]\d\d:?\d$", text)
            ):
                continue
            try:
                moment = datetime.strptime(re.sub(r"([+-]\d\d)$", r"\g<1>00", text) if "%z" in format else text, format)
            except ValueError:
                continue
            offset = moment.utcoffset()
            if offset is None:
                return moment.replace(tzinfo=UTC)
            if abs(offset) >= timedelta(hours=15) or moment.date() in (date.min, date.max):
                continue
            return moment.astimezone(UTC)
        return None

    return read


def integer(text: str) -> int | None:
    if not re.fullmatch(r"[+-]?\d+", text, re.A):
        return None
    number = int(text)
    return number if -(1 << 63) <= number < 1 << 63 else None


def numeric(precision: int, scale: int) -> Callable[[str], Decimal | None]:
    def read(text: str) -> Decimal | None:
        if not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)", text, re.A):
            return None
        number = Decimal(text)
        if number == 0:
            return Decimal(0)
        exponent = number.normalize().as_tuple().exponent
        assert isinstance(exponent, int)
        return number if -exponent <= scale and number.adjusted() < precision - scale else None

    return read


def rounded(digits: int) -> Callable[[Any], Any]:
    def round_(number: Any) -> Any:
        if isinstance(number, Decimal):
            return number.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
        exact = Context(prec=400)
        shown = Decimal(repr(number)).quantize(Decimal(1).scaleb(-22), ROUND_HALF_UP, exact)
        return float(shown.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, exact))

    return round_


def clamped(low: Any, high: Any) -> Callable[[Any], Any]:
    return lambda value: (
        low if low is not None and value < low else high if high is not None and value > high else value
    )


def in_zone(name: str) -> Callable[[datetime], datetime]:
    def convert(moment: datetime) -> datetime:
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return moment.astimezone(ZoneInfo(name)).replace(tzinfo=None)

    return convert


def truncated(unit: str) -> Callable[[Any], Any]:
    def cut(value: Any) -> Any:
        midnight = {"hour": 0, "minute": 0, "second": 0, "microsecond": 0} if isinstance(value, datetime) else {}
        if unit in ("hour", "minute", "second"):
            kept = ("hour", "minute", "second").index(unit) + 1
            return value.replace(**dict(list(midnight.items())[kept:]))
        value = value.replace(**midnight)
        if unit == "week":
            return value - timedelta(days=value.weekday())
        months = {"year": 1, "quarter": 3 * ((value.month + 2) // 3) - 2, "month": value.month}
        return value if unit == "day" else value.replace(month=months[unit], day=1)

    return cut


TRUE, FALSE = {"true", "t", "yes", "y", "on", "1"}, {"false", "f", "no", "n", "off", "0"}


def boolean(text: str) -> bool | None:
    word = lower(text)
    return True if word in TRUE else False if word in FALSE else None
