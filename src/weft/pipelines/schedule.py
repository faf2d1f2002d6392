"""When a pipeline is due: cron in a time zone, on both sides of a clock change.

As Debian's cron does it. A schedule whose minute or hour begins with `*` runs whenever the clock on the wall matches,
so it goes on evenly. Any other one means times of the day: one that the clock skips runs just after the jump, and one
that comes twice runs the first time only.

Not one of the libraries: asked from within the repeated hour, cronsim 2.8 gives a next slot that is past and a last
slot that is a day old; croniter 6.2 runs fixed times in the repeated hour twice, and takes five times as long.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cached_property, lru_cache
from typing import Literal
from zoneinfo import ZoneInfo, available_timezones

from weft.errors import DeclarationError, did_you_mean, listed

_DAY = timedelta(days=1)
# A 29 February that is a Sunday may come 40 years after the last one.
_YEARS = 50
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True)
class _Field:
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()

    @property
    def holds(self) -> str:
        """What it may hold, for people."""
        named = f" (or {self.names[0]} to {self.names[-1]})" if self.names else ""
        return f"{self.first} to {self.last}{named}"

    def parse(self, text: str) -> frozenset[int]:
        """Return the numbers that a field stands for."""
        return frozenset(number for term in text.split(",") for number in self._term(term, text))

    def _term(self, term: str, text: str) -> range:
        parts = re.fullmatch(r"(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?", term, re.ASCII)
        if parts is None:
            raise self._wrong(text, "is not a number, list, range or step")
        step = int(parts["step"] or 1)
        if step == 0:
            raise self._wrong(text, "has a step of 0")
        if parts["first"] is None:
            return range(self.first, self.last + 1, step)
        first = self._number(parts["first"], text)
        if parts["last"] is None:
            return range(first, (self.last if parts["step"] else first) + 1, step)
        last = self._number(parts["last"], text)
        if last < first and last == 0 and self.last == 7:
            last = 7  # FRI-SUN
        if last < first:
            raise self._wrong(text, "has a range that ends before it begins")
        return range(first, last + 1, step)

    def _number(self, text: str, whole: str) -> int:
        if text.upper() in self.names:
            return self.names.index(text.upper()) + (1 if self.name == "month" else 0)
        if not text.isdecimal():
            hint = did_you_mean(text.upper(), self.names) or ""
            raise self._wrong(whole, f"has {text!r}, which is not a number", hint)
        if not self.first <= int(text) <= self.last:
            raise self._wrong(whole, f"has {text}, which is out of range")
        return int(text)

    def _wrong(self, text: str, problem: str, hint: str = "") -> DeclarationError:
        return DeclarationError(
            f"The {self.name} {text!r} of a schedule {problem}.",
            hint=f"{hint} A {self.name} is {self.holds}, as *, 5, 1-5, 1,3,5, */2 or 1-5/2.".strip(),
        )


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")),
    _Field("day of the week", 0, 7, ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")),
)


@dataclass(frozen=True)
class Schedule:
    """`Schedule("0 2 * * *", timezone="Europe/Berlin")`: five fields of cron, or `@hourly`, `@daily` …

    Days follow Debian's cron: where day of the month or day of the week begins with `*` both must match, else one.
    """

    cron: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        # Now, not at the first use: a wrong schedule is found where it is written.
        _ = self._zone, self._times
        if next(self._days(date(2000, 1, 1), 1), None) is None:
            raise DeclarationError(
                f"The schedule {self.cron!r} never comes: there is no such date.",
                hint="Change the day of the month or the month.",
            )

    def latest(self, now: datetime) -> datetime:
        """Return the last slot at or before `now`, in UTC."""
        moment = _aware(now)
        # Begin with tomorrow: if the clock was put back over midnight, tomorrow has begun once already.
        for day in self._days(moment.astimezone(self._zone).date() + _DAY, -1):
            if (slot := self._slot(day, moment, -1)) is not None:
                # The evening before may come again after that.
                before = self._slot(day - _DAY, moment, -1) if self._has(day - _DAY) else None
                return max(slot, before or slot)
        raise DeclarationError(f"The schedule {self.cron!r} has no slot before {moment.isoformat()}.")

    def next(self, now: datetime) -> datetime:
        """Return the first slot after `now`, in UTC."""
        moment = _aware(now)
        for day in self._days(moment.astimezone(self._zone).date() - _DAY, 1):
            if (slot := self._slot(day, moment, 0)) is not None:
                after = self._slot(day + _DAY, moment, 0) if self._has(day + _DAY) else None
                return min(slot, after or slot)
        raise DeclarationError(f"The schedule {self.cron!r} has no slot after {moment.isoformat()}.")

    # ------------------------------------------------------------------------------------------------------------- days

    @cached_property
    def _parts(self) -> list[str]:
        text = self.cron.strip() if isinstance(self.cron, str) else ""
        if text.startswith("@"):
            if text.lower() not in _NICKNAMES:
                hint = listed(text.lower(), _NICKNAMES, f"Known: {', '.join(_NICKNAMES)}.")
                raise DeclarationError(f"There is no schedule {text!r}.", hint=hint)
            text = _NICKNAMES[text.lower()]
        parts = text.split()
        if len(parts) != len(_FIELDS):
            raise DeclarationError(
                f"The schedule {self.cron!r} has {len(parts)} fields, and cron has five.",
                hint=f"They are {', '.join(field.name for field in _FIELDS)}: '0 2 * * *' is every day at two.",
            )
        return parts

    @cached_property
    def _sets(self) -> list[frozenset[int]]:
        return [field.parse(part) for field, part in zip(_FIELDS, self._parts, strict=True)]

    @cached_property
    def _both_days(self) -> bool:
        return self._parts[2].startswith("*") or self._parts[4].startswith("*")

    def _has(self, day: date) -> bool:
        _, _, days, months, weekdays = self._sets
        if day.month not in months:
            return False
        number = day.isoweekday()  # Sunday is 7, and 0 % 7
        of_month, of_week = day.day in days, number in weekdays or number % 7 in weekdays
        return (of_month and of_week) if self._both_days else (of_month or of_week)

    def _days(self, start: date, step: int) -> Iterator[date]:
        """Yield the days that match, from one on, forwards or backwards."""
        day, months = start, self._sets[3]
        while abs(day.year - start.year) <= _YEARS:
            if day.month not in months:
                # To the last day of this month or the first, and on from there.
                edge = day.replace(day=28) + 4 * _DAY
                day = edge.replace(day=1) if step > 0 else day.replace(day=1) - _DAY
                continue
            if self._has(day):
                yield day
            day += step * _DAY

    # ------------------------------------------------------------------------------------------------------------ times

    @cached_property
    def _zone(self) -> ZoneInfo:
        # Names of folders and files that are not zones raise all kinds of errors.
        try:
            return ZoneInfo(self.timezone)
        except Exception:
            names = available_timezones()
            hint = did_you_mean(str(self.timezone), names, "Use an IANA name such as 'Europe/Berlin' or 'UTC'.")
            raise DeclarationError(f"There is no time zone {self.timezone!r}.", hint=hint) from None

    @cached_property
    def _times(self) -> tuple[int, ...]:
        """The minutes of a day."""
        minutes, hours = self._sets[:2]
        return tuple(sorted(hour * 60 + minute for hour in hours for minute in minutes))

    @cached_property
    def _is_even(self) -> bool:
        return self._parts[0].startswith("*") or self._parts[1].startswith("*")

    def _slot(self, day: date, moment: datetime, step: Literal[-1, 0]) -> datetime | None:
        """Return the last slot of a day at or before a moment (-1), or the first one after it (0)."""
        midnight = _plain_midnight(self._zone, day)
        if midnight is None:
            slots = _slots(self._zone, day, self._times, self._is_even)
            index = bisect_right(slots, moment) + step
            return slots[index] if 0 <= index < len(slots) else None
        index = bisect_right(self._times, (moment - midnight) / timedelta(minutes=1)) + step
        return midnight + timedelta(minutes=self._times[index]) if 0 <= index < len(self._times) else None


def _aware(now: datetime) -> datetime:
    if now.tzinfo is None:
        raise DeclarationError("A schedule needs a moment with a time zone.", hint="Use datetime.now(UTC).")
    return now.astimezone(UTC)


# Schedules share these: all of a project ask about the same few days.
@lru_cache(maxsize=4096)
def _plain_midnight(zone: ZoneInfo, day: date) -> datetime | None:
    """Return when a day begins, if no clock is changed on it or next to it."""
    midnight = datetime.combine(day, time())
    offset = zone.utcoffset(midnight) or timedelta()
    if any(zone.utcoffset(midnight + timedelta(hours=hours)) != offset for hours in (-24, 12, 48)):
        return None
    return (midnight - offset).replace(tzinfo=UTC)


@lru_cache(maxsize=4096)
def _slots(zone: ZoneInfo, day: date, times: tuple[int, ...], is_even: bool) -> list[datetime]:
    """Return the moments of a day's times, where clocks are changed."""
    slots = set()
    for minutes in times:
        wall = datetime.combine(day, time(minutes // 60, minutes % 60))
        meant = [wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)]
        real = [moment for moment in meant if moment.astimezone(zone).replace(tzinfo=None, fold=0) == wall]
        if is_even:
            slots |= set(real)
        else:
            slots.add(real[0] if real else _jump(zone, meant[1], meant[0]))
    return sorted(slots)


def _jump(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    """Return the second between two moments at which the clock is put forward."""
    seconds = range(int((after - before).total_seconds()) + 1)
    offset = after.astimezone(zone).utcoffset()
    return before + timedelta(
        seconds=bisect_left(
            seconds, True, key=lambda each: (before + timedelta(seconds=each)).astimezone(zone).utcoffset() == offset
        )
    )
