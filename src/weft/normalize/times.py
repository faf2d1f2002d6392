"""Normalizers of dates and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import DeclarationError, did_you_mean
from weft.normalize.base import Normalizer, Parser, Value, checked_failure, one_of, strict
from weft.normalize.formats import Format, checked

if TYPE_CHECKING:
    from sqlglot import exp

    from weft.normalize.dialects.base import SqlWriter

OnFailure = Literal["null", "error", "default"]


@dataclass(frozen=True)
class ParseTimestamp(Parser):
    formats: tuple[Format, ...] = ()

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Texts are read; what is a time already is an instant."""
        from weft.columns import UTC_TIME

        family = self.needs(value, "text", "timestamps", "dates")
        if family == "text":
            return self.parsed(value, writer, UTC_TIME)
        if value.kind == UTC_TIME:
            return value
        return value._replace(sql=writer.to_utc(value.sql, value.kind), kind=UTC_TIME)

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """By each format in turn."""
        if not self.formats:
            return writer.instant(x)
        return writer.coalesce(*(writer.instant_by(x, each) for each in self.formats))


@strict
def parse_timestamp(
    format: str | None = None,
    *,
    formats: Sequence[str] | None = None,
    on_failure: OnFailure = "null",
    default: datetime | None = None,
) -> Normalizer:
    """Text as an instant (`TimestampTZ`). What is a timestamp already stays; one without a zone, and a date, is in UTC.

    Without a format it takes ISO 8601: a day, then maybe `T` or a space and a time with or without seconds, a fraction
    of up to nine digits (those behind the sixth are cut off) and a zone, `Z` or `+02:00`; without a zone it is UTC.
    With a format it takes times such as `%Y-%m-%d %H:%M:%S` in the manner of `strptime`; of several in `formats` the
    first that fits counts.

    A text that is not a time, the empty one too, becomes null; with `on_failure="error"` it fails the load, with
    `"default"` it becomes `default`. Null stays null. Years are 1 to 9999.
    """
    who = "parse_timestamp()"
    checked_formats = _formats(format, formats, who)
    checked_failure(on_failure, default, who)
    if default is not None and not isinstance(default, datetime):
        raise DeclarationError(f"The default of {who} is a datetime, not {default!r}.")
    return ParseTimestamp(on_failure, default, checked_formats)


@dataclass(frozen=True)
class ParseDate(Parser):
    formats: tuple[Format, ...] = ()

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Texts are read; of a time it is the day in UTC."""
        import pyarrow as pa

        family = self.needs(value, "text", "dates", "timestamps")
        if family == "text":
            return self.parsed(value, writer, pa.date32())
        if family == "dates":
            return value
        return value._replace(sql=writer.to_day(value.sql, value.kind), kind=pa.date32())

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """By each format in turn."""
        if not self.formats:
            return writer.day(x)
        return writer.coalesce(*(writer.day_by(x, each) for each in self.formats))


@strict
def parse_date(
    format: str | None = None,
    *,
    formats: Sequence[str] | None = None,
    on_failure: OnFailure = "null",
    default: date | None = None,
) -> Normalizer:
    """Text as a day (`Date`). What is a date already stays; of a timestamp it is the day in UTC.

    Without a format it takes `2026-01-31` and nothing else; formats, failures and nulls are as in `parse_timestamp`. A
    format may have a time as well, which is read and left out.
    """
    who = "parse_date()"
    checked_formats = _formats(format, formats, who)
    checked_failure(on_failure, default, who)
    if default is not None and (not isinstance(default, date) or isinstance(default, datetime)):
        raise DeclarationError(f"The default of {who} is a date, not {default!r}.")
    return ParseDate(on_failure, default, checked_formats)


def _formats(one: Any, several: Any, who: str) -> tuple[Format, ...]:
    if one is not None and several is not None:
        raise DeclarationError(f"{who} takes format or formats, not both.", hint="Put all of them into formats=[…].")
    if isinstance(several, str) or (several is not None and (not isinstance(several, Sequence) or not several)):
        raise DeclarationError(f"The formats of {who} are a list of texts, not {several!r}.")
    texts = several if several is not None else () if one is None else (one,)
    return tuple(checked(each, who) for each in texts)


@dataclass(frozen=True)
class ToTimezone(Normalizer):
    zone: str

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """A clock's time has no zone."""
        from weft.columns import LOCAL_TIME

        self.needs(value, "timestamps")
        return value._replace(sql=writer.to_zone(value.sql, value.kind, self.zone), kind=LOCAL_TIME)

    def refusal(self, dialect: str) -> str | None:
        """Only UTC is the same everywhere."""
        from weft.normalize.dialects import writer_for

        return None if self.zone == "UTC" else writer_for(dialect).why_no_zones


@strict
def to_timezone(zone: str) -> Normalizer:
    """The time that clocks in a zone show at an instant, as a timestamp without a zone (`Timestamp`). A timestamp that
    has none is taken for UTC. `zone` is a name such as `Europe/Berlin`; both sides of a clock change are right, and an
    hour that comes twice gives the same times twice. Null stays null. Not on MySQL and MariaDB, where Spark does it."""
    from zoneinfo import available_timezones

    if not isinstance(zone, str) or zone not in available_timezones():
        hint = did_you_mean(str(zone), available_timezones(), "Zones have names such as Europe/Berlin, or UTC.")
        raise DeclarationError(f"to_timezone() knows no time zone {zone!r}.", hint=hint)
    return ToTimezone(zone)


_UNITS = ("year", "quarter", "month", "week", "day", "hour", "minute", "second")


@dataclass(frozen=True)
class DateTrunc(Normalizer):
    unit: str

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """The type stays."""
        family = self.needs(value, "timestamps", "dates")
        if family == "dates" and self.unit in _UNITS[5:]:
            raise DeclarationError(
                f"date_trunc({self.unit!r}): the column {value.column!r} is a date, which has no {self.unit}."
            )
        if family == "dates" and self.unit == "day":
            return value
        return value._replace(sql=writer.truncate_time(value.sql, value.kind, self.unit))


@strict
def date_trunc(unit: str) -> Normalizer:
    """The beginning of the `year`, `quarter`, `month`, `week` (its Monday), `day`, `hour`, `minute` or `second` that a
    timestamp or date is in. Instants are truncated in UTC. The type stays. Null stays null."""
    return DateTrunc(one_of(unit, _UNITS, "The unit of date_trunc()"))
