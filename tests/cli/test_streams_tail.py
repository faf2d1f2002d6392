"""`weft streams tail`: the last events, those since a moment, those that match."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest

import weft
from workers import declare


def shown(done) -> list[int]:
    return [json.loads(line)["n"] for line in done.stdout.splitlines()]


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def system(request, open_system):
    with open_system(request.param) as found:
        yield found


@pytest.fixture
def numbers(streams) -> list[int]:
    """The offsets of 1200 events."""
    declare("numbers", fields={"n": "int64", "kind": "string"})
    events = [{"n": n, "kind": "even" if n % 2 == 0 else "odd"} for n in range(1200)]
    weft.publish_sync("numbers", events)
    return [event["_weft_rowid"] for event in weft.consume_sync("numbers", "c", batch_size=2000)]


def test_last(numbers, call) -> None:
    assert shown(call("streams", "tail", "numbers", "--format", "json")) == list(range(1190, 1200))
    assert shown(call("streams", "tail", "numbers", "--format", "json", "-n", 3)) == [1197, 1198, 1199]
    assert shown(call("streams", "tail", "numbers", "--format", "json", "-n", 5000)) == list(range(1200))
    assert shown(call("streams", "tail", "numbers", "--format", "json", "-n", 0)) == []


def test_since(numbers, call) -> None:
    tail = ["streams", "tail", "numbers", "--format", "json", "--since"]
    assert shown(call(*tail, "start")) == list(range(1200))
    assert shown(call(*tail, numbers[1100])) == list(range(1101, 1200))
    assert shown(call(*tail, "start", "-n", 2)) == [1198, 1199]
    assert shown(call(*tail, "2020-01-01")) == list(range(1200))
    assert shown(call(*tail, "2020-01-01", "-n", 2)) == [1198, 1199]
    assert shown(call(*tail, "10m")) == list(range(1200))
    assert shown(call(*tail, "2999-01-01T00:00:00+02:00")) == []
    assert "not 'start', an offset, a time" in call(*tail, "soon", code=2).stderr


def test_filter(numbers, call) -> None:
    tail = ["streams", "tail", "numbers", "--format", "json", "--filter"]
    assert shown(call(*tail, "kind=even", "-n", 2)) == [1196, 1198]
    assert shown(call(*tail, "n=3")) == [3]
    assert shown(call(*tail, "n=3", "--filter", "kind=even")) == []
    assert shown(call(*tail, "kind=odd", "--since", "start"))[:2] == [1, 3]
    assert "FIELD=VALUE" in call(*tail, "kind", code=2).stderr
    done = call(*tail, "knid=odd")
    assert done.stdout == ""
    assert done.stderr == "note: the stream has no column 'knid'; events may still hold it. Did you mean 'kind'?\n"


@pytest.mark.brief(
    "sqlite-price-texts0",
    "sqlite-at-texts1",
    "sqlite-ratio-texts2",
    "sqlite-flag-texts3",
    "sqlite-id-texts4",
    "sqlite-body-texts5",
    "sqlite-n-texts6",
    "sqlite-_weft_rowid-texts7",
    "postgres-price-texts0",
    "mysql-at-texts1",
    "redis-body-texts5",
)
@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("price", ["3.5", "3.50", "3.500", "35e-1"]),
        ("at", ["2026-01-31T12:00:00+00:00", "2026-01-31T13:00:00+01:00", "2026-01-31 12:00", "2026-01-31T12:00Z"]),
        ("ratio", ["0.25", "0.250", ".25"]),
        ("flag", ["true", "yes"]),
        ("id", ["6f1c0b5e-7d0f-4c43-9a4b-1f0b6c8f2a11", "6F1C0B5E-7D0F-4C43-9A4B-1F0B6C8F2A11"]),
        ("body", ['{"a": 1}', '{"a":1}']),
        ("n", ["7", "07"]),
        ("_weft_rowid", ["OFFSET", "0OFFSET"]),
    ],
)
def test_filter_by_what_a_value_is(streams, call, field: str, texts: list[str]) -> None:
    kinds = {"price": "decimal(10,2)", "at": "timestamp", "flag": "bool", "id": "uuid", "body": "json", "s": "string"}
    declare("things", fields=kinds)
    event = {
        "price": "3.5",
        "at": "2026-01-31T12:00:00Z",
        "ratio": 0.25,
        "flag": True,
        "id": "6f1c0b5e-7d0f-4c43-9a4b-1f0b6c8f2a11",
        "body": {"a": 1},
        "n": 7,
        "s": "7",
    }
    offset = weft.publish_sync("things", [event, {"s": "07"}])["first_rowid"]
    tail = ["streams", "tail", "things", "--format", "json", "--filter"]
    for text in texts:
        assert shown(call(*tail, f"{field}={text.replace('OFFSET', str(offset))}")) == [7]
    assert shown(call(*tail, f"{field}=8")) == []
    assert shown(call(*tail, f"{field}=x")) == []
    assert shown(call(*tail, "s=7")) == [7]


def test_after_retention(numbers, call) -> None:
    weft.trim_sync("numbers", max_rows=5)
    assert shown(call("streams", "tail", "numbers", "--format", "json")) == list(range(1195, 1200))
    assert shown(call("streams", "tail", "numbers", "--format", "json", "--since", 1)) == list(range(1195, 1200))


def test_json_is_whole(streams, call) -> None:
    declare("numbers", fields={"n": "int64", "s": "string"})
    weft.publish_sync("numbers", {"n": 1, "extra key": {"a": "é"}})
    (line,) = call("streams", "tail", "numbers", "--format", "json").stdout.splitlines()
    event = json.loads(line)
    published = datetime.fromisoformat(event.pop("_weft_published_at"))
    assert abs((datetime.now(UTC) - published).total_seconds()) < 60
    assert event.keys() == {"n", "s", "extra key", "_weft_rowid", "_weft_rowid_text", "_weft_publish_id"}
    assert event["_weft_rowid_text"] == str(event["_weft_rowid"])
    assert (event["s"], event["extra key"]) == (None, {"a": "é"})


def test_line_for_people(local, call) -> None:
    declare("events")
    weft.publish_sync("events", {"user": "u_1", "text": "two words", "none": None, "ok": True, "more": {"a": [1]}})
    weft.publish_sync("events", {"text": "\x1b[31mred\nline\x9b", "size": 1.5})
    first, second = call("streams", "tail", "events").stdout.splitlines()
    assert re.fullmatch(
        r' {5}1  \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ  user=u_1  text="two words"  ok=true  more=\{"a": \[1\]\}', first
    )
    assert second.endswith('text="\\u001b[31mred\\nline\\x9b"  size=1.5')


def test_narrow_terminal_breaks_between_fields(on_a_terminal, run, shop) -> None:
    run("streams", "publish", "numbers", "--data", json.dumps({"n": 1, "s": "x" * 40, "more": "y" * 40}))
    _, screen = on_a_terminal("streams", "tail", "numbers")
    lines = screen.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1:] == ["        more=" + "y" * 40]


def test_long_value_is_cut_on_a_terminal_only(on_a_terminal, run, shop) -> None:
    run("streams", "publish", "numbers", "--data", json.dumps({"s": "x" * 5000}))
    assert "x" * 200 + "… (5,000 characters)" in on_a_terminal("streams", "tail", "numbers")[1].replace("\n", "")
    assert "x" * 5000 in run("streams", "tail", "numbers").stdout
