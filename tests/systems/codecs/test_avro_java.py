"""Java's Avro, which comes with Spark, and ours read each other's messages."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from systems.codecs.schemas import AllSchemas
from systems.codecs.test_avro import EVERY, NEW, OLD, rows
from weft.systems.codec import Registered
from weft.systems.codecs.avro import AvroCodec


class Java:
    """Values, in Avro's form of JSON, as bytes and back."""

    def __init__(self, spark: Any) -> None:
        self._jvm = spark._jvm
        self._avro = self._jvm.org.apache.avro

    def _schema(self, schema: Any) -> Any:
        return self._avro.Schema.Parser().parse(schema if isinstance(schema, str) else json.dumps(schema))

    def encode(self, value: str, schema: Any) -> bytes:
        parsed = self._schema(schema)
        decoder = self._avro.io.DecoderFactory.get().jsonDecoder(parsed, value)
        datum = self._avro.generic.GenericDatumReader(parsed).read(None, decoder)
        out = self._jvm.java.io.ByteArrayOutputStream()
        encoder = self._avro.io.EncoderFactory.get().binaryEncoder(out, None)
        self._avro.generic.GenericDatumWriter(parsed).write(datum, encoder)
        encoder.flush()
        return bytes(out.toByteArray())

    def decode(self, data: bytes, writer: Any, reader: Any = None) -> Any:
        written, wanted = self._schema(writer), self._schema(reader or writer)
        decoder = self._avro.io.DecoderFactory.get().binaryDecoder(data, None)
        datum = self._avro.generic.GenericDatumReader(written, wanted).read(None, decoder)
        out = self._jvm.java.io.ByteArrayOutputStream()
        encoder = self._avro.io.EncoderFactory.get().jsonEncoder(wanted, out)
        self._avro.generic.GenericDatumWriter(wanted).write(datum, encoder)
        encoder.flush()
        return json.loads(bytes(out.toByteArray()))


EVERY_VALUE = {
    "nothing": None,
    "flag": True,
    "small": -(2**31),
    "large": 2**63 - 1,
    "single": 0.5,
    "real": -1e300,
    "data": "\0\xff",
    "text": "é\U0001f600",
    "choice": "GREEN",
    "four": "\1\2\3\4",
    "inner": {"x": 5, "y": {"string": "why"}},
    "numbers": [None, {"long": 5}],
    "lists": [[], ["a", ""]],
    "by_name": {"k": 0.5, "é": 1.0},
    "records": [{"n": 1}, {"n": -1}],
}


def test_ours_reads_what_java_writes(plain_spark: Any) -> None:
    java = Java(plain_spark)
    known = AllSchemas("AVRO", [EVERY, OLD, NEW])
    sent = b"\0\0\0\0\1" + java.encode(json.dumps(EVERY_VALUE), EVERY)
    (found,) = rows(AvroCodec(known).decoder({}).parse(pa.array([sent])))
    expected = {
        **EVERY_VALUE,
        "data": b"\0\xff",
        "four": b"\1\2\3\4",
        "inner": {"x": 5, "y": "why"},
        "numbers": [None, 5],
        "by_name": [("k", 0.5), ("é", 1.0)],
    }
    assert {**found, "by_name": sorted(found["by_name"])} == expected
    # An old message, as the newest schema: what Java makes of it.
    old = java.encode(json.dumps({"id": 1, "name": "a", "gone": ["x"]}), OLD)
    resolved = java.decode(old, OLD, NEW)
    (ours,) = rows(AvroCodec(known, known.schema(3)).decoder({}).parse(pa.array([b"\0\0\0\0\2" + old])))
    assert (ours["id"], ours["full_name"], ours["country"]) == (1, "a", "NL")
    assert (resolved["id"], resolved["full_name"], resolved["country"]) == (1, {"string": "a"}, "NL")
    assert (ours["tags"], ours["inner"]) == (resolved["tags"], resolved["inner"])


def test_java_reads_what_ours_writes(plain_spark: Any) -> None:
    java = Java(plain_spark)
    columns = pa.schema(
        [
            ("id", pa.int64()),
            ("text", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("by_name", pa.map_(pa.string(), pa.float64())),
            ("part", pa.struct([("x", pa.int32()), ("ok", pa.bool_())])),
        ]
    )
    full = {"id": -5, "text": "é", "tags": ["a", None], "by_name": [("k", 0.5)], "part": {"x": 1, "ok": None}}
    codec = AvroCodec(AllSchemas("AVRO", []))
    text = codec.schema_of(columns, "shop.Order")
    codec.schemas.schemas[7] = Registered(7, "AVRO", text)  # type: ignore[attr-defined]
    both = pa.array([full, dict.fromkeys(full)], pa.struct(list(columns)))
    one, none = codec.writing(text, 7).encode(both).to_pylist()
    assert java.decode(one[5:], text) == {
        "id": {"long": -5},
        "text": {"string": "é"},
        "tags": {"array": [{"string": "a"}, None]},
        "by_name": {"map": {"k": {"double": 0.5}}},
        "part": {"shop.Order_part": {"x": {"int": 1}, "ok": None}},
    }
    assert java.decode(none[5:], text) == dict.fromkeys(full)
