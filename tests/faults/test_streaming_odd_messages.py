"""Odd messages from every source into every target, under SQL of many shapes: each is in the target with exactly its
values, or a dead letter with its offset, once, and none stops the pipeline. The types alone are tried at more length in
`tests/systems/kafka/test_odd_messages.py`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import weft
from broker_queues import BROKERS, BrokerQueue, broker_queue
from conftest import System
from engine.streaming.conftest import here, run_once  # noqa: F401 - fixture
from odd_values import BROKEN, MISFIT, Odd, kept
from weft.engine.load import open_tables
from weft.engine.streaming.dead_letters import stream_of
from weft.systems.sql.tables import Slice
from weft.types import FieldType
from workers import drain

pytest.importorskip("pyspark")
pytestmark = pytest.mark.usefixtures("here", "spark")

Message = dict[str, Any]
COLUMNS = {"id": "string", "valid": "bool", "amount": "int64", "name": "string"}
NESTED = {"tags": "json", "o": "json"}
SHAPES: dict[str, tuple[str | None, Callable[[Message], Any]]] = {
    "as it is": (None, lambda sent: {name: sent.get(name) for name in (*COLUMNS, *NESTED)}),
    "filter": ("SELECT id, amount AS value FROM source WHERE valid", lambda sent: sent.get("amount")),
    "arithmetic": ("SELECT id, amount + 1 AS value FROM source", lambda sent: _plus_one(sent.get("amount"))),
    "condition": ("SELECT id, CASE WHEN valid THEN name END AS value FROM source", lambda sent: _named(sent)),
    "text": ("SELECT id, concat(name, '!') AS value FROM source", lambda sent: _exclaimed(sent.get("name"))),
    "cast": ("SELECT id, CAST(name AS BIGINT) AS value FROM source", lambda sent: _number(sent.get("name"))),
    "sum": ("SELECT id, sum(amount) AS value FROM source GROUP BY id", lambda sent: sent.get("amount")),
    "join": (
        "SELECT s.id, s.amount AS value FROM source s LEFT JOIN source t ON s.id = t.id AND t.valid",
        lambda sent: sent.get("amount"),
    ),
    "object": ("SELECT id, o.x AS value FROM source", lambda sent: (sent.get("o") or {}).get("x")),
    "array": ("SELECT id, size(tags) AS value FROM source", lambda sent: _length(sent.get("tags"))),
    "element": ("SELECT id, tags[0] AS value FROM source", lambda sent: (sent.get("tags") or [None])[0]),
}
# Of these a target does not know which row of the source a row is.
WITHOUT_OFFSETS = {"sum", "join"}
FLAT = tuple(SHAPES)[:8]
"""The shapes for sources without objects and arrays."""
TARGETS = ["sqlite", "postgres", "mysql", "duckdb", "delta", "parquet", "json_lines", "csv", "stream", "redis", "kafka"]


def _plus_one(amount: Any) -> Any:
    return None if amount is None else amount + 1


def _named(sent: Message) -> Any:
    return sent.get("name") if sent.get("valid") is True else None


def _exclaimed(name: Any) -> Any:
    return None if name is None else f"{name}!"


def _number(name: Any) -> Any:
    return None if name is None else int(name)


def _length(tags: Any) -> Any:
    return None if tags is None else len(tags)


def usual(odd: Odd, number: int) -> Message:
    dice = odd.dice
    return {
        "id": f"m{number}",
        "valid": True,
        "amount": dice.randrange(100),
        "name": str(dice.randrange(100)),
        "tags": [1, 2],
        "o": {"x": dice.randrange(9)},
    }


def unusual(odd: Odd, number: int) -> Message:
    """A usual message with one or two odd values, or without one."""
    dice, message = odd.dice, usual(odd, number)
    keys = [*list(message)[1:], f"extra{dice.randrange(3)}"]
    for name in dice.sample(keys, dice.choice([1, 2])):
        message[name] = shallow(odd.document())
    if dice.random() < 0.2:
        message.pop(dice.choice(keys), None)
    return message


def shallow(value: Any) -> Any:
    """A value without odd keys: what becomes of those is tested elsewhere."""
    if isinstance(value, dict):
        return {name: shallow(each) for name, each in zip("xyz", value.values(), strict=False)}
    return [shallow(each) for each in value] if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------------------------- sources


class Source:
    """Where messages come from. `send` gives the offset of a message, or `None` where the source refused it."""

    shapes: Sequence[str] = tuple(SHAPES)
    takes_broken = True
    has_offsets = True
    json_columns: Collection[str] = ()
    """Columns whose values are JSON, whatever they are."""
    is_exact = True
    """Whether no value becomes a text, and no integer a double."""
    declared: dict[str, Any]

    def adapted(self, message: Message) -> Message:
        """A message that the source can have."""
        return message

    def send(self, message: Message | str) -> str | None:
        raise NotImplementedError

    def flush(self) -> None:
        """All messages of a batch were sent."""

    def meant(self, message: Message) -> Message:
        """What a row of this message says."""
        return message


class Queue(Source):
    """A topic or queue of a broker."""

    def __init__(self, queue: BrokerQueue) -> None:
        self.queue, self.count = queue, 0
        self.texts: list[bytes] = []
        self.declared = {"source": queue.source}
        if queue.source.columns:
            self.shapes, self.json_columns = FLAT, NESTED

    def send(self, message: Message | str) -> str:
        self.texts.append(
            (message if isinstance(message, str) else json.dumps(message)).encode("utf-8", "surrogatepass")
        )
        self.count += 1
        return self.queue.offset(self.count - 1)

    def flush(self) -> None:
        self.queue.put(self.texts)
        self.texts.clear()


class Events(Source):
    """A declared stream."""

    shapes = FLAT
    takes_broken = False
    json_columns = NESTED

    def __init__(self, connection: Any) -> None:
        self.stream = weft.stream(name="messages", fields={**COLUMNS, **NESTED}, connection=connection)(lambda: None)
        self.declared = {"source": self.stream}

    def send(self, message: Message | str) -> str | None:
        try:
            return str(weft.publish_sync(self.stream, message)["first_rowid"])
        except weft.SchemaError:
            return None


class Entries(Events):
    """A declared stream of Redis to which another client adds texts."""

    def __init__(self, connection: Any, url: str) -> None:
        import redis

        super().__init__(connection)
        self.client = redis.Redis.from_url(url)

    def send(self, message: Message | str) -> str | None:
        assert isinstance(message, dict)
        entry = {name: _text(value) for name, value in message.items() if value is not None}
        first, _, second = self.client.xadd("messages", entry).decode().partition("-")
        return str((int(first) << 20) + int(second))

    def meant(self, message: Message) -> Message:
        return {name: _of_text(name, _text(value)) for name, value in message.items() if value is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of_text(name: str, text: str) -> Any:
    """What a text is in a field of its declared type."""
    if name == "valid":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    try:
        return int(text) if name == "amount" else json.loads(text) if name in NESTED else text
    except ValueError:
        return text


class Files(Source):
    has_offsets = False
    is_exact = False

    def adapted(self, message: Message) -> Message:
        """Without what becomes a text, in the words of Spark."""
        return message if isinstance(message.get("name", ""), str) else {**message, "name": None}

    def __init__(self, project: Path, ending: str) -> None:
        self.folder, self.ending, self.number = project / "inbox/raw", ending, 0
        self.folder.mkdir(parents=True)
        self.lines: list[str] = []
        inbox = weft.ObjectStoreLocalConnection(str(project / "inbox"), name="inbox")
        self.declared = {"source": weft.Source(connection=inbox, query="raw", columns=COLUMNS)}

    def send(self, message: Message | str) -> str:
        text = message if isinstance(message, str) else json.dumps(message)
        self.lines.append(text)
        return str(self._id(text))

    def _id(self, text: str) -> str:
        found = re.search(r"\bm\d+\b", text)
        assert found, text
        return found[0]

    def flush(self) -> None:
        self.number += 1
        text = "".join(f"{line}\n" for line in self.lines)
        (self.folder / f"{self.number}.{self.ending}").write_bytes(text.encode("utf-8", "surrogatepass"))
        self.lines.clear()


class Csv(Files):
    shapes = FLAT
    takes_broken = False

    def adapted(self, message: Message) -> Message:
        """Without a NUL, which Spark's parser loses, and on one line: it gives the last line of a bad row alone."""
        texts = {name: value for name, value in super().adapted(message).items() if isinstance(value, str)}
        return {**message, "name": "", **{name: re.sub("[\0\r\n]", "", text) for name, text in texts.items()}}

    def send(self, message: Message | str) -> str:
        assert isinstance(message, dict)
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([_text(message.get(name, "")) for name in COLUMNS])
        self.lines.append(line.getvalue())
        return str(message["id"])

    def flush(self) -> None:
        self.lines.insert(0, ",".join(COLUMNS))
        super().flush()

    def meant(self, message: Message) -> Message:
        texts = {name: _text(message.get(name, "")) for name in COLUMNS}
        return {name: _of_text(name, text) for name, text in texts.items() if text}


class Rows(Files):
    """Files of Parquet, or a table of Delta: their columns have types."""

    shapes = FLAT
    takes_broken = False
    is_exact = True
    schema = pa.schema({name: FieldType.parse(kind).arrow for name, kind in COLUMNS.items()})

    def __init__(self, project: Path, kind: str) -> None:
        super().__init__(project, kind)
        self.rows: list[Message] = []
        self.connection: Any = weft.ObjectStoreLocalConnection(str(project / "inbox"), name="inbox")
        if kind == "delta":
            self.connection = weft.DeltaLocalConnection(str(project / "tables"), name="inbox")
        self.declared = {"source": self.connection, "source_query": "raw"}

    def adapted(self, message: Message) -> Message:
        kinds = {name: FieldType.parse(kind) for name, kind in COLUMNS.items()}
        typed = {name: kept(value, kinds[name]) for name, value in message.items() if name in kinds}
        return {name: value for name, value in typed.items() if value is not MISFIT}

    def send(self, message: Message | str) -> str:
        assert isinstance(message, dict)
        self.rows.append(message)
        return str(message["id"])

    def flush(self) -> None:
        self.number += 1
        table = pa.Table.from_pylist(self.rows, self.schema)
        self.rows.clear()
        if self.ending == "delta":
            weft.load(table, target="raw", connection=self.connection)
        else:
            pq.write_table(table, self.folder / f"{self.number}.parquet")


SOURCES: dict[str, Callable[..., Source]] = {
    **{kind: lambda made, kind=kind: Queue(broker_queue(kind, made.get)) for kind in BROKERS},
    "kafka with columns": lambda made: Queue(broker_queue("kafka", made.get, columns={**COLUMNS, **NESTED})),
    **{
        f"stream of {kind}": lambda made, kind=kind: Events(weft.connect(name="events", url=made.url(kind)))
        for kind in ("sqlite", "postgres", "mysql", "redis")
    },
    "entries of redis": lambda made: made.entries(),
    "json": lambda made: Files(made.project, "jsonl"),
    "csv": lambda made: Csv(made.project, "csv"),
    "parquet": lambda made: Rows(made.project, "parquet"),
    "delta": lambda made: Rows(made.project, "delta"),
}


# -------------------------------------------------------------------------------------------------------------- targets


class Made:
    """Makes the places of a test."""

    def __init__(self, request: pytest.FixtureRequest, project: Path, open_system: Any, stack: ExitStack) -> None:
        self.get, self.project, self._open, self._stack = request.getfixturevalue, project, open_system, stack

    def url(self, kind: str) -> str:
        if kind in ("sqlite", "duckdb"):
            return f"{kind}:///{self.project}/{kind}.db"
        return str(self._stack.enter_context(self._open(kind)).url)

    def entries(self) -> Entries:
        url = self.url("redis")
        return Entries(weft.connect(name="events", url=url), url)

    def target(self, kind: str) -> tuple[weft.Target, Callable[[], list[Message]]]:
        """A target, and what reads its rows."""
        if kind == "kafka":
            kafka = self.get("kafka")
            topic = kafka.create_topic()
            broker = weft.KafkaConnection(name="out", bootstrap_servers=kafka.bootstrap)
            read = lambda: [json.loads(each.value()) for each in kafka.messages(topic)]  # noqa: E731
            return weft.Target(connection=broker, stream=topic), read
        if kind in ("stream", "redis"):
            connection = weft.connect(name="out", url=self.url("sqlite" if kind == "stream" else kind))
            stream = weft.stream(name="copies", connection=connection)(lambda: None)
            return weft.Target(stream=stream), lambda: drain(stream)
        if kind in ("delta", "parquet", "json_lines", "csv"):
            place = str(self.project / "lake")
            lake: Any = weft.DeltaLocalConnection(place, name="lake")
            if kind != "delta":
                lake = weft.ObjectStoreLocalConnection(place, name="lake", format=kind)
            found = lambda: weft.read("copies", source=lake).collect()  # noqa: E731
            target = weft.Target(connection=lake, **{"table" if kind == "delta" else "prefix": "copies"})
            return target, lambda: [each.asDict(recursive=True) for each in found()]
        connection = weft.connect(name="out", url=self.url(kind))
        return weft.Target(connection=connection, table=(None, "copies")), lambda: _rows(connection)


def _rows(connection: Any) -> list[Message]:
    tables = open_tables(connection)
    try:
        sql = f"SELECT * FROM {tables.table(None, 'copies')}"
        return [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
    finally:
        tables.close()


def is_same(stored: Any, sent: Any, is_exact: bool = True) -> bool:
    """Whether a target holds what was sent. Keys that an object does not have are null there; where a target has no
    objects and arrays, they are JSON."""
    if isinstance(stored, str) and not isinstance(sent, str) and (isinstance(sent, dict | list) or not is_exact):
        stored = json.loads(stored, parse_float=Decimal)
    if isinstance(sent, dict):
        if not isinstance(stored, dict):
            return False
        return all(is_same(stored.get(each), sent.get(each), is_exact) for each in {*sent, *stored})
    if isinstance(sent, list):
        is_list = isinstance(stored, list) and len(stored) == len(sent)
        return is_list and all(is_same(*pair, is_exact) for pair in zip(stored, sent, strict=True))
    if isinstance(sent, bool) or sent is None or isinstance(sent, str):
        return type(stored) is type(sent) and stored == sent
    if isinstance(stored, bool) or not isinstance(stored, int | float | Decimal):
        return False
    is_rounded = not is_exact and float(stored) == float(sent)
    return is_rounded or stored == sent or (isinstance(sent, float) and Decimal(stored) == Decimal(repr(sent)))


@pytest.fixture
def made(
    request: pytest.FixtureRequest, project: Path, open_system: Callable[[str], AbstractContextManager[System]]
) -> Iterator[Made]:
    with ExitStack() as stack:
        yield Made(request, project, open_system, stack)


def check(source: Source, shape: str, made: Made, target: str, seed: object, batches: int) -> None:
    """Send batches of messages through a pipeline, and account for each."""
    sql, expected = SHAPES[shape]
    odd = Odd(seed)
    place, read = made.target(target)
    sent: dict[str, Message | None] = {}
    plain: set[str] = set()
    ids: dict[str, str] = {}
    for batch in range(batches):
        numbers = range(100 * batch, 100 * batch + 20)
        messages: list[Message | str] = [usual(odd, each) for each in numbers[:12]]
        usual_ids = {each["id"] for each in messages if isinstance(each, dict)}
        messages += [unusual(odd, each) for each in numbers[12:]]
        if source.takes_broken:
            broken = ['{"a":1}{"b":2}', *(each for each in BROKEN if each.startswith('{"'))]
            # Spark takes these for numbers.
            broken = [each for each in broken if source.has_offsets or not re.search("NaN|Infinity|e400|e999", each)]
            messages += [f'{{"id":"m{100 * batch + 50}",{odd.dice.choice(broken)[1:]}']
        odd.dice.shuffle(messages)
        for each in messages:
            message = each if isinstance(each, str) else source.adapted(each)
            offset = source.send(message)
            if offset is None:
                continue
            sent[offset] = None if isinstance(message, str) else source.meant(message)
            if isinstance(message, dict):
                ids[message["id"]] = offset
                if message["id"] in usual_ids:
                    plain.add(offset)
        source.flush()
        run_once(
            name="odd",
            targets=[place],
            transform_sql=sql,
            transform_on_error=None if sql is None else "dlq",
            dead_letter_stream="failed",
            **source.declared,
        )
    letters = drain(stream_of("failed", None))
    found: Counter[str] = Counter()
    for letter in letters:
        offset = letter["offset"] if source.has_offsets else None
        if offset is None:
            assert not source.has_offsets or (shape in WITHOUT_OFFSETS and letter["stage"] == "store"), letter
            named = re.search(r"\bm\d+\b", letter["payload"])
            assert named, letter["payload"][:300]
            offset = ids.get(named[0], named[0])
        found[offset] += 1
    # From stream to stream, JSON is what it was; elsewhere it is a text.
    keeps_json = isinstance(source, Events) and target in ("stream", "redis")
    stored = read()
    assert {row["id"] for row in stored} <= ids.keys(), sent
    times = found + Counter(ids[row["id"]] for row in stored)
    assert not [offset for offset, many in times.items() if many > 1]
    for row in stored:
        message = sent[ids[row["id"]]]
        assert message is not None, row
        wanted = expected(message)
        for name, value in (wanted if sql is None else {"value": wanted}).items():
            got = row.get(name)
            # In JSON it is escaped.
            if target == "csv" and isinstance(value, str) and name not in source.json_columns:
                value = value.replace("\0", "")  # which Spark's parser loses
            if name in source.json_columns and isinstance(got, str) and not keeps_json:
                got = json.loads(got)
            assert is_same(got, value, source.is_exact), (row["id"], name, got, value, message)
    # A filter leaves out what is not valid; nothing else may be missing.
    for offset in sent.keys() - times.keys():
        message = sent[offset]
        assert shape == "filter" and message is not None and message.get("valid") is not True, (offset, message)
    assert not plain & found.keys(), [each["error"] for each in letters]


@pytest.mark.kafka
@pytest.mark.brief("cast")
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, made: Made, count: Callable[..., int]) -> None:
    check(SOURCES["kafka"](made), shape, made, "sqlite", shape, count(20, brief=2))


@pytest.mark.brief("stream of sqlite-duckdb")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_pairs(source: str, target: str, made: Made, count: Callable[..., int]) -> None:
    """Under one shape each, another one for each pair."""
    opened = SOURCES[source](made)
    shape = opened.shapes[(list(SOURCES).index(source) + TARGETS.index(target)) % len(opened.shapes)]
    check(opened, shape, made, target, (source, target), count(3, brief=2))


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_pairs_without_sql(source: str, target: str, made: Made) -> None:
    check(SOURCES[source](made), "as it is", made, target, (source, target), 3)
