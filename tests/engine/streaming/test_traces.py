"""The trace from a publish through a micro-batch to the commits of its targets."""

from __future__ import annotations

from typing import Any

import weft
from collector import attributes, collector
from engine.streaming.conftest import declare, run_once
from weft.operate.traces import open_traces


def test_from_the_publish_to_the_commits(plain_spark: Any, streams: Any) -> None:
    orders = declare("orders", n="int64")
    with collector() as collected:
        with open_traces(collected.url):
            done = [weft.publish_sync(orders, [{"n": n}, {"n": n}]) for n in range(2)]
            run_once(name="copy", source=orders, target_table=(None, "copies"))
        spans = collected.all_spans()
    publishes = [each for each in spans if each.name == "publish orders"]
    (process,) = (each for each in spans if each.name == "process orders")
    (commit,) = (each for each in spans if each.name.startswith("commit "))
    assert [(each.trace_id, each.span_id) for each in process.links] == [
        (each.trace_id, each.span_id) for each in publishes
    ]
    assert [attributes(each)["weft.publish_id"] for each in publishes] == [each["publish_id"] for each in done]
    about = attributes(process)
    query_id = about.pop("weft.query_id")
    assert about == {
        "weft.pipeline": "copy",
        "weft.batch_id": 0,
        "messaging.system": "weft",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "copy",
        "messaging.batch.message_count": 4,
    }
    assert process.kind == process.SPAN_KIND_CONSUMER
    assert (commit.trace_id, commit.parent_span_id) == (process.trace_id, process.span_id)
    stored = attributes(commit)
    assert (stored["weft.query_id"], stored["weft.batch_id"], stored["weft.rows_read"]) == (query_id, 0, 4)
    assert stored["weft.replayed"] is False
