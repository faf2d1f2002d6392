"""Slots of a schedule: what people write, what they mean at a clock change, and an oracle that walks every minute."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.errors import DeclarationError
from weft.pipelines.schedule import Schedule


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "now", "latest", "following"),
    [
        ("*/5 * * * *", "2025-06-01T12:07:30", "2025-06-01T12:05", "2025-06-01T12:10"),
        ("*/5 * * * *", "2025-06-01T12:05:00", "2025-06-01T12:05", "2025-06-01T12:10"),
        ("0 2 * * *", "2025-06-01T01:59:59", "2025-05-31T02:00", "2025-06-01T02:00"),
        ("@hourly", "2025-06-01T12:00", "2025-06-01T12:00", "2025-06-01T13:00"),
        ("@Daily", "2025-06-01T12:00", "2025-06-01T00:00", "2025-06-02T00:00"),
        ("@yearly", "2025-06-01T12:00", "2025-01-01T00:00", "2026-01-01T00:00"),
        ("30 9 * * mon-FRI", "2025-06-01T12:00", "2025-05-30T09:30", "2025-06-02T09:30"),
        ("0 0 * * FRI-SUN", "2025-06-04T12:00", "2025-06-01T00:00", "2025-06-06T00:00"),
        ("0 0 * * 7", "2025-06-04T12:00", "2025-06-01T00:00", "2025-06-08T00:00"),
        ("0 0 1,15 JAN,JUL *", "2025-06-01T12:00", "2025-01-15T00:00", "2025-07-01T00:00"),
        # Either day, since neither begins with a star; then both.
        ("0 0 13 * FRI", "2025-06-12T12:00", "2025-06-06T00:00", "2025-06-13T00:00"),
        ("0 0 */1 * FRI", "2025-06-12T12:00", "2025-06-06T00:00", "2025-06-13T00:00"),
        ("10/20 8-10/2 * * *", "2025-06-01T09:00", "2025-06-01T08:50", "2025-06-01T10:10"),
        ("0 0 29 2 *", "2025-06-01T12:00", "2024-02-29T00:00", "2028-02-29T00:00"),
        ("0 0 29 2 */7", "2025-06-01T12:00", "2004-02-29T00:00", "2032-02-29T00:00"),
        ("0 0 31 * *", "2025-07-01T12:00", "2025-05-31T00:00", "2025-07-31T00:00"),
    ],
)
def test_slots(cron: str, now: str, latest: str, following: str) -> None:
    schedule = Schedule(cron)
    assert schedule.latest(at(now)) == at(latest)
    assert schedule.next(at(now)) == at(following)
    assert schedule.latest(at(now)).tzinfo is UTC


def between(schedule: Schedule, begin: str, end: str) -> list[str]:
    """The slots of a stretch, by `next`; `latest` must agree on each."""
    found, moment = [], at(begin)
    while (moment := schedule.next(moment)) <= at(end):
        assert schedule.latest(moment) == moment
        assert schedule.latest(moment + timedelta(seconds=1)) == moment
        found.append(moment.strftime("%dT%H:%M"))
    return found


def test_a_time_that_the_clock_skips_runs_once_just_after_the_jump() -> None:
    schedule = Schedule("30 2 * * *", "Europe/Berlin")
    assert between(schedule, "2024-03-29T12:00", "2024-04-01T12:00") == ["30T01:30", "31T01:00", "01T00:30"]
    # Two times in the skipped hour are one run.
    assert between(Schedule("0,30 2 * * *", "Europe/Berlin"), "2024-03-30T12:00", "2024-03-31T12:00") == ["31T01:00"]


def test_a_time_that_comes_twice_runs_once() -> None:
    schedule = Schedule("30 2 * * *", "Europe/Berlin")
    assert between(schedule, "2024-10-26T12:00", "2024-10-28T12:00") == ["27T00:30", "28T01:30"]
    # Asked in the hour that is repeated.
    assert schedule.latest(at("2024-10-27T01:15")) == at("2024-10-27T00:30")
    assert schedule.next(at("2024-10-27T01:15")) == at("2024-10-28T01:30")


def test_every_n_minutes_goes_on_evenly() -> None:
    schedule = Schedule("*/30 * * * *", "Europe/Berlin")
    for begin, end in (("2024-10-26T23:00", "2024-10-27T03:00"), ("2024-03-31T00:00", "2024-03-31T04:00")):
        assert len(between(schedule, begin, end)) == 8


def test_a_day_that_a_country_left_out() -> None:
    # Samoa had no 30 December 2011.
    schedule = Schedule("0 9 * * *", "Pacific/Apia")
    assert between(schedule, "2011-12-29T12:00", "2012-01-01T00:00") == ["29T19:00", "30T10:00", "30T19:00", "31T19:00"]


def test_a_clock_that_is_put_back_over_midnight() -> None:
    # At 00:01 it was 23:01 again.
    schedule = Schedule("*/30 * * * *", "America/St_Johns")
    assert between(schedule, "2010-11-07T01:30", "2010-11-07T04:00") == [
        "07T02:00",
        "07T02:30",
        "07T03:00",
        "07T03:30",
        "07T04:00",
    ]


# --------------------------------------------------------------------------------------------------------------- oracle

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/St_Johns", "Pacific/Apia"]
ZONES += ["America/Sao_Paulo", "Asia/Kathmandu", "Africa/Casablanca", "Antarctica/Troll", "Asia/Tehran"]

# Some days around clock changes of these zones, and others.
CHANGES = ["2024-03-10", "2024-03-31", "2024-10-27", "2024-11-03", "2019-10-06", "2019-04-07", "2010-11-07"]
CHANGES += ["2010-03-14", "2011-12-30", "2018-11-04", "2018-02-18", "2024-04-14", "2024-03-10", "2022-03-22"]


def oracle(schedule: Schedule, zone: ZoneInfo, begin: datetime, minutes: int) -> list[datetime]:
    """Every slot of a stretch, by walking its minutes and looking at the wall clock."""
    minute, hour, days, months, weekdays = _sets(schedule.cron)
    even = schedule.cron.split()[0].startswith("*") or schedule.cron.split()[1].startswith("*")
    either = not any(schedule.cron.split()[field].startswith("*") for field in (2, 4))

    def due(wall: datetime) -> bool:
        day, week = wall.day in days, {wall.isoweekday(), wall.isoweekday() % 7} & weekdays
        matches = (day or bool(week)) if either else (day and bool(week))
        return matches and wall.minute in minute and wall.hour in hour and wall.month in months

    found = []
    # Earlier by more than any clock change, so that what was shown before is known.
    moment = begin - timedelta(hours=26)
    furthest = moment.astimezone(zone).replace(tzinfo=None)
    while moment <= begin + timedelta(minutes=minutes):
        wall = moment.astimezone(zone).replace(tzinfo=None, fold=0)
        if even:
            run = due(wall)
        else:
            # The times that the clock passed since it was furthest: this minute's, all of a jump's, or none.
            passed = int((wall - furthest) / timedelta(minutes=1))
            run = any(due(furthest + timedelta(minutes=each)) for each in range(1, passed + 1))
            furthest = max(furthest, wall)
        if run and moment > begin:
            found.append(moment)
        moment += timedelta(minutes=1)
    return found


def _sets(cron: str) -> list[set[int]]:
    """The fields, in another way than ours: try each number."""
    limits = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
    return [
        {number for number in range(low, high + 1) if any(_in(number, term, low, high) for term in text.split(","))}
        for text, (low, high) in zip(cron.split(), limits, strict=True)
    ]


def _in(number: int, term: str, low: int, high: int) -> bool:
    body, _, step = term.partition("/")
    if body == "*":
        first, last = low, high
    else:
        first_text, dash, last_text = body.partition("-")
        first = int(first_text)
        last = int(last_text) if dash else (high if step else first)
    return first <= number <= last and (number - first) % int(step or 1) == 0


@st.composite
def fields(draw: st.DrawFn, low: int, high: int) -> str:
    def term() -> str:
        first = draw(st.integers(low, high))
        last = draw(st.integers(first, high))
        return draw(st.sampled_from([str(first), f"{first}-{last}", f"{first}-{last}/{draw(st.integers(1, 9))}"]))

    if draw(st.booleans()):
        return draw(st.sampled_from(["*", f"*/{draw(st.integers(1, 30))}"]))
    return ",".join(term() for _ in range(draw(st.integers(1, 3))))


crons = st.tuples(fields(0, 59), fields(0, 23), fields(1, 28), st.just("*"), fields(0, 7)).map(" ".join)


@given(
    crons,
    st.sampled_from(ZONES),
    st.sampled_from(CHANGES) | st.dates(date(1990, 1, 1), date(2035, 1, 1)).map(str),
    st.integers(-1200, 240),
)
@example("30 2 * * *", "Europe/Berlin", "2024-10-27", 75)
@example("30 2 * * *", "Australia/Lord_Howe", "2019-10-06", -700)
@example("0 0 * * *", "America/Sao_Paulo", "2018-11-04", 0)
@example("0 23,0 * * *", "America/St_Johns", "2010-11-07", 0)
@example("* * * * 0-0", "America/St_Johns", "2010-11-07", -376)
def test_as_a_clock_on_the_wall_says(cron: str, zone: str, day: str, offset: int) -> None:
    schedule, begin = Schedule(cron, zone), at(day) + timedelta(minutes=offset)
    expected = oracle(schedule, ZoneInfo(zone), begin, 1440)
    end, found, moment = begin + timedelta(days=1), [], begin
    while (moment := schedule.next(moment)) <= end:
        found.append(moment)
    assert found == expected
    for before, after in zip([None, *expected], [*expected, end + timedelta(seconds=2)], strict=True):
        inside = after - timedelta(seconds=1)
        if inside > begin:
            latest = schedule.latest(inside)
            assert latest == before if before is not None else latest <= begin


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("cron", "says"),
    [
        ("61 * * * *", r"minute '61' .*out of range.*\n.*0 to 59"),
        ("* 24 * * *", r"hour '24' .*\n.*0 to 23"),
        ("* * 0 * *", r"day of the month '0' .*\n.*1 to 31"),
        ("* * * 13 *", r"month '13' .*\n.*1 to 12 \(or JAN to DEC\)"),
        ("* * * * MOM", r"day of the week 'MOM' .*not a number.*\n.*Did you mean 'MON'.*0 to 7"),
        ("*/0 * * * *", r"minute '\*/0' .*step of 0"),
        ("5-1 * * * *", r"minute '5-1' .*ends before it begins"),
        ("1,,2 * * * *", r"minute '1,,2' "),
        ("* * * *", r"has 4 fields, and cron has five.*\n.*minute, hour, day of the month"),
        ("0 * * * * *", "has 6 fields"),
        ("", "has 0 fields"),
        ("@dayly", r"no schedule '@dayly'.*\n.*Did you mean '@daily'"),
        ("@reboot", "no schedule '@reboot'"),
        ("0 0 30 2 *", "never comes"),
        ("0 0 31 4,6,9,11 *", "never comes"),
        ("٥ * * * *", "minute"),
    ],
)
def test_bad_cron(cron: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says):
        Schedule(cron)


@pytest.mark.parametrize(
    ("zone", "says"),
    [
        ("Europe/Berln", "Did you mean 'Europe/Berlin'"),
        ("Mars/Olympus Mons", "IANA name"),
        ("../../etc/passwd", "no time zone"),
        ("Europe", "no time zone"),
        ("", "no time zone"),
    ],
)
def test_unknown_zone(zone: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says):
        Schedule("@daily", zone)


def test_a_moment_needs_a_zone() -> None:
    with pytest.raises(DeclarationError, match="time zone"):
        Schedule("@daily").latest(datetime(2025, 1, 1))
