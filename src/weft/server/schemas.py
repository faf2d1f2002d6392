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
_HISTORY: dict[str, Schema] = {"history": array(array(nullable(_NUMBER)))}
_REJECTED = {"dead_letters": nullable(_WHOLE), "quarantined": nullable(_WHOLE)}
_CONSUMED = {"stream": _TEXT, "consumer": _TEXT}
_STATUS = {"enum": ["running", "succeeded", "failed", "interrupted", "cancelled", "skipped"]}
_PIPELINE: dict[str, Schema] = {
    "name": _TEXT,
    "kind": {"enum": ["pipeline", "model"]},
    "description": nullable(_TEXT),
    "tags": array(_TEXT),
    "targets": array(_TEXT),
    "schedule": nullable(_TEXT),
    "depends_on": array(_TEXT),
    "state": nullable(_TEXT),
    "next_due": nullable(_TIME),
    "due_since": nullable(_TIME),
    "paused_at": nullable(_TIME),
    "status": nullable(_STATUS),
    "failures": nullable(_WHOLE),
    "succeeded_at": nullable(_TIME),
    "last": nullable(ref("Run")),
}
_PLACE: dict[str, Schema] = {"name": _TEXT, "connection": _TEXT}
_STEP: Schema = {"enum": ["window", "session", "join", "cdc"]}
_STREAMING: dict[str, Schema] = {
    "name": _TEXT,
    "description": nullable(_TEXT),
    "sources": array(_object(**_PLACE)),
    "targets": array(_object(**_PLACE, mode=_TEXT)),
    "step": nullable(_STEP),
    "running": nullable(_WHOLE),
    "committed": nullable(_WHOLE),
    "planned": nullable(_WHOLE),
    "last_batch": nullable(_TIME),
    "activity": nullable(ref("Activity")),
    "problem": nullable(_TEXT),
}

_LETTERS: dict[str, Schema] = {
    "count": nullable(_WHOLE),
    "more": _FLAG,
    "newest": nullable(_TIME),
    "place": nullable(_TEXT),
    "groups": array(
        _object(group=_TEXT, stage=_TEXT, error=_TEXT, count=_WHOLE, newest=_TIME, letter_id=_TEXT, payload=_TEXT)
    ),
    "problem": nullable(_TEXT),
}

_ORIGIN = _object(
    kind=nullable({"enum": ["stream", "model", "pipeline", "streaming"]}),
    name=nullable(_TEXT),
    table=_TEXT,
    column=_TEXT,
)
_STATE: dict[str, Schema] = {
    "state": nullable(_object(batch=_WHOLE, windows=nullable(_WHOLE), rows=_WHOLE, oldest=nullable(_TIME))),
    "watermark": nullable(
        _object(
            pipeline=_TEXT,
            watermark=nullable(_TIME),
            next_window_ends=nullable(_TIME),
            held_by=array(_TEXT),
            sources=_map(nullable(_TIME)),
            lateness_ms=_WHOLE,
        )
    ),
    "waiting": array(_object("", {"window_start": _TIME, "window_end": _TIME, "kept_until": _TIME}, rows=_WHOLE)),
    "state_problem": nullable(_TEXT),
}

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
        "",
        _HISTORY,
        **_STREAM,
        columns=_map(_TEXT),
        row_count=_WHOLE,
        size_bytes=nullable(_WHOLE),
        **_offsets("head", "floor"),
        published=_WHOLE,
        tail=_TEXT,
        at=_TIME,
        retention=_map(_NUMBER),
        on_schema_drift=_TEXT,
        dead_letter_stream=nullable(_TEXT),
        quarantine_stream=nullable(_TEXT),
        holds_rejected_of=array(_TEXT),
        **_REJECTED,
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
    "Rejected": _object(
        "`of` is the consumer, or the field that did not fit. `payload` is one of the events, cut off.",
        stream=_TEXT,
        grouped=_WHOLE,
        groups=array(
            _object(
                group=_TEXT,
                kind={"enum": ["dead letter", "quarantined"]},
                of=_TEXT,
                reason=_TEXT,
                count=_WHOLE,
                stream=_TEXT,
                newest=_TIME,
                rowid_text=_TEXT,
                payload=_TEXT,
            )
        ),
    ),
    "StreamHistory": _object(
        "Points: seconds since 1970, published, lag, dead letters, quarantined; of minutes in which something changed.",
        stream=_TEXT,
        at=_TIME,
        points=_HISTORY["history"],
    ),
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
        **_PIPELINE,
        runs=array(_object(run_id=_TEXT, status=_STATUS, started_at=_TIME, seconds=nullable(_NUMBER))),
    ),
    "Pipelines": _object(at=_TIME, pipelines=array(ref("Pipeline")), problem=nullable(_TEXT)),
    "PipelineDetails": _object(
        **_PIPELINE,
        mode=_TEXT,
        inputs=array(_TEXT),
        dependents=array(_TEXT),
        attempts_allowed=nullable(_WHOLE),
        declared=_TEXT,
        owner=nullable(_TEXT),
        code=nullable(_TEXT),
        runs=array(ref("Attempt")),
    ),
    "Quarantined": _object(
        "`groups` has the newest `grouped` rows of a table, the commonest error first, with the newest row of each.",
        at=_TIME,
        pipeline=_TEXT,
        grouped=_WHOLE,
        tables=array(
            _object(
                table=_TEXT, count=_WHOLE, groups=array(_object(group=_TEXT, error=_TEXT, count=_WHOLE, payload=_TEXT))
            )
        ),
    ),
    "ModelDetails": _object(
        "`comes_from` is null where the query is not known; a column of which nothing is read comes from nothing. "
        "`kind` and `name` of an origin are the stream, the model, or the pipeline that writes the table. "
        "`left_out` says which values of streams are null in the model, because their columns have no place for them.",
        at=_TIME,
        model=_TEXT,
        table=_TEXT,
        materialise=_TEXT,
        state={"enum": ["fresh", "stale", "unknown"]},
        why=nullable(_TEXT),
        built_at=nullable(_TIME),
        rows=nullable(_WHOLE),
        inputs=array(_object(name=_TEXT, kind={"enum": ["stream", "model", "table", "files"]}, new=nullable(_TEXT))),
        left_out=array(_TEXT),
        dependents=array(_TEXT),
        engine=nullable({"enum": ["pushdown", "spark", "python"]}),
        sql=nullable(_TEXT),
        columns=array(
            _object(
                column=_TEXT,
                type=nullable(_TEXT),
                comes_from=nullable(array(_ORIGIN)),
            )
        ),
        problem=nullable(_TEXT),
    ),
    "Attempt": _object(
        "One attempt at a run, or a slot that was skipped.",
        run_id=_TEXT,
        attempt=_WHOLE,
        pipeline=_TEXT,
        slot=nullable(_TIME),
        status=_STATUS,
        engine=nullable(_TEXT),
        host=nullable(_TEXT),
        pid=nullable(_WHOLE),
        started_at=_TIME,
        finished_at=nullable(_TIME),
        seconds=nullable(_NUMBER),
        error=nullable(_TEXT),
        reason=nullable(_TEXT),
        retry_at=nullable(_TIME),
        targets=array({"type": "object"}),
        steps=array({"type": "object"}),
        **{name: nullable(_WHOLE) for name in COUNTS},
    ),
    "Runs": _object(at=_TIME, runs=array(ref("Attempt"))),
    "RunDetails": _object(
        "`retryable`: a run of its pipeline now goes on with it.",
        run_id=_TEXT,
        pipeline=_TEXT,
        attempts=array(ref("Attempt")),
        retryable=_FLAG,
    ),
    "RunLog": _object(
        "`text` is null where this machine has no log of the attempt; `next` is the `after` of the next request.",
        run_id=_TEXT,
        attempt=_WHOLE,
        text=nullable(_TEXT),
        next=_WHOLE,
        ended=_FLAG,
    ),
    "Activity": _object(
        "Counts since the checkpoint began, as the process that runs the pipeline wrote them `at` last.",
        at=_TIME,
        batches=_WHOLE,
        rows_in=_WHOLE,
        rows_out=_WHOLE,
        busy_ms=_WHOLE,
        dead_letters=_WHOLE,
        lag=_map(_WHOLE),
        last=nullable(_object(batch=_WHOLE, rows_in=_WHOLE, rows_out=_WHOLE, seconds=_NUMBER, ended_at=_TIME)),
        windows=nullable({"type": "object"}),
        cdc=nullable({"type": "object"}),
        failure=nullable(
            _object(
                "Why its last attempt failed, if it has done no batch since; `times` attempts failed `since` then.",
                {"since": _TIME, "times": _WHOLE},
                at=_TIME,
                error=_TEXT,
            )
        ),
        before=nullable(_object("A reading of at most ten seconds before.", at=_TIME, rows_in=_WHOLE, rows_out=_WHOLE)),
    ),
    "StreamingHistory": _object(
        "Points: seconds since 1970, rows in, rows out, batches, milliseconds of batches, dead letters, all since the "
        "checkpoint began; lag, rows in the state, watermark in milliseconds; of minutes in which something changed.",
        pipeline=_TEXT,
        at=_TIME,
        points=array(array(nullable(_NUMBER))),
    ),
    "StreamingPipelines": _object(
        at=_TIME, pipelines=array(_object(**_STREAMING, lag=array(_object(source=_TEXT, lag=nullable(_WHOLE)))))
    ),
    "StreamingPipelineDetails": _object(
        at=_TIME,
        **_STREAMING,
        declared=_TEXT,
        every_seconds=nullable(_NUMBER),
        delivery=_TEXT,
        sql=nullable(_TEXT),
        lag=array(
            _object(
                source=_TEXT,
                position=nullable(_TEXT),
                lag=nullable(_WHOLE),
                words=nullable(_TEXT),
                partitions=nullable(_map(_WHOLE)),
            )
        ),
        **_STATE,
        verified=nullable(array(_object(target=_TEXT, at=_TIME, rows=_WHOLE, differ=_WHOLE, mended=_WHOLE))),
        dead_letters=nullable(_object(**_LETTERS)),
    ),
    "DeadLetters": _object(
        "What was put aside. `count` is null where it is not known; `quarantines` are of the targets of pipelines.",
        at=_TIME,
        pipelines=array(_object(pipeline=_TEXT, **_LETTERS)),
        streams=array(
            _object(stream=_TEXT, kind={"enum": ["dead letters", "quarantined"]}, place=_TEXT, count=nullable(_WHOLE))
        ),
        quarantines=array(_object(pipeline=_TEXT, count=nullable(_WHOLE), tables=array(_TEXT))),
    ),
    "PipelineLetters": _object(
        at=_TIME, pipeline=_TEXT, targets=array(_TEXT), **_LETTERS, letters=array(ref("DeadLetter"))
    ),
    "DeadLetter": _object(
        "`cut`: whether there is more of the payload.",
        failed_at=_TIME,
        letter_id=_TEXT,
        pipeline=_TEXT,
        batch=nullable(_WHOLE),
        stage=_TEXT,
        error=_TEXT,
        source=_TEXT,
        offset=nullable(_TEXT),
        target=nullable(_TEXT),
        payload=_TEXT,
        replays=_WHOLE,
        cut=_FLAG,
    ),
    "Planned": _object(
        "What would be done. `held`: how many letters or rows are left alone, by the reason.",
        at=_TIME,
        pipeline=_TEXT,
        letters=_WHOLE,
        held=_map(_WHOLE),
        place=_TEXT,
        targets=array(_TEXT),
    ),
    "RejectedPlan": _object(
        "`of`: the streams whose rejected events it holds; `letters`: how many events; `upto` is the last offset.",
        at=_TIME,
        stream=_TEXT,
        of=array(_TEXT),
        letters=_WHOLE,
        upto=_TEXT,
    ),
    "BackfillPlan": _object(
        "How many events of each stream are read again, up to gaps between offsets; `others` are read as a whole.",
        at=_TIME,
        pipeline=_TEXT,
        events=_map(_WHOLE),
        others=array(_TEXT),
        target=_TEXT,
    ),
    "ModelPlan": _object(
        "`step` is null where nothing has changed.",
        model=_TEXT,
        step=nullable(
            _object(
                change={"enum": ["new", "changed", "dependent"]},
                rows=nullable(_WHOLE),
                full=_FLAG,
                because=array(_TEXT),
                added=_map(_TEXT),
                dropped=array(_TEXT),
                retyped=_map(array(_TEXT)),
                unknown=nullable(_TEXT),
                outcome=_TEXT,
                problem=nullable(_TEXT),
            )
        ),
    ),
    "States": _object(at=_TIME, states=array(_object(pipeline=_TEXT, step=_STEP, **_STATE))),
    "Schedule": _object(
        at=_TIME,
        leader=_object(leads=_FLAG, host=nullable(_TEXT), pid=nullable(_WHOLE), since=nullable(_TIME)),
        running=array(_object(pipeline=_TEXT, run_id=_TEXT, attempt=_WHOLE, host=nullable(_TEXT), started_at=_TIME)),
        queue=array(
            _object(
                pipeline=_TEXT,
                slot=nullable(_TIME),
                why=_TEXT,
                is_due=_FLAG,
                waits_for=array(_TEXT),
                pool=nullable(_TEXT),
            )
        ),
        next=array(_object(pipeline=_TEXT, next_due=_TIME, schedule=_TEXT, state=_TEXT)),
        paused=array(_object(pipeline=_TEXT, paused_at=_TIME)),
    ),
    "Changes": _object(
        "`problem`: why none are shown.",
        at=_TIME,
        problem=nullable(_TEXT),
        changes=array(
            _object(
                "`at`: of one that recovered, when it failed last; `name`: of a pipeline, or the kind of a process.",
                at=_TIME,
                what={"type": "string", "enum": ["began to fail", "recovered", "cancelled", "paused", "started"]},
                name=_TEXT,
                note=_TEXT,
                run_id=nullable(_TEXT),
                failures=nullable(_WHOLE),
            )
        ),
    ),
    "Processes": _object(
        "`problem`: why none are shown.",
        at=_TIME,
        problem=nullable(_TEXT),
        processes=array(
            _object(
                "`lives`: false for one that ended without a word, or is silent; `pipeline`: of a streaming pipeline; "
                "`failing`: of one whose last attempt failed.",
                {"failing": _FLAG},
                kind={"type": "string", "enum": ["service", "worker", "scheduler", "streaming"]},
                pipeline=nullable(_TEXT),
                host=_TEXT,
                pid=_WHOLE,
                since=nullable(_TIME),
                heard=_TIME,
                lives=_FLAG,
            )
        ),
    ),
    "Action": _object(
        "What was done. `pid`: the process on this machine, of a command that was started; `action`: its id in the"
        " audit log, which says how it ended.",
        pipeline=_TEXT,
        done=_TEXT,
        pid=nullable(_WHOLE),
        action=_TEXT,
    ),
    "Audited": _object(
        "`outcome` is null until it is known.",
        id=_TEXT,
        at=_TIME,
        key_id=_TEXT,
        key_name=nullable(_TEXT),
        client=nullable(_TEXT),
        action=_TEXT,
        object=_TEXT,
        outcome=nullable(_TEXT),
    ),
    "Audit": _object(actions=array(ref("Audited"))),
    "Me": _object(
        "`reads_all`: whether it may read every stream, and pipelines too. `why_not`: why actions are off.",
        key=nullable(_object(id=_TEXT, name=nullable(_TEXT), scopes=array(_TEXT), streams=array(_TEXT))),
        reads_all=_FLAG,
        may_act=_FLAG,
        why_not=nullable(_TEXT),
    ),
    "Graph": _object(
        nodes=array(
            _object(
                id=_TEXT,
                kind={"enum": ["stream", "pipeline", "model", "streaming", "table", "source", "target"]},
                name=_TEXT,
                connection=nullable(_TEXT),
            )
        ),
        edges=array(_object(**{"from": _TEXT, "to": _TEXT})),
    ),
    "Overview": _object(
        at=_TIME,
        streams=array(
            _object(
                "",
                _HISTORY,
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
