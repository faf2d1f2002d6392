"""Brokers without positions, which forget a message when it is acknowledged. A receiver copies their messages into a
log of ours, and pipelines read the log.

A receiver stores messages in a hidden stream, and only then acknowledges them. A batch reads the stream by its offsets,
so that one which is tried again has the same rows. A message that the broker delivers again has the key under which it
was stored, and is not stored again. All pipelines that read one queue share its stream, and each gets every message;
what all of them have read is removed.

The receiver is a thread of the process in which Spark asks for new offsets. It ends with the query, also where the
driver is killed, and the broker then delivers again what it had not acknowledged. Several receivers of one queue may
run at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from weft import hooks, tracing
from weft.columns import UTC_TIME
from weft.errors import ConnectionFailedError, DeclarationError, StorageError, WeftError
from weft.spark_support.folder import Location
from weft.spark_support.sessions import reached
from weft.systems.base import Connection, system_for
from weft.systems.codec import Codec
from weft.systems.log import ROWID, Batch, Log
from weft.systems.log_offsets import Offsets, ranges
from weft.systems.log_positions import LogPositions
from weft.systems.message_source import Messages, MessageSource
from weft.systems.messages import MOST_BYTES_HERE, MOST_HERE, TRACEPARENT
from weft.systems.stream_source import MAX_ROWS, BatchRows, Rewind
from weft.types import FieldType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger("weft.engine")
SCHEMA = "weft"
_FIELDS = {
    "value": FieldType("bytes", nullable=True),
    "sent_at": FieldType("timestamp", nullable=True),
    # JSON, as bytes: texts of messages may have characters that no column of texts holds.
    "about": FieldType("bytes", nullable=True),
}
_DAY = 86_400.0
MESSAGES = pa.schema(
    [
        ("value", pa.binary()),
        ("partition", pa.string()),
        ("offset", pa.string()),
        ("timestamp", UTC_TIME),
    ]
)
"""The columns of the messages of a batch, before those of `added_columns`."""
MOST_MESSAGES, MOST_BYTES = 10_000, 16 << 20
"""What one transaction stores: while it commits, the next messages gather."""
_TASK_ROWS = 100_000
_PAUSE, _STORING_PAUSE = 0.05, 0.005
PATIENCE = 60.0
"""How many seconds a receiver tries to connect again, to the broker and to the log."""
_RETRY_SECONDS = 0.5
_ENOUGH, _QUIET_SECONDS, _GATHER_SECONDS, _LOOK_SECONDS = 200_000, 0.5, 10.0, 0.05
"""In a run that ends, a batch waits for so many messages, unless none came for a while, or some keep coming for long:
each batch costs Spark a part of a second, and takes it from the receiver."""
_TIDY_SECONDS, _KEYS_SECONDS = 1.0, 60.0
"""How often what was read is removed, and how often old keys are."""
MOST_KEYS = 5_000_000
"""How many of the newest messages are remembered by their keys: more could fill the disk."""
_YOUNG_KEY_SECONDS = 3600.0
"""Younger keys stay, however many: another receiver may have stored a message long before the newest ones, and not have
acknowledged it."""


class Received(NamedTuple):
    value: bytes
    sent_at: datetime | None = None
    """When it was sent; `None` takes the moment of its arrival."""
    about: Mapping[str, Any] | None = None
    """Headers, a routing key and the like, for the columns that a source adds; `TRACEPARENT` for traces."""
    identity: bytes | None = None
    """What the same message has when it is delivered again, and no other one has; `None` where it has no such thing."""


class Receiver(Protocol):
    """A consumer of one queue or subscription. One thread uses it. Raises `ConnectionFailedError` where it may help to
    open another one, and other errors where it does not."""

    def receive(self, most: int, seconds: float) -> Sequence[Received]:
        """Return the next messages, at most so many and as soon as there are any; none after so many seconds. With 0 it
        returns none, but keeps the connection alive, and may read what it returns the next time."""

    def acknowledge(self) -> None:
        """Tell the broker that everything that `receive` returned is stored."""

    def waiting(self) -> int | None:
        """Return how many messages the broker had when this receiver was opened; `None` if it does not say."""

    def is_drained(self) -> bool:
        """Return whether the broker has nothing more for it, as far as that can be known. It has nothing itself."""

    def close(self) -> None:
        """Give back what is not acknowledged."""


@dataclass
class ReceivedOffsets(Offsets):
    """The offsets of the log of a queue, and the receiver that fills it."""

    consumer: str = ""
    """The checkpoint that reads."""
    open: Callable[[], Receiver] | None = None
    """Opens a receiver. It travels to Spark's Python process."""
    max_unread: int = 1_000_000
    keep_days: float = 0.0
    deduplicate_days: float = 7.0
    fields: ClassVar[dict[str, FieldType]] = _FIELDS

    def __post_init__(self) -> None:
        self.is_once = False
        self._pump: Pump | None = None
        self._away_since: float | None = None
        """Since when the database of the log does not answer."""
        self._seen_upto, self._seen_at = -1, 0.0
        """Up to where the log went at the last look that found more, and when that was."""
        self._asked_at = 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def made(self) -> Log:
        """Return the log, created where it is missing."""
        return self.store.open(self.schema, self.name, self.fields)

    def stop_at_head(self) -> None:
        """Have `following` go as far as what the queue has now."""
        self.is_once = True

    def first(self) -> int:
        """Return where a new checkpoint begins. From then on nobody removes what comes after it."""
        log = self.made()
        while True:
            position = super().first()
            log.reset(self.consumer, position)
            if self.start != "earliest" or log.floor() <= position:  # else it was removed between the two
                return position

    def stop(self) -> None:
        """Receive no more. What is not acknowledged goes back to the broker. Spark does not call it: it ends the
        process."""
        if self._pump is not None:
            self._pump.stop()

    def following(self, after: int) -> int:
        # Spark asks for what follows an offset when every target has what is before it.
        self._asked_at = time.monotonic()
        while True:
            if self._pump is not None:
                self._pump.check()
            try:
                upto, is_done = self._look(after)
                self._away_since = None
            except ConnectionFailedError:
                now = time.monotonic()
                self._away_since = self._away_since or now
                if now - self._away_since > PATIENCE:
                    raise
                time.sleep(_RETRY_SECONDS)
                upto, is_done = after, False
            if is_done and self._pump is not None:
                self._pump.check()  # it may have failed meanwhile
            if is_done or not self.is_once or self._is_enough(after, upto):
                return upto
            time.sleep(_LOOK_SECONDS)

    def _is_enough(self, after: int, upto: int) -> bool:
        """Return whether a run that ends takes these messages as a batch, while others are received."""
        now = time.monotonic()
        if upto != self._seen_upto:
            self._seen_upto, self._seen_at = upto, now
        waited = now - self._seen_at >= _QUIET_SECONDS or now - self._asked_at >= _GATHER_SECONDS
        # Offsets may have gaps, so that there are at most so many.
        return upto > after and (waited or upto - after >= min(_ENOUGH, self.max_rows, self.max_unread))

    def _look(self, after: int) -> tuple[int, bool]:
        """Return the last offset of the next batch, and whether everything was received before it was looked up."""
        if self._pump is None:
            self._pump = Pump(self)
        self._pump.read_upto(after)
        is_done = self._pump.is_done()
        if is_done:
            self._pump.note()  # its thread does it no more
        return super().following(after), is_done


class Pump:
    """The thread that receives."""

    def __init__(self, offsets: ReceivedOffsets) -> None:
        self._offsets, self._log = offsets, offsets.made()
        self._position: int | None = None
        """What the pipeline has done."""
        self._noted: int | None = None
        self._unread = 0
        self._slowest: tuple[str, int] | None = None
        """The consumer that is the furthest behind, and its position."""
        self._slowest_since = 0.0
        self._warned_at = float("-inf")
        self._tidied_at = self._trimmed_at = self._succeeded_at = float("-inf")
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._storing = ThreadPoolExecutor(1)  # meanwhile the next messages arrive
        self._thread = threading.Thread(target=self._run, name=f"receiver of {offsets.name}", daemon=True)

    def read_upto(self, position: int) -> None:
        """Take note of what the pipeline has done. The first time, begin to receive."""
        if self._position is None:
            self._log.reset(self._offsets.consumer, position)  # from now on it is kept what comes after that
            self._position = position
            self._thread.start()
        self._position = position

    def is_done(self) -> bool:
        """Return whether it has received all that it was to."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def check(self) -> None:
        """Raise why it could not receive."""
        if self.is_done() and self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._storing.shutdown()

    def _run(self) -> None:
        assert self._offsets.open is not None
        self._succeeded_at = time.monotonic()
        while not self._stopping.is_set():
            try:
                receiver = self._offsets.open()
                try:
                    self._receive(receiver)
                    return
                finally:
                    with suppress(Exception):
                        receiver.close()
            except ConnectionFailedError as error:
                if time.monotonic() - self._succeeded_at > PATIENCE:
                    self._failure = error
                    return
                self._stopping.wait(_RETRY_SECONDS)
            except BaseException as error:
                self._failure = error
                return

    def _receive(self, receiver: Receiver) -> None:
        """Receive until it fails, or has what the broker had at the start."""
        offsets = self._offsets
        left = receiver.waiting() if offsets.is_once else None
        while not self._stopping.is_set():
            self._tidy()
            room = max(0, offsets.max_unread - self._unread)
            messages = receiver.receive(min(room, MOST_MESSAGES), _PAUSE)
            if messages:
                reached("received")
                stored = self._storing.submit(store, offsets, self._log, messages)
                while not stored.done():
                    receiver.receive(0, _STORING_PAUSE)
                stored.result()
                reached("stored")
                receiver.acknowledge()
                reached("acknowledged")
                self._unread += len(messages)
            self._succeeded_at = time.monotonic()
            if not offsets.is_once:
                if not room:
                    self._warn_of_no_room()
                continue
            if left is not None:
                left -= len(messages)
            if left is not None and left <= 0:
                return
            if not room:
                if (stuck := self._stuck()) is not None:
                    raise stuck
            elif not messages and receiver.is_drained():
                return

    def _tidy(self) -> None:
        """Note where the pipeline is, and remove what all pipelines have read, and keys that are too old."""
        now, position, offsets, log = time.monotonic(), self._position, self._offsets, self._log
        if now - self._trimmed_at > _KEYS_SECONDS:
            self._trimmed_at = now
            moment = offsets.store.now()
            log.trim_keys(moment - offsets.deduplicate_days * _DAY, MOST_KEYS, moment - _YOUNG_KEY_SECONDS)
        if position is None or now - self._tidied_at < _TIDY_SECONDS:
            return
        self._tidied_at = now
        if position != self._noted or self._unread >= offsets.max_unread:
            self.note()
        else:
            log.reset(offsets.consumer, position)  # if somebody forgot it, others would remove its messages

    def note(self) -> None:
        """Note where the pipeline is, and remove what all pipelines have read. Its thread does it while it runs."""
        position, offsets, log = self._position, self._offsets, self._log
        assert position is not None
        log.reset(offsets.consumer, position)
        self._noted = position
        slowest, upto = min(((each.consumer, each.position) for each in log.groups()), key=lambda each: each[1])
        if (slowest, upto) != self._slowest:
            self._slowest, self._slowest_since = (slowest, upto), time.monotonic()
        self._unread = log.extent(upto, log.head(), offsets.max_unread)
        if offsets.keep_days:
            moment = datetime.fromtimestamp(offsets.store.now(), UTC)
            upto = min(upto, log.expired(moment - timedelta(days=offsets.keep_days), moment))
        if upto > log.floor():
            log.trim(upto, keeps_unread=True)

    def _warn_of_no_room(self) -> None:
        """Say now and then why nothing comes."""
        now = time.monotonic()
        if now - self._warned_at > PATIENCE and (stuck := self._stuck()) is not None:
            self._warned_at = now
            _logger.warning("%s %s", stuck.what, stuck.hint)

    def _stuck(self) -> StorageError | None:
        """Return why nothing is received if the log is full, this pipeline has read all of it, and another one does not
        go on: it would hold up a run that is to end."""
        offsets, slowest = self._offsets, self._slowest
        is_stuck = slowest is not None and time.monotonic() - self._slowest_since > PATIENCE
        if slowest is None or not is_stuck or (self._position or 0) < self._log.head():
            return None
        where = f" --connection {offsets.connection.name}" if offsets.connection.name else ""
        return StorageError(
            f"The log {offsets.name} is full, so that nothing more is received: {slowest[0]} is {self._unread:,} "
            f"messages behind, and max_unread is {offsets.max_unread:,}. The messages stay at the broker.",
            hint=f"Run the pipeline of {slowest[0]}. Or, if it is not to run any more: weft streams forget "
            f"{offsets.name} {quote(slowest[0])}{where}",
        )


def unparsable(codec: Codec, values: Sequence[bytes]) -> set[int]:
    """Return the numbers of the messages that are bad by themselves: one whose types differ from those of the others is
    not, because another batch may have it with a table that it fits."""
    if not codec.is_parsed or not values:
        return set()
    suspects = codec.decoder({}).parse(pa.array(values, pa.binary())).bad
    return {each for each in suspects if codec.decoder({}).parse(pa.array([values[each]], pa.binary())).bad}


def store(offsets: ReceivedOffsets, log: Log, messages: Sequence[Received]) -> None:
    """Store messages. When this returns they are durable."""
    arrived = datetime.now(UTC)
    horizon = offsets.deduplicate_days * _DAY
    keys = [None if each.identity is None or not horizon else _key(each.identity) for each in messages]
    columns: list[list[Any]] = [
        [each.value for each in messages],
        [each.sent_at or arrived for each in messages],
        [None if each.about is None else _json(each.about) for each in messages],
    ]
    batch = Batch(
        log,
        [(str(uuid.uuid4()), len(messages))],
        tuple(_FIELDS),
        columns,
        keys=keys if any(keys) else None,
        key_horizon=horizon,
    )
    for each in offsets.store.append([batch]):
        if isinstance(each, WeftError):
            raise each
    offsets.store.appended()


_json = msgspec.json.Encoder(enc_hook=str).encode


def _key(identity: bytes) -> bytes:
    return hashlib.sha256(identity).digest()[:20]


# -------------------------------------------------------------------------------------------------------------- source


class ReceivedMessages(Messages):
    """The messages of a micro-batch."""

    upto: int | None = None


class ReceivedSource(LogPositions, MessageSource):
    """A queue or subscription. Its connection has the fields `received_log`, `max_unread` and `keep_days`."""

    waits = True
    wants_reader = True
    reader = ""

    def read_as(self, reader: str) -> None:
        self.reader = reader

    @abstractmethod
    def opener(self) -> Callable[[], Receiver]:
        """Return what opens a receiver, in another process; raise if there is nothing to receive from."""

    @abstractmethod
    def waiting(self) -> int | None:
        """Return how many messages the broker has that no receiver was given; `None` if it does not say."""

    @abstractmethod
    def queue_identity(self) -> Sequence[str]:
        """Return what distinguishes this queue from all others."""

    @property
    def opened_by_workers(self) -> Connection:
        return self._offsets.connection

    @cached_property
    def _offsets(self) -> ReceivedOffsets:
        connection = hooks.find_connection(self.connection.received_log)
        if connection.is_private_memory:
            raise DeclarationError(
                f"{connection.label} is in the memory of one process, and cannot keep what is received from "
                f"{self.connection.label}.",
                hint="Name another one: received_log=…",
            )
        if system_for(connection.kind).log is None:
            raise DeclarationError(
                f"{connection.label} ({connection.kind}) cannot keep what is received from {self.connection.label}: "
                "it holds no streams.",
                hint="Name a connection that does: received_log=…",
            )
        offsets = ReceivedOffsets(
            connection.resolved(),
            SCHEMA,
            log_name(self.connection.kind, self.name, self.queue_identity()),
            max_rows=self.settings.max_rows or MAX_ROWS,
            wait_seconds=self.settings.wait_seconds,
            max_unread=self.connection.max_unread,
            keep_days=self.connection.keep_days,
            deduplicate_days=self.connection.deduplicate_days,
        )
        offsets.store = hooks.open_store(connection)
        return offsets

    @property
    def log(self) -> Log:
        return self._offsets.log

    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        offsets = replace(self._offsets, start=start, consumer=self.reader, open=self.opener())
        frame: DataFrame = ranges(spark, offsets)
        return frame

    def check(self, pipeline: str, message: str) -> None:
        """Raise if the database of the log does not answer."""
        try:
            self.log.head()
        except ConnectionFailedError as error:
            kept = f"It keeps what {pipeline} receives from {self.connection.label}."
            raise ConnectionFailedError(f"{error.what} {kept}", hint=error.hint) from None
        except WeftError:
            return

    def take(self, frame: DataFrame) -> ReceivedMessages:
        spark, log, parts = frame.sparkSession, self.log, []
        for after, upto in (tuple(each) for each in frame.collect()):
            _check_kept(log, self.name, after)
            while after < upto:
                end = log.bound(after, upto, _TASK_ROWS)
                parts.append((after, end))
                after = end
        from pyspark.sql.pandas.types import from_arrow_schema

        columns = self.message_columns()
        read = partial(_read, self._offsets, self.name, parts, columns)
        numbers = spark.range(0, len(parts), 1, max(1, len(parts)))
        rows = ReceivedMessages(
            self, numbers.mapInArrow(read, from_arrow_schema(columns)), partial(self._few, parts, columns)
        )
        rows.upto = parts[-1][1] if parts else None
        return rows

    def _few(self, parts: Sequence[tuple[int, int]], columns: pa.Schema) -> pa.Table | None:
        """Return the messages of a batch, if they are few."""
        log, size, batches = self.log, 0, list[pa.RecordBatch]()
        if len(parts) > 1 or sum(log.extent(*each, MOST_HERE + 1) for each in parts) > MOST_HERE:
            return None
        for batch in (batch for each in parts for batch in _part(log, self.name, each, columns)):
            batches.append(batch)
            size += batch.nbytes
            if size > MOST_BYTES_HERE:
                return None
        return pa.Table.from_batches(batches, columns)

    def message_columns(self) -> pa.Schema:
        """Return the columns of messages: those that all have, and the texts that `added_columns` are made of. Messages
        that are not parsed have their key."""
        texts = dict.fromkeys(self.added_columns.values() if self.codec.is_parsed else ["key"])
        if self.codec.is_parsed and tracing.tracer is not None:
            texts[TRACEPARENT] = None
        return pa.schema([*MESSAGES, *((name, pa.string()) for name in texts if name not in MESSAGES.names)])

    # -------------------------------------------------------------------------------------------------------- positions

    def end(self) -> str:
        """Return what follows the head. From then on nobody removes it."""
        log = self._offsets.made()
        head = log.head()
        if self.reader:
            log.reset(self.reader, head)
        return str(head + 1)

    def lag(self, position: int | None, source_log: Location | None) -> int | None:
        """Return how many messages were received and not read, and how many wait at the broker."""
        behind = super().lag(position, source_log)
        return None if behind is None else behind + (self.waiting() or 0)

    def reached(self, rows: BatchRows, reported: Any | None) -> int | None:
        return getattr(rows, "upto", None)

    def rewind_to_offset(self, position: int | None, offset: str, source_log: Location) -> Rewind:
        """Return the position of a message, by its offset as a dead letter has it or alone."""
        return super().rewind_to_offset(position, offset.removeprefix(f"{self.name}:"), source_log)


def log_name(kind: str, name: str, place: Sequence[str]) -> str:
    """Return the name of the hidden stream of a queue."""
    digest = hashlib.sha256(json.dumps(place).encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_")[:30]
    return f"received_{kind}_{readable}_{digest}"


def _check_kept(log: Log, queue: str, after: int) -> None:
    """Raise if messages that come after an offset were removed."""
    if log.floor() > after:
        raise StorageError(
            f"The messages of {queue} that come after {after:,} are gone: they are kept until every "
            "pipeline has read them, and this one had. To begin with what is left: weft checkpoints reset."
        )


def _read(
    offsets: ReceivedOffsets,
    queue: str,
    parts: Sequence[tuple[int, int]],
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """In a task: read the messages of the parts that have these numbers."""
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        yield from _part(offsets.log, queue, parts[number], schema)


def _part(log: Log, queue: str, part: tuple[int, int], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read the messages between two offsets."""
    after, upto = part
    texts = schema.names[len(MESSAGES) :]
    for stored in log.read_arrow(after, upto, [ROWID, *(name for name in _FIELDS if texts or name != "about")]):
        columns = [
            stored["value"].cast(pa.binary()),
            pa.repeat(pa.scalar(queue), stored.num_rows),
            stored[ROWID].cast(pa.string()),
            stored["sent_at"].cast(UTC_TIME),
        ]
        if texts:
            about = [json.loads(each) if each else {} for each in stored["about"].to_pylist()]
            columns += [pa.array([_text(each.get(name)) for each in about], pa.string()) for name in texts]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
    # Only now: they could be removed while they were read, and the batch would have fewer rows.
    _check_kept(log, queue, after)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
