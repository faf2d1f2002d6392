"""Publishes over HTTP in the trace of their caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collector import collector
from served import Served

pytestmark = pytest.mark.timing

STREAMS = """
@weft.stream(fields={"n": "int64"})
def orders(): ...
"""


def test_a_publish_over_http(server: Callable[..., Served]) -> None:
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with collector() as collected:
        served = server(STREAMS, "--traces", collected.url)
        done = served.publish("orders", [{"n": 1}, {"n": 2}], traceparent=f"00-{trace_id}-{parent}-01")
        served.publish("orders", {"n": 3}, traceparent=f"00-{trace_id}-{parent}-00")  # not sampled by its caller
        served.publish("orders", {"n": 4}, traceparent="nonsense")
        assert served.stop() == 0
        spans = collected.all_spans()
    named = sorted(each.name for each in spans)
    assert named == ["create orders", "publish orders", "publish orders"]
    inside = next(each for each in spans if each.name == "publish orders" and each.parent_span_id)
    assert (inside.trace_id.hex(), inside.parent_span_id.hex()) == (trace_id, parent)
    assert {each.key: each.value.string_value for each in inside.attributes}["weft.publish_id"] == done["publish_id"]
