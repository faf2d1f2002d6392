"""The one specification behind `@weft.streaming_pipeline`, `run_streaming_pipeline` and a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.streams.declare import Stream
from weft.systems.base import Connection

OnError = Literal["fail", "drop", "dlq"]
Drift = Literal["evolve", "ignore", "fail"]
Delivery = Literal["exactly_once", "at_least_once"]
Profile = Literal["throughput", "low_latency"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows come from: a topic, a prefix, a table or a stream of a connection."""

    connection: str | Connection | None = None
    query: str | Stream
    """The topic of Kafka, the prefix of an object store, the table of Delta, the stream's name, or a declared stream."""
    start: str = "earliest"
    """Where a new checkpoint begins: `earliest`, `latest`, or an offset of a stream."""
    max_rows: int | None = None
    """Of one batch, for streams and topics."""
    max_files: int | None = None
    """Of one batch, for files."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How files are read: csv_read_options, json_read_options, format."""

    @property
    def name(self) -> str:
        """How metrics, errors and dead letters call it."""
        return self.query if isinstance(self.query, str) else self.query.name


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where rows go, and how."""

    connection: str | Connection | None = None
    table: tuple[str | None, str] | None = None
    """Of a database or Delta; `prefix` for files; `stream` for a topic, a Redis stream or one of ours."""
    prefix: str | None = None
    stream: str | Stream | None = None
    mode: str = "append"
    primary_key: tuple[str, ...] = ()
    """The keys of a merge, or of messages."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `weft.load` takes beside these; for files how they are written, such as `parquet_compression`."""

    @property
    def name(self) -> str:
        """How metrics, errors and the ledger call it."""
        if self.table is not None:
            schema, table = self.table
            return f"{schema}.{table}" if schema else table
        if self.stream is not None:
            return self.stream if isinstance(self.stream, str) else self.stream.name
        return self.prefix or ""


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A table that `transform_sql` can join, read when the pipeline starts and again after each interval."""

    connection: str | Connection | None = None
    table: str | None = None
    schema: str | None = None
    query: str | None = None
    """SQL in the place of a table."""
    refresh_interval_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeadLetters:
    """Where rows go that cannot be parsed, transformed or stored: one of these."""

    topic: str | None = None
    stream: str | Stream | None = None
    table: tuple[str | None, str] | None = None
    path: str | None = None
    connection: str | Connection | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamingPipeline:
    """Sources, SQL over each micro-batch, targets."""

    name: str
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    transform_sql: str | None = None
    transform_on_error: OnError = "fail"
    lookups: Mapping[str, Lookup] = field(default_factory=dict)
    udfs: tuple[Any, ...] = ()
    aggregate_udfs: tuple[Any, ...] = ()
    dead_letters: DeadLetters | None = None
    on_drift: Drift = "evolve"
    every_seconds: float | None = None
    """Between the beginnings of two batches; one after the other where `None`."""
    idle_pause_seconds: float = 0.1
    """How long a source without news is left alone."""
    checkpoint: str | None = None
    """A folder or a URL that Spark can read; `.weft/checkpoints/<name>` where `None`."""
    delivery: Delivery = "exactly_once"
    profile: Profile | None = None
    description: str | None = None
    place: str = ""
    """File and line, for errors."""
