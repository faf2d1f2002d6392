"""Every codec: each message is a row or a bad one, bad ones do not touch the others, and rows come back as messages.

A new codec adds messages to `MESSAGES`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from systems.codecs.schemas import AllSchemas
from weft.systems.codec import CODECS, REGISTERED, Codec, Registered, codec_of


class Messages(NamedTuple):
    """Messages of one format."""

    good: list[bytes]
    bad: list[bytes]
    rows: list[dict[str, Any]]
    """The rows of the good ones."""


MESSAGES = {
    "json": Messages(
        [b'{"n": 1, "text": "\xc3\xa9"}', b'{"n": 2, "text": null}', b'{"n": 3, "text": ""}'],
        [b"", b"{", b"[1]", b"7", b'{"n": 1} {"n": 2}', b"\xff"],
        [{"n": 1, "text": "é"}, {"n": 2, "text": None}, {"n": 3, "text": ""}],
    ),
    "avro": Messages(
        [b"\0\0\0\0\1\2\2\4\xc3\xa9", b"\0\0\0\0\1\4\0", b"\0\0\0\0\1\6\2\0"],
        [b"", b'{"n": 1}', b"\0\0\0\0\2\2\0", b"\0\0\0\0\1\2", b"\0\0\0\0\1\2\2\2\xff", b"\0\0\0\0\1\2\0\0"],
        [{"n": 1, "text": "é"}, {"n": 2, "text": None}, {"n": 3, "text": ""}],
    ),
    "protobuf": Messages(
        [b"\0\0\0\0\1\0\x08\1\x12\2\xc3\xa9", b"\0\0\0\0\1\0\x08\2", b"\0\0\0\0\1\0\x08\3\x12\0"],
        [b"", b'{"n": 1}', b"\0\0\0\0\2\0", b"\0\0\0\0\1\2\6", b"\0\0\0\0\1\0\x08", b"\0\0\0\0\1\0\x12\1\xff"],
        [{"n": 1, "text": "é"}, {"n": 2, "text": None}, {"n": 3, "text": ""}],
    ),
    "raw_bytes": Messages([b"a", b"", b"\x00\xff"], [], [{"value": b"a"}, {"value": b""}, {"value": b"\x00\xff"}]),
}


SCHEMAS = {
    "avro": '{"type": "record", "name": "M", "fields": [{"name": "n", "type": "long"}, '
    '{"name": "text", "type": ["null", "string"]}]}',
    "protobuf": 'syntax = "proto3"; message M { int64 n = 1; optional string text = 2; }',
}
"""The schema of the id 1, for formats with a registry."""


@pytest.fixture(params=CODECS)
def messages(request: pytest.FixtureRequest) -> Messages:
    return MESSAGES[request.param]


@pytest.fixture
def codec(request: pytest.FixtureRequest, messages: Messages) -> Codec:
    name = request.node.callspec.params["messages"]
    if name not in REGISTERED:
        return codec_of(name)
    codec: Any = codec_of(name, AllSchemas(name.upper(), [SCHEMAS[name]]))
    columns = pa.Table.from_pylist(messages.rows).schema
    written = codec.schema_of(columns, "M")
    codec.schemas.schemas[7] = Registered(7, codec.kind, written)
    made: Codec = codec.writing(written, 7)
    return made


def rows(columns: dict[str, pa.Array]) -> list[dict[str, Any]]:
    return pa.table(columns).to_pylist()


def test_good_messages_are_rows(codec: Codec, messages: Messages) -> None:
    parsed = codec.decoder({}).parse(pa.array(messages.good, pa.binary()))
    assert rows(parsed.columns) == messages.rows
    assert (list(parsed.good), parsed.bad) == ([0, 1, 2], {})


def test_bad_messages_are_apart(codec: Codec, messages: Messages) -> None:
    decoder = codec.decoder({})
    for bad in messages.bad:
        first, *others = messages.good
        parsed = decoder.parse(pa.array([first, bad, *others], pa.binary()))
        assert rows(parsed.columns) == messages.rows
        assert (list(parsed.good), list(parsed.bad)) == ([0, 2, 3], [1])
        assert parsed.bad[1]
        # It remembers nothing bad of earlier messages.
        assert rows(decoder.parse(pa.array(messages.good, pa.binary())).columns) == messages.rows


def test_no_messages(codec: Codec) -> None:
    parsed = codec.decoder({}).parse(pa.array([], pa.binary()))
    assert (list(parsed.good), parsed.bad) == ([], {})
    assert all(len(each) == 0 for each in parsed.columns.values())


def test_rows_are_messages_again(plain_spark: Any, codec: Codec, messages: Messages) -> None:
    """A null may be left out."""
    columns = list(messages.rows[0])
    frame = plain_spark.createDataFrame(pa.Table.from_pylist(messages.rows))
    encoded = [row.message for row in frame.select(codec.encoded(columns).alias("message")).collect()]
    values = [each.encode() if isinstance(each, str) else bytes(each) for each in encoded]
    parsed = codec.decoder({}).parse(pa.array(values, pa.binary()))
    assert rows(parsed.columns) == messages.rows
