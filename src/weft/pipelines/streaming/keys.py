"""The keys of a pipeline's TOML file, table by table: what the parser takes, and what the JSON Schema says."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, get_args

from weft.pipelines.streaming.spec import MODES, Delivery, Drift, OnError, Profile
from weft.systems.base import system_for

Kind = typing.Literal["text", "count", "texts", "table", "tables", "named", "object"]
_NOUNS = {
    "text": "a text",
    "count": "a whole number of at least 1",
    "texts": "a list of texts",
    "table": "a table",
    "tables": "a list of tables",
    "named": "a table of tables",
    "object": "a table",
}


@dataclass(frozen=True)
class Key:
    """What one key takes. `inside` names its table in `TABLES`."""

    says: str
    kinds: tuple[Kind, ...] = ("text",)
    inside: str | None = None
    choices: tuple[str, ...] = ()
    needed: bool = False

    def fits(self, value: object) -> bool:
        """Whether a value of TOML is what this key takes; choices apart."""
        return any(_fits(kind, value) for kind in self.kinds)

    @property
    def wanted(self) -> str:
        """What it takes, in words."""
        return " or ".join(_NOUNS[kind] for kind in self.kinds)


def _fits(kind: Kind, value: object) -> bool:
    if kind == "text":
        return isinstance(value, str) and value != ""
    if kind == "count":
        return type(value) is int and value >= 1
    if kind == "texts":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if kind == "tables":
        return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
    if kind == "named":
        return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())
    return isinstance(value, dict)


_CONNECTION = {
    "connection": Key("The name of a connection that is registered or in weft.toml; `default` where nothing is said."),
    "kind": Key("The kind of a connection whose fields stand beside it: kafka, postgres, object_store_local …"),
}
_READ_OPTIONS = {"read_options": Key("How files are read.", ("table",), "read_options")}
_DEAD_LETTER_TOPIC = {"dead_letter_topic": Key("The topic of the source's Kafka that takes bad rows.")}
_COLUMNS: tuple[Kind, ...] = ("text", "texts")
_DEDUPLICATE_BY = Key("Of rows with one key in a batch, the greatest in these columns stays.", _COLUMNS)

TABLES: dict[str, dict[str, Key]] = {
    "pipeline": {
        "pipeline_name": Key("What metrics, the checkpoint and errors call it.", needed=True),
        "description": Key("What it is for."),
        "source_query": Key("What the source reads: a topic, a prefix, a table of Delta, a stream's name."),
        "source": Key("Where rows come from.", ("table",), "source"),
        "sources": Key("Several sources, whose rows become one batch.", ("tables",), "source"),
        "target": Key("Where rows go.", ("table",), "target"),
        "targets": Key("Several targets: each gets all rows.", ("tables",), "target"),
        "mode": Key("How rows meet those of the targets.", choices=MODES),
        "keys": Key("The columns by which a merge matches rows.", _COLUMNS),
        "deduplicate_by": _DEDUPLICATE_BY,
        "transform": Key("SQL over each batch.", ("table",), "transform"),
        "lookups": Key("Tables that the SQL can join, by name.", ("named",), "lookup"),
        **_DEAD_LETTER_TOPIC,
        "dead_letter_stream": Key("The stream that takes bad rows."),
        "dead_letter_table": Key(
            "The table that takes bad rows: schema.table.", ("text", "table"), "dead_letter_table"
        ),
        "dead_letter_path": Key("The folder of this machine that takes bad rows, as files."),
        "dead_letter_connection": Key("Where the dead letters are.", ("text", "table"), "dead_letter_connection"),
        "on_drift": Key("What becomes of new columns.", choices=get_args(Drift)),
        "every": Key("The time between the beginnings of two batches: 500ms, 10s, 1m."),
        "idle_pause_ms": Key("How long a source without news is left alone.", ("count",)),
        "checkpoint": Key("A folder or URL; .weft/checkpoints/NAME where nothing is said."),
        "delivery": Key("How often a row may reach a target.", choices=get_args(Delivery)),
        "profile": Key("What it is tuned for.", choices=get_args(Profile)),
    },
    "source": {
        **_CONNECTION,
        "query": Key("What is read: a topic, a prefix, a table of Delta, a stream's name."),
        "start": Key(
            "Where a new checkpoint begins: earliest, latest, an offset of a stream or topic, a version of Delta.",
            ("text", "count"),
        ),
        "max_rows": Key("The rows of one batch, for streams and topics.", ("count",)),
        "max_files": Key("The files of one batch.", ("count",)),
        **_DEAD_LETTER_TOPIC,
        **_READ_OPTIONS,
    },
    "target": {
        **_CONNECTION,
        "table": Key("The table, of a database or Delta: schema.table.", ("text", "table", "tables"), "table"),
        "prefix": Key("The folder of the files, or of a Delta table without [target.table]."),
        "stream": Key("The topic, the Redis stream or the stream."),
        "mode": Key("How rows meet those of the target.", choices=MODES),
        "primary_key": Key("The columns that tell rows or messages apart.", _COLUMNS),
        "update_columns": Key("What a merge writes to a row that is there.", _COLUMNS),
        "compare_columns": Key("What must differ for a row to count as changed.", _COLUMNS),
        "deduplicate_by": _DEDUPLICATE_BY,
        **_READ_OPTIONS,
    },
    "table": {
        "schema": Key("Its schema."),
        "name": Key("Its name.", needed=True),
        "primary_key": Key("The columns that tell rows apart.", _COLUMNS),
    },
    "dead_letter_table": {"schema": Key("Its schema."), "name": Key("Its name.", needed=True)},
    "dead_letter_connection": {"kind": Key(_CONNECTION["kind"].says, needed=True)},
    "transform": {
        "sql": Key("A SELECT over the table `source`: all rows of a batch."),
        "on_error": Key("What becomes of rows that it fails for.", choices=get_args(OnError)),
    },
    "lookup": {
        **_CONNECTION,
        "table": Key("The table."),
        "schema": Key("The table's schema."),
        "query": Key("SQL in the place of a table."),
        "refresh_interval_ms": Key("After how long it is read again.", ("count",)),
    },
    "read_options": {
        "csv": Key("How CSV files are read: has_header, delimiter, quote …", ("object",)),
        "json": Key("How files of JSON lines are read.", ("object",)),
    },
}
LATER = {"pipeline": ("watermark", "state_store"), "transform": ("window", "join", "cdc")}
"""Tables that are known, and refused until what they stand for is there."""


def connection_hints(kind: str) -> dict[str, Any]:
    """The fields of a connection of this kind, with their types."""
    cls = system_for(kind).load_connection()
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}
