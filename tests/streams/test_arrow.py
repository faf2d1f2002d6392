"""A range of a stream as Arrow: the same values as `consume` gives, in the same order, in bounded memory."""

from __future__ import annotations

import gc
import json
import math
import random
import struct
import threading
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import weft
from weft import NotFoundError
from weft.project import Project
from workers import declare, drain, log_of, same, start

FIELDS = {
    "s": "string",
    "b": "bool",
    "i": "int32",
    "l": "int64",
    "f": "float32",
    "d": "float64",
    "m": "decimal(38,18)",
    "p": "decimal(5,0)",
    "day": "date",
    "at": "timestamp",
    "j": "json",
    "raw": "bytes",
    "u": "uuid",
}
ARROW = {
    "s": pa.string(),
    "b": pa.bool_(),
    "i": pa.int32(),
    "l": pa.int64(),
    "f": pa.float32(),
    "d": pa.float64(),
    "m": pa.decimal128(38, 18),
    "p": pa.decimal128(5, 0),
    "day": pa.date32(),
    "at": pa.timestamp("us", "UTC"),
    "j": pa.string(),
    "raw": pa.binary(),
    "u": pa.string(),
    "_weft_rowid": pa.int64(),
    "_weft_published_at": pa.timestamp("us", "UTC"),
    "_weft_publish_id": pa.string(),
    "_weft_extra": pa.string(),
}
VALUES: dict[str, list[Any]] = {
    "s": [
        "",
        " ",
        "a,b",
        'say "hi"',
        "two\nlines",
        "\r\n",
        "\t",
        "\\N",
        "NULL",
        "null",
        "é",
        "😀",
        "\u2028",
        "x" * 5000,
    ],
    "b": [True, False],
    "i": [0, -1, 2**31 - 1, -(2**31)],
    "l": [0, -1, 2**63 - 1, -(2**63), 2**53 + 1],
    "f": [0.0, -0.0, 0.5, 2.0**127, -(2.0**-149), 3.4028234663852886e38],
    "d": [0.0, -0.0, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -2.2250738585072014e-308, 1e22, 123456789.123456789],
    "m": [Decimal("0"), Decimal("1.5"), Decimal(f"-{'9' * 20}.{'9' * 18}"), Decimal("0.000000000000000001")],
    "p": [Decimal("0"), Decimal("99999"), Decimal("-1")],
    "day": [date(1, 1, 1), date(9999, 12, 31), date(1969, 12, 31), date(2026, 1, 31)],
    "at": [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC),
    ],
    "j": [{}, [], 0, "text", {"a": [1, {"b": None}]}, ["\n", "é", '"'], False, 1e-7],
    "raw": [b"", b"\x00", bytes(range(256)), b"\n,\\", "é".encode()],
    "u": [UUID(int=0), UUID(int=2**128 - 1), UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")],
}


def read(
    columns: Sequence[str] | None = None, after: int = 0, upto: int = 2**62, stream: Any = "orders"
) -> list[dict[str, Any]]:
    return [row for batch in log_of(stream).read_arrow(after, upto, columns) for row in batch.to_pylist()]


def as_consumed(row: dict[str, Any]) -> dict[str, Any]:
    """A row in the types of events: JSON decoded, UUIDs made, what was beside the columns merged in."""
    row = dict(row)
    row["j"] = None if row["j"] is None else json.loads(row["j"])
    row["u"] = None if row["u"] is None else UUID(row["u"])
    for name, value in row.items():
        if isinstance(value, datetime):
            row[name] = value.astimezone(UTC)
    extra = row.pop("_weft_extra")
    return {**row, **(json.loads(extra) if extra else {})}


def test_every_type(streams: Project) -> None:
    """Extremes and nulls, alone and mixed: exactly what a consumer gets."""
    declare(fields=FIELDS)
    longest = max(map(len, VALUES.values()))
    events: list[dict[str, Any]] = [{}, dict.fromkeys(FIELDS)]
    for at in range(longest):
        events.append({name: values[at % len(values)] for name, values in VALUES.items()})
        events.append({name: values[at] for name, values in VALUES.items() if at < len(values)})
    weft.publish_sync("orders", events)
    consumed = [dict(event) for event in drain("orders")]
    rows = read()
    assert len(rows) == len(events)
    for row, event in zip(rows, consumed, strict=True):
        found = as_consumed(row)
        assert found.keys() == event.keys()
        for name, value in event.items():
            assert same(found[name], value), (name, found[name], value)


def test_schema(streams: Project) -> None:
    """The same types in every batch, whatever it holds: a batch of nulls fits the next one."""
    declare(fields=FIELDS)
    weft.publish_sync("orders", {})
    (nulls,) = log_of("orders").read_arrow(0, 2**62)
    weft.publish_sync("orders", {name: values[0] for name, values in VALUES.items()})
    (both,) = log_of("orders").read_arrow(0, 2**62)
    for batch in (nulls, both):
        batch.validate(full=True)
        assert {field.name: field.type for field in batch.schema} == ARROW
    assert nulls.schema.equals(both.schema)
    pa.Table.from_batches([nulls, both]).validate(full=True)


def test_any_float(streams: Project) -> None:
    declare(fields={"d": "float64", "f": "float32"})
    dice = random.Random(7)
    floats = [struct.unpack("<d", dice.randbytes(8))[0] for _ in range(3000)]
    floats = [value for value in floats if value == value and abs(value) != float("inf")]
    floats += [dice.uniform(-1000, 1000) for _ in range(1000)] + [round(dice.uniform(0, 1000), 2) for _ in range(1000)]
    small = [struct.unpack("<f", struct.pack("<f", dice.uniform(-1e6, 1e6)))[0] for _ in floats]
    weft.publish_sync("orders", [{"d": d, "f": f} for d, f in zip(floats, small, strict=True)])
    rows = read(["d", "f"])
    assert [repr(row["d"]) for row in rows] == list(map(repr, floats))
    assert [repr(row["f"]) for row in rows] == list(map(repr, small))


def test_floats_of_every_size(streams: Project) -> None:
    """Every power of two with its neighbours and some of its kind, of both signs, among nulls and zeros."""
    declare(fields={"d": "float64", "f": "float32"})
    dice = random.Random(11)
    doubles: list[float | None] = [None, 0.0, 0.5, None]
    for exponent in range(-1074, 1024):
        power = 2.0**exponent
        near = [power, math.nextafter(power, 0.0), math.nextafter(power, 1e308), power * dice.uniform(1, 1.99)]
        doubles += [value * sign for value in near for sign in (1, -1) if value]
        doubles += [None] * (exponent % 2) + [0.0] * (exponent % 3)
    doubles += [float(n) for bits in (31, 32, 52, 53, 62, 63, 64) for n in (2**bits - 1, 2**bits, -(2**bits))]
    singles = [
        None if value is None or not 1e-44 < abs(value) < 3.4e38 else struct.unpack("<f", struct.pack("<f", value))[0]
        for value in doubles
    ]
    dice.shuffle(doubles)
    weft.publish_sync("orders", [{"d": d, "f": f} for d, f in zip(doubles, singles, strict=True)])
    rows = read(["d", "f"])
    assert [row["d"] for row in rows] == doubles
    assert [row["f"] for row in rows] == singles


def test_texts_that_look_like_what_is_between_texts(streams: Project) -> None:
    """Control characters, alone and inside, with and without nulls in the same column."""
    names = ("all", "some", "none", "one")
    declare(fields=dict.fromkeys(names, "string"))
    texts = [*(chr(code) for code in range(1, 128)), "\x1e\x1f", "\x1f\x1f", "a\x1fb", "\x1e\x1e", "", "\x1f\n"]
    events = [
        {"all": text, "some": None if at % 3 else text, "none": None, "one": None if at else "\x1e"}
        for at, text in enumerate(texts)
    ]
    weft.publish_sync("orders", events)
    assert read(names) == events
    # Alone too: in a chunk without other texts nothing else tells them apart.
    offsets = [row["_weft_rowid"] for row in read(["_weft_rowid"])]
    for offset, event in zip(offsets, events, strict=True):
        assert read(names, offset - 1, offset) == [event]


def test_text_that_a_column_cannot_hold(streams: Project) -> None:
    """Whether it is in its column or beside it, it is there."""
    declare(fields={"s": "string"})
    texts = ["x\x00y", "\x00", "plain", None]
    weft.publish_sync("orders", [{"s": text} for text in texts])
    rows = read(["s", "_weft_extra"])
    assert [row["s"] if row["_weft_extra"] is None else json.loads(row["_weft_extra"])["s"] for row in rows] == texts


def test_extra_is_json_text(streams: Project) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": 1}, {"n": "one", "né w?": [1, None]}, {"n": 2}])
    (batch,) = log_of("orders").read_arrow(0, 2**62)
    assert batch.schema.field("_weft_extra").type == pa.string()
    first, second, third = batch.column("_weft_extra").to_pylist()
    assert first is third is None
    assert json.loads(second) == {"n": "one", "né w?": [1, None]}
    assert batch.column("n").to_pylist() == [1, None, 2]


def test_some_columns(streams: Project) -> None:
    """Those that were asked for, in that order."""
    declare(fields=FIELDS)
    weft.publish_sync("orders", [{"l": n, "s": str(n), "raw": b"%d" % n} for n in range(5)])
    for columns in (["l"], ["s"], ["_weft_rowid"], ["raw", "l"], ["_weft_rowid", "s", "l"], ("s", "_weft_extra")):
        (batch,) = log_of("orders").read_arrow(0, 2**62, columns)
        assert batch.schema.names == list(columns)
        assert batch.num_rows == 5
        if "l" in columns:
            assert batch.column("l").to_pylist() == list(range(5))


def test_an_unknown_column(streams: Project) -> None:
    """An error at the call, which names the nearest."""
    declare(fields={"price": "int64"})
    weft.publish_sync("orders", {"price": 1})
    with pytest.raises(NotFoundError, match="Did you mean 'price'"):
        log_of("orders").read_arrow(0, 2**62, ["_weft_rowid", "prize"])
    with pytest.raises(NotFoundError):
        log_of("orders").read_arrow(0, 2**62, ['x"; DROP TABLE orders; --'])


def test_hostile_column_names(streams: Project) -> None:
    names = ["select", "a b", "x:y", "group", "n$1", "_", "é", "order.by", "a@b", "c#d", "e/f", "Count", "g-h"]
    declare(fields={name: ("string" if at % 2 else "int64") for at, name in enumerate(names)})
    event = {name: (name if at % 2 else at) for at, name in enumerate(names)}
    weft.publish_sync("orders", event)
    assert read(names) == [event]


def test_ranges(streams: Project) -> None:
    """After the first end, up to and including the second."""
    declare(fields={"n": "int64"})
    first = weft.publish_sync("orders", [{"n": n} for n in range(10)])["first_rowid"]

    def numbers(after: int, upto: int) -> list[int]:
        return [row["n"] for row in read(["n"], after, upto)]

    assert numbers(first + 1, first + 4) == [2, 3, 4]
    assert numbers(first - 1, first) == [0]
    assert numbers(first + 7, 2**62) == [8, 9]
    assert numbers(0, 2**62) == list(range(10))
    for after, upto in ((first, first), (first + 5, first), (2**61, 2**62), (first + 9, 2**62), (-5, 0)):
        assert numbers(after, upto) == []


def test_an_empty_stream(streams: Project) -> None:
    declare(fields={"n": "int64"})
    assert read() == []
    weft.publish_sync("orders", {"n": 1})
    weft.trim_sync("orders", max_rows=0)
    assert read() == []


def test_more_than_a_chunk(streams: Project) -> None:
    """Complete and in order."""
    declare(fields={"n": "int64", "s": "string?", "m": "decimal(10,2)"})
    count = 30_000
    weft.publish_sync(
        "orders", [{"n": n, "s": None if n % 7 == 0 else f"text {n}", "m": Decimal(n) / 4} for n in range(count)]
    )
    weft.trim_sync("orders", max_rows=count - 100)
    numbers = []
    for batch in log_of("orders").read_arrow(0, 2**62, ["n", "s", "m"]):
        numbers += batch.column("n").to_pylist()
        assert batch.column("s").to_pylist() == [
            None if n % 7 == 0 else f"text {n}" for n in batch.column("n").to_pylist()
        ]
        assert batch.column("m").to_pylist() == [Decimal(n) / 4 for n in batch.column("n").to_pylist()]
    assert numbers == list(range(100, count))


def test_large_texts(streams: Project) -> None:
    """More in a chunk than a server joins or sends at once."""
    declare(fields={"n": "int64", "s": "string", "raw": "bytes"})
    lengths = [700_000 + n for n in range(30)]
    weft.publish_sync("orders", [{"n": n, "s": "é" * (length // 2)} for n, length in enumerate(lengths)])
    weft.publish_sync("orders", {"n": 30, "s": "x" * 8 * 1024 * 1024})
    weft.publish_sync("orders", {"n": 31, "s": "", "raw": b"\x00\xff" * 3_000_000})
    found = {
        row["n"]: (row["s"], row["raw"])
        for batch in log_of("orders").read_arrow(0, 2**62, ["n", "s", "raw"])
        for row in batch.to_pylist()
    }
    assert list(found) == list(range(32))
    assert all(found[n] == ("é" * (length // 2), None) for n, length in enumerate(lengths))
    assert found[30] == ("x" * 8 * 1024 * 1024, None)
    assert found[31] == ("", b"\x00\xff" * 3_000_000)


def test_columns_that_came_later(streams: Project) -> None:
    declare()
    weft.publish_sync("orders", {"a": 1})
    weft.publish_sync("orders", {"a": 2, "b": "new"})
    assert read(["a", "b"]) == [{"a": 1, "b": None}, {"a": 2, "b": "new"}]
    start('declare(); weft.publish_sync("orders", {"a": 3, "c": 1.5})').answer()
    assert read(["a", "c"]) == [{"a": 1, "c": None}, {"a": 2, "c": None}, {"a": 3, "c": 1.5}]


def test_a_reader_that_stops_early(streams: Project) -> None:
    """It leaves nothing behind that the next one trips over."""
    declare(fields={"n": "int64", "s": "string"})
    weft.publish_sync("orders", [{"n": n, "s": "x" * 100} for n in range(20_000)])
    for _ in range(3):
        batches = log_of("orders").read_arrow(0, 2**62, ["n"])
        assert next(batches).column("n").to_pylist()[:3] == [0, 1, 2]
        batches.close()
        next(log_of("orders").read_arrow(0, 2**62))
        gc.collect()
        assert len(read(["n"])) == 20_000
    weft.publish_sync("orders", {"n": 20_000})


def test_only_what_readers_may_see(streams: Project) -> None:
    """Events of a publish that is not committed are not there, and come later."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(3)])
    log = log_of("orders")
    head = log.head()
    weft.publish_sync("orders", {"n": 3})
    assert [row["n"] for row in read(["n"], 0, head)] == [0, 1, 2]
    assert [row["n"] for row in read(["n"], head)] == [3]


@pytest.mark.timing
def test_a_trim_at_the_same_time(streams: Project) -> None:
    """Whole events in order; what was never removed is there."""
    declare(fields={"n": "int64", "s": "string", "t": "string", "d": "float64", "e": "int64"})
    count = 20_000
    # What SQLite is asked for twice: a text that holds a separator, tiny numbers, what does not fit its column.
    events = [{"n": n, "s": f"text {n}", "t": f"\x1f{n}", "d": n * 1e-9, "e": f"no {n}"} for n in range(count)]
    weft.publish_sync("orders", events)
    offsets = [row["_weft_rowid"] for row in read(["_weft_rowid"])]
    done = threading.Event()

    def trim() -> None:
        for cut in range(500, count - 2000, 500):
            weft.trim_sync("orders", before=offsets[cut])
            if done.is_set():
                break

    trimmer = threading.Thread(target=trim)
    trimmer.start()
    try:
        for _ in range(5):
            rows = read(["_weft_rowid", "n", "s", "t", "d", "_weft_extra"])
            numbers = [row["n"] for row in rows]
            assert numbers == sorted(set(numbers))
            assert numbers[-2000:] == list(range(count - 2000, count))
            for row in rows:
                assert row.pop("_weft_rowid") == offsets[row["n"]]
                beside = json.loads(row.pop("_weft_extra"))
                assert {**row, **beside} == events[row["n"]]
    finally:
        done.set()
        trimmer.join()


@pytest.mark.timing
def test_readers_and_publishers_at_the_same_time(streams: Project) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 0})
    done = threading.Event()

    def publish() -> None:
        n = 1
        while not done.is_set():
            weft.publish_sync("orders", [{"n": n + k} for k in range(10)])
            n += 10

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(20):
            head = log_of("orders").head()
            rows = read(["_weft_rowid", "n"], 0, head)
            assert [row["n"] for row in rows] == list(range(len(rows)))
            assert rows[-1]["_weft_rowid"] == head
    finally:
        done.set()
        publisher.join()
