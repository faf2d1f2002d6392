"""JSON Schemas of the service's answers."""

from __future__ import annotations

from typing import Any

from weft.operate.records import COUNTS
from weft.streams.declare import Stream
from weft.types import FieldType

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_TIME: Schema = {"type": "string", "format": "date-time"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(about: str = "", optional: dict[str, Schema] | None = None, /, **members: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": {**members, **(optional or {})}, "required": list(members)}
    return schema | ({"description": about} if about else {})


def _map(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def _offsets(*names: str) -> dict[str, Schema]:
    """Return the members of offsets, each as a number and as a text."""
    return {member: schema for name in names for member, schema in ((name, _WHOLE), (f"{name}_text", _TEXT))}


_FIELDS: dict[str, Schema] = {
    "string": _TEXT,
    "bool": _FLAG,
    "int32": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "float32": _NUMBER,
    "float64": _NUMBER,
    "date": {"type": "string", "format": "date"},
    "timestamp": _TIME,
    "json": {},
    "bytes": {"type": "string", "contentEncoding": "base64"},
    "uuid": {"type": "string", "format": "uuid"},
}


def event_schema(stream: Stream) -> Schema:
    schema: Schema = {"type": "object", "properties": {name: _field(kind) for name, kind in stream.fields.items()}}
    if stream.description:
        schema["description"] = stream.description
    if stream.validate_schema:
        schema["required"] = [name for name, kind in stream.fields.items() if not kind.nullable]
    return schema


def _field(kind: FieldType) -> Schema:
    if kind.base == "decimal":
        text = f"{kind.precision} digits, {kind.scale} of them decimals"
        schema: Schema = {"anyOf": [_NUMBER, _TEXT], "description": text}
    else:
        schema = _FIELDS[kind.base]
    return nullable(schema) if kind.nullable else schema


_STREAM: dict[str, Schema] = {
    "name": _TEXT,
    "schema": _TEXT,
    "description": nullable(_TEXT),
    "tags": array(_TEXT),
    "owner": nullable(_TEXT),
    "fields": _map(_TEXT),
    "validate_schema": _FLAG,
    "auth": nullable({"enum": ["bearer", "api_key", "hmac"]}),
    "rate_limit": nullable(_map(_NUMBER)),
}
_REJECTED = {"dead_letters": nullable(_WHOLE), "quarantined": nullable(_WHOLE)}
_CONSUMED = {"stream": _TEXT, "consumer": _TEXT}
_STATUS = {"enum": ["running", "succeeded", "failed", "interrupted", "cancelled", "skipped"]}

SCHEMAS: dict[str, Schema] = {
    "Event": {"type": "object", "description": "Any JSON object. Names that begin with _weft_ are the server's own."},
    "Problem": _object(
        "An error, as RFC 9457 has it.",
        {
            "hint": _TEXT,
            "index": nullable(_WHOLE),
            "field": nullable(_TEXT),
            "position": _object(byte=_WHOLE, line=_WHOLE, column=_WHOLE),
            "retry_after": _NUMBER,
            "limit": _WHOLE,
            "lost": _WHOLE,
            "rowids": array(_WHOLE),
            "rowids_text": array(_TEXT),
        },
        type={"type": "string", "format": "uri"},
        title=_TEXT,
        status=_WHOLE,
        detail=_TEXT,
        request_id=_TEXT,
    ),
    "Stream": _object(**_STREAM),
    "StreamList": _object(streams=array(ref("Stream")), count=_WHOLE),
    "StreamDetails": _object(
        **_STREAM, columns=_map(_TEXT), row_count=_WHOLE, **_offsets("head", "floor"), **_REJECTED
    ),
    "Published": _object(
        status={"const": "accepted"},
        stream=_TEXT,
        rows_received=_WHOLE,
        rows_deduplicated=_WHOLE,
        rows_quarantined=_WHOLE,
        publish_id=_TEXT,
        triggered_models=array(_TEXT),
        **{name: nullable(schema) for name, schema in _offsets("first_rowid", "last_rowid").items()},
    ),
    "Batch": _object(
        "`token` goes with the ack.", **_CONSUMED, events=array(ref("Event")), count=_WHOLE, token=nullable(_TEXT)
    ),
    "Acknowledged": _object(**_CONSUMED, acknowledged=_WHOLE),
    "Returned": _object(**_CONSUMED, returned=_WHOLE),
    "Position": _object(**_CONSUMED, **_offsets("position")),
    "Group": _object(
        consumer=_TEXT,
        **_offsets("position"),
        lag=_WHOLE,
        pending=_WHOLE,
        lost=_WHOLE,
        members=array(_object(member=_TEXT, pending=_WHOLE, expires_at=_TIME, deliveries=_WHOLE)),
    ),
    "Groups": _object(stream=_TEXT, groups=array(ref("Group"))),
    "EventPage": _object(stream=_TEXT, events=array(ref("Event")), count=_WHOLE, **_offsets("next")),
    "Ticket": _object(stream=_TEXT, ticket=_TEXT, expires_in=_NUMBER),
    "Health": _object(status={"const": "ok"}),
    "Readiness": _object(
        status={"enum": ["ready", "not ready", "stopping"]},
        databases=_map({"enum": ["ok", "failed", "no answer"]}),
        failed_modules=array(_TEXT),
    ),
    "Run": _object(
        run_id=_TEXT,
        attempt=_WHOLE,
        started_at=_TIME,
        seconds=nullable(_NUMBER),
        error=nullable(_TEXT),
        **{name: nullable(_WHOLE) for name in COUNTS},
    ),
    "Pipeline": _object(
        name=_TEXT,
        description=nullable(_TEXT),
        targets=array(_TEXT),
        schedule=nullable(_TEXT),
        depends_on=array(_TEXT),
        state=nullable(_TEXT),
        status=nullable(_STATUS),
        succeeded_at=nullable(_TIME),
        last=nullable(ref("Run")),
        runs=array(_object(status=_STATUS, started_at=_TIME, seconds=nullable(_NUMBER))),
    ),
    "Overview": _object(
        at=_TIME,
        streams=array(
            _object(
                "",
                {"history": array(array(nullable(_NUMBER)))},
                name=_TEXT,
                description=nullable(_TEXT),
                tags=array(_TEXT),
                **_offsets("head", "floor"),
                head_at=_NUMBER,
                published=_WHOLE,
                tail=_TEXT,
                rows=_WHOLE,
                lag=_WHOLE,
                consumers=array(_object(consumer=_TEXT, lag=_WHOLE, pending=_WHOLE, lost=_WHOLE)),
                **_REJECTED,
                problem=nullable(_TEXT),
            )
        ),
        complete=_FLAG,
        pipelines=array(ref("Pipeline")),
        problem=nullable(_TEXT),
    ),
}
