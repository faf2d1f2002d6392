"""Odd events by every way in and every way out, on every system: what was accepted comes back value by value, what was
refused has left nothing. What must happen is said in `tests/odd_values.py`."""

from __future__ import annotations

import asyncio
import base64
import csv
import functools
import io
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from click.testing import CliRunner

import odd_values
import weft
from odd_values import FIELDS, MISFIT, NOT_JSON, Number, Odd
from weft.cli import cli
from weft.project import Project
from weft.types import FieldType
from workers import declare, drain, log_of, plain, same

ODD, STRICT = "odd", "strict"
WAYS = ["library", "key", "http", "ndjson", "command", "csv"]
LINES = {"content-type": "application/x-ndjson"}
JSON = {"content-type": "application/json"}
Event = dict[str, Any]


class Streams:
    """Two streams with the same declared fields, one of which takes other keys and values too; and what they hold."""

    def __init__(self, http: Any) -> None:
        self.http = http
        self.held: dict[str, list[Event]] = {ODD: [], STRICT: []}
        declare(ODD, fields=FIELDS)
        declare(STRICT, fields=FIELDS, on_schema_drift="reject")

    def publish(self, odd: Odd, number: int) -> None:
        """Publish a few odd events, and note what of them the stream must hold."""
        stream, way = odd.dice.choice([ODD, ODD, STRICT]), odd.dice.choice(WAYS)
        size = 1 if way in ("command", "csv") else odd.dice.choice([1, 2, 3])
        known = log_of(stream).fields(fresh=True)
        if way in ("library", "key"):
            given: Any = [odd.event(FIELDS) for _ in range(size)]
            events: list[Event | None] = given
            is_taken = self._by_library(stream, given, f"{number}" if way == "key" else None)
        elif way == "csv":
            given = [odd.texts(FIELDS)]
            events = [of_csv(given[0])]
            is_taken = self._by_csv(stream, given[0])
        else:
            given = [odd.json_event(FIELDS) for _ in range(size)]
            events = [decoded(odd_values.read_json(each), known) for each in given]
            if way == "command":
                is_taken = self._by_command(stream, given[0])
            else:
                is_taken = self._by_http(stream, given, f"{number}" if way == "http" else None)
        fields = log_of(stream).fields(fresh=True)
        told = way, short(given)
        if is_taken:
            assert None not in events, told
            self.held[stream] += [kept_event(each, fields) for each in events if each is not None]
        else:
            assert fields == known, told
            if way in ("key", "http"):  # the key is free
                weft.publish_sync(stream, {"int64": number}, idempotency_key=f"{number}")
                self.held[stream].append({"int64": number})
        must = {refusal(each, known, stream) for each in events}
        if not is_taken:
            # A command takes no text that is not base64 for bytes, where the stream would keep the text.
            assert must & {"must", "may"} or (way == "command" and "bytes" in (events[0] or ())), told
        assert not is_taken or "must" not in must, told

    def _by_library(self, stream: str, events: list[Event], key: str | None) -> bool:
        try:
            done = weft.publish_sync(stream, events, idempotency_key=key)
        except weft.SchemaError as error:
            assert error.index is not None
            return False
        assert done["rows_received"] == len(events)
        if key is not None:
            again = weft.publish_sync(stream, events, idempotency_key=key)
            assert again["rows_deduplicated"] == len(events)
            with pytest.raises(weft.SettingsError):
                weft.publish_sync(stream, [*events, {}], idempotency_key=key)
        return True

    def _by_http(self, stream: str, texts: list[str], key: str | None) -> bool:
        """As lines, or with a key as a list."""
        body = "\n".join(texts) if key is None else f"[{','.join(texts)}]"
        headers = LINES if key is None else {**JSON, "idempotency-key": key}
        send = functools.partial(self.http.post, f"/api/v1/streams/{stream}", headers=headers)
        done = send(content=body.encode())
        assert done.status_code in (202, 400, 422), (done.text, short(body))
        if done.status_code != 202:
            return False
        if key is not None:
            again = send(content=body.encode())
            assert (again.status_code, again.json()["rows_deduplicated"]) == (202, len(texts)), short(body)
            assert send(content=b"[{}" + b",{}" * len(texts) + b"]").status_code == 422
        return True

    def _by_csv(self, stream: str, texts: dict[str, str]) -> bool:
        file = io.StringIO()
        csv.writer(file).writerows([texts, texts.values()])
        return self._by_command(stream, file.getvalue(), "csv")

    def _by_command(self, stream: str, text: str, layout: str = "ndjson") -> bool:
        done = invoke("publish", stream, "-", "--input", layout, stdin=text)
        assert done.exit_code in (0, 1), (done.stderr, text)
        assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, text)
        return bool(done.exit_code == 0)


def invoke(*arguments: object, stdin: str | None = None) -> Any:
    content = None if stdin is None else stdin.encode()
    return CliRunner().invoke(cli, ["streams", *map(str, arguments)], input=content, prog_name="weft")


def refusal(event: Event | None, known: dict[str, FieldType], stream: str) -> str:
    """Whether a publish of this event `must` be refused, `may` be, or cannot be ("no")."""
    if event is None or any(type(key) is not str or key.lower().startswith("_weft_") for key in event):
        return "must"
    if NOT_JSON in map(odd_values.plain, event):
        return "must"
    found = "no"
    for key, value in event.items():
        kind = known.get(key)
        is_kept = kind is not None and odd_values.kept(value, kind) is not MISFIT
        if stream == STRICT and not is_kept:
            return "must"
        if not is_kept and (odd_values.plain({key: value}) is NOT_JSON or is_rounded(value, kind)):
            # What is to be the type of a new column is not said here.
            found = "may" if kind is None else "must"
            if found == "must":
                return found
    return found


def is_rounded(value: Any, kind: FieldType | None) -> bool:
    """Whether a number is in the place of a decimal that has other digits than the float that could be kept."""
    is_decimal = isinstance(value, Number) and kind is not None and kind.base == "decimal"
    return is_decimal and Decimal(value.text) != Decimal(repr(float(value)))


def decoded(event: Event | None, fields: dict[str, FieldType]) -> Event | None:
    """An event of JSON, with the bytes that its texts stand for."""
    for key, value in (event or {}).items():
        if key in fields and fields[key].base == "bytes" and type(value) is str:
            with suppress(ValueError):
                event = {**(event or {}), key: base64.b64decode(value, validate=True)}
    return event


def of_csv(texts: dict[str, str]) -> Event | None:
    """What a row of CSV says, by the types of its fields; `None` where a text is no value of its type."""
    try:
        return {name: None if not text else _OF_CSV.get(FIELDS[name], str)(text) for name, text in texts.items()}
    except (ValueError, KeyError):
        return None


def _whole(text: str) -> int:
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return int(text)


def _fraction(text: str) -> float:
    if "_" in text:
        raise ValueError(text)
    return float(text)


def _document(text: str) -> Any:
    if text in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(text)
    return json.loads(text)


_BOOLEANS = {**dict.fromkeys(("true", "t", "yes", "1"), True), **dict.fromkeys(("false", "f", "no", "0"), False)}
_OF_CSV: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: _BOOLEANS[text.strip().lower()],
    **dict.fromkeys(("int32", "int64"), _whole),
    **dict.fromkeys(("float32", "float64"), _fraction),
    "json": _document,
    "bytes": lambda text: base64.b64decode(text, validate=True),
}


def kept_event(event: Event, fields: dict[str, FieldType]) -> Event:
    """What readers get of an event, without nulls."""
    found = {}
    for key, value in event.items():
        kept = odd_values.kept(value, fields[key]) if key in fields else MISFIT
        found[key] = odd_values.plain(value) if kept is MISFIT else kept
    return {key: value for key, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------------------------------ ways out


async def subscribed(stream: str, count: int) -> list[Event]:
    found: list[Event] = []
    async with weft.subscribe(stream, since="start", batch_size=7, timeout=0.05) as live:
        while len(found) < count:
            found += await asyncio.wait_for(anext(live), 60)
    return found


async def entries(stream: str) -> list[Event]:
    async with weft.get_connection("default").xconsumer(streams=[stream], group="entries", consumer="me") as consumer:
        found = []
        while batch := await consumer.get_batch():
            found += [entry.field_values for _, entry in batch]
            await consumer.ack(batch)
        return found


def pages(http: Any, stream: str) -> list[Event]:
    found: list[Event] = []
    path = f"/api/v1/streams/{stream}/events?limit=11"
    page = http.get(path).json()
    while page["events"]:
        found += page["events"]
        page = http.get(f"{path}&after={page['next_text']}").json()
    return found


def leased(http: Any, stream: str) -> list[Event]:
    path, me = f"/api/v1/streams/{stream}", {"consumer": "web"}
    answer = http.post(f"{path}/consume", json={**me, "batch_size": 1000}).json()
    done = http.post(f"{path}/ack", json={**me, "events": answer["events"]})
    assert done.status_code == 200, done.text
    found: list[Event] = answer["events"]
    return found


def printed(*arguments: object) -> list[Event]:
    done = invoke(*arguments, "--format", "json")
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def same_json(got: Any, held: Any) -> bool:
    """Whether a value of JSON is the value that the stream holds."""
    if isinstance(held, datetime):
        return isinstance(got, str) and datetime.fromisoformat(got) == held
    return same(got, odd_values.as_json(held))


def same_cell(cell: Any, held: Any, kind: FieldType | None) -> bool:
    """Whether a cell of a frame is the value that the stream holds. A column that is not declared, with values that do
    not fit its type, has texts; JSON is a text always."""
    if held is None or cell is None:
        return held is cell
    if isinstance(cell, bytes) and not isinstance(held, bytes):
        cell = cell.decode()
    if kind is not None and kind.base == "json" and same(_parsed(cell), held):
        return True
    if not isinstance(cell, str) or isinstance(held, str):
        return bool(cell == held) and isinstance(cell, bool) == isinstance(held, bool)
    if kind is not None and kind.base == "float32" and odd_values.kept(held, kind) == held:
        return odd_values.float32(float(cell)) == held
    if isinstance(held, Decimal | UUID | float) and not isinstance(held, bool):
        return bool(type(held)(cell) == held)
    if isinstance(held, date):
        return type(held).fromisoformat(cell) == held
    return same(_parsed(cell), held)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return MISFIT


def short(value: Any) -> str:
    """A value as an error shows it."""
    return repr(value)[:500]


def check(found: list[Event], held: list[Event], is_same: Callable[[Any, Any], bool], way: str) -> None:
    assert len(found) == len(held), way
    for number, (got, event) in enumerate(zip(map(plain, found), held, strict=True)):
        assert got.keys() == event.keys(), (way, number, got.keys() ^ event.keys())
        wrong = {key: (got[key], value) for key, value in event.items() if not is_same(got[key], value)}
        assert not wrong, (way, number, short(wrong))


DECLARED = {name: FieldType.parse(kind) for name, kind in FIELDS.items()}
AS_TEXT = {name: "bytes" if kind.base == "bytes" else "string" for name, kind in DECLARED.items()}


def typed(held: list[Event]) -> list[Event]:
    """Events as their frames have them: a value that does not fit its declared field is null."""
    return [
        {
            name: None if name in DECLARED and odd_values.kept(value, DECLARED[name]) is MISFIT else value
            for name, value in event.items()
        }
        for event in held
    ]


def check_frame(frame: pa.Table, held: list[Event], fields: dict[str, FieldType], way: str) -> None:
    columns = {name: frame[name].to_pylist() for name in frame.column_names}
    assert len(frame) == len(held), way
    for number, event in enumerate(held):
        assert event.keys() <= columns.keys(), (way, number, event.keys() - columns.keys())
        for name, column in columns.items():
            wanted = event.get(name)
            told = way, number, name, short(column[number]), short(wanted)
            assert same_cell(column[number], wanted, fields.get(name)), told


@pytest.mark.brief("sqlite-0", "postgres-1", "mysql-2", "redis-3")
@pytest.mark.parametrize("seed", range(12))
def test_what_was_accepted_comes_back(streams: Project, http: Any, seed: int, count: Callable[..., int]) -> None:
    made, odd = Streams(http), Odd(seed)
    for number in range(count(150, brief=8)):
        made.publish(odd, number)
    for stream, held in made.held.items():
        check(drain(stream), held, same, "consume")
        check(asyncio.run(subscribed(stream, len(held))), held, same, "subscribe")
        check(asyncio.run(entries(stream)), held, same, "entries")
        path = f"/api/v1/streams/{stream}/subscribe?since=start"
        for way, found in {
            "pages": pages(http, stream),
            "consume over HTTP": leased(http, stream),
            "subscribe over HTTP": http.follow(path, len(held)) if held else [],
            "weft streams tail": printed("tail", stream, "--since", "start"),
            "weft streams consume": printed("consume", stream, "cli", "--batch-size", 1000, "--ack"),
        }.items():
            json_events = [
                {key: value for key, value in each.items() if not key.startswith("_weft_")} for each in found
            ]
            check(json_events, held, same_json, way)
        fields = log_of(stream).fields(fresh=True)
        bare: dict[str, Any] = {"to": "arrow", "include_id": False, "include_timestamp": False}
        frames = {
            "read_stream": weft.read_stream("default", stream, **bare),
            "read_stream of a group": weft.read_stream("default", stream, group="f", consumer="c", **bare),
        }
        for way, frame in frames.items():
            check_frame(frame, typed(held), fields, way)
            assert [frame.schema.field(name).type for name in DECLARED] == [kind.arrow for kind in DECLARED.values()]
        own = [{name: value for name, value in event.items() if name in DECLARED} for event in held]
        check_frame(weft.read_stream("default", stream, schema=AS_TEXT, **bare), own, fields, "texts")
        first = 0
        for frame in weft.iter_stream("default", stream, batch_size=5, count=len(held), **bare) if held else ():
            check_frame(frame, typed(held)[first : first + len(frame)], fields, "iter_stream")
            first += len(frame)


def _as_record(event: Event) -> Event | None:
    """An event as a quarantine keeps it, or `None` where JSON cannot hold it."""

    def written(value: Any) -> Any:
        if isinstance(value, bytes | date | Decimal | UUID):
            return odd_values.as_json(value)
        raise TypeError(value)

    try:
        found = json.loads(json.dumps(event, default=written, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return None if odd_values.plain(found) is NOT_JSON else found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.brief("sqlite-0", "postgres-1", "mysql-0", "redis-1")
def test_what_does_not_fit_is_put_aside(streams: Project, seed: int, count: Callable[..., int]) -> None:
    odd = Odd(("aside", seed))
    fields = {name: FieldType.parse(kind) for name, kind in FIELDS.items()}
    declare(ODD, fields=FIELDS, on_schema_drift="quarantine")
    held: list[Event] = []
    aside: list[Event | None] = []
    for _ in range(count(300, brief=8)):
        events = [odd.event(FIELDS) for _ in range(odd.dice.choice([1, 2, 3]))]
        bad = [each for each in events if refusal(each, fields, STRICT) == "must"]
        records = [_as_record(each) for each in bad]
        has_bad_keys = any(refusal(dict.fromkeys(each), fields, ODD) == "must" for each in events)
        try:
            done = weft.publish_sync(ODD, events)
        except weft.SchemaError:
            assert None in records or has_bad_keys, short(events)
            continue
        assert not has_bad_keys and done["rows_quarantined"] == len(bad), short(events)
        held += [kept_event(each, fields) for each in events if refusal(each, fields, STRICT) != "must"]
        aside += records
    check(drain(ODD), held, same, "consume")
    found = [each["event"] for each in drain(f"{ODD}__quarantine")]
    assert len(found) == len(aside)
    for got, record in zip(found, aside, strict=True):
        assert same(got, record), (short(got), short(record))
