"""Spans of publishes, runs and dispatches, and how they find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import servers
import warm_python
import weft
from collector import Collector, attributes, collector
from weft import tracing
from weft.cli.pipelines import open_runner
from weft.engine.streaming.log_source import LogSource
from weft.errors import NotFoundError, SettingsError, WeftError
from weft.operate import otlp, traces
from weft.operate.executors import Dispatch
from weft.operate.runlog import open_run_log
from weft.operate.scheduler import Scheduler
from weft.operate.traces import open_traces
from weft.project import Project, use
from weft.systems.stream_source import SourceSettings

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = f"{CALLER[:-2]}00"


@pytest.fixture
def collected() -> Iterator[Collector]:
    with collector() as made:
        yield made


def ids(of: Any) -> tuple[bytes, bytes]:
    return of.trace_id, of.span_id


def test_a_publish_and_its_batch(collected: Collector, numbers: Any) -> None:
    with open_traces(collected.url):
        done = weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
        with tracing.span("process numbers", "consumer", {}):
            tracing.link([done["publish_id"]])
    publish, process = collected.spans["publish numbers"], collected.spans["process numbers"]
    assert attributes(publish) == {
        "messaging.system": "weft",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": "numbers",
        "messaging.batch.message_count": 2,
        "weft.publish_id": done["publish_id"],
    }
    assert publish.kind == publish.SPAN_KIND_PRODUCER
    assert publish.parent_span_id == b""
    assert [ids(each) for each in process.links] == [ids(publish)]


def test_a_publish_for_a_caller(collected: Collector, numbers: Any) -> None:
    with open_traces(collected.url):
        with tracing.received({"traceparent": CALLER}):
            done = weft.publish_sync(numbers, {"n": 1})
        with tracing.span("process numbers", "consumer", {}):
            tracing.link([done["publish_id"]])
    publish, create, process = (collected.spans[f"{each} numbers"] for each in ("publish", "create", "process"))
    _, trace_id, parent, _ = CALLER.split("-")
    assert (publish.trace_id.hex(), publish.parent_span_id.hex()) == (trace_id, parent)
    assert [ids(each) for each in publish.links] == [ids(create)]
    assert [ids(each) for each in create.links] == [ids(publish)]
    assert [ids(each) for each in process.links] == [ids(create)]
    assert attributes(process.links[0]) == {"weft.publish_id": done["publish_id"]}


@pytest.mark.parametrize("traceparent", [UNSAMPLED, None])
def test_what_is_not_traced_is_not_linked(collected: Collector, numbers: Any, traceparent: str | None) -> None:
    if traceparent is None:
        done = weft.publish_sync(numbers, {"n": 1})  # nobody traces
    with open_traces(collected.url):
        if traceparent is not None:
            with tracing.received({"traceparent": traceparent}):
                done = weft.publish_sync(numbers, {"n": 1})
        with tracing.span("process numbers", "consumer", {}):
            tracing.link([done["publish_id"]])
    assert collected.spans.keys() == {"process numbers"}
    assert not collected.spans["process numbers"].links


@pytest.mark.parametrize("share", ["0.25", "0.75"])
def test_samplers_of_opentelemetry(
    collected: Collector, numbers: Any, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    with open_traces(collected.url):
        done = [weft.publish_sync(numbers, {"n": n})["publish_id"] for n in range(200)]
    sampled = [attributes(each)["weft.publish_id"] for each in collected.all_spans()]
    # By chance it is outside once in a hundred million times.
    assert abs(len(sampled) - 200 * float(share)) < 36
    assert sorted(sampled) == sorted(each for each in done if each[14] == "8")


def test_the_publishes_of_a_batch(collected: Collector, numbers: Any) -> None:
    with open_traces(collected.url):
        done = [weft.publish_sync(numbers, [{"n": n}] * 3)["publish_id"] for n in range(3)]
    source = LogSource(None, SourceSettings("numbers"), numbers)

    class Ranges:
        def collect(self) -> list[tuple[int, int]]:
            return [(3, 9)]

    assert list(source.publish_ids(source.take(Ranges()))) == done[1:]


def test_spans_that_messages_name(collected: Collector) -> None:
    """A span that was not sampled is nowhere to be found, and others may write anything."""
    nobody = f"00-{'0' * 32}-{'0' * 16}-01"
    with open_traces(collected.url), tracing.span("process orders", "consumer", {}):
        tracing.link([], [CALLER, UNSAMPLED, nobody, "nonsense", ""])
    (link,) = collected.spans["process orders"].links
    assert (link.trace_id.hex(), link.span_id.hex()) == tuple(CALLER.split("-")[1:3])


def test_more_spans_than_a_span_links_to(collected: Collector) -> None:
    callers = [f"00-{n:032x}-{n:016x}-01" for n in range(1, 200)]
    with open_traces(collected.url), tracing.span("process orders", "consumer", {}):
        tracing.link([], callers)
    linked = [int(each.span_id.hex(), 16) for each in collected.spans["process orders"].links]
    assert linked == list(range(1, 129))


def test_a_dispatch_and_its_run(collected: Collector, project: Path) -> None:
    started: list[Dispatch] = []

    class Starts:
        def start(self, dispatch: Dispatch) -> Any:
            started.append(dispatch)

            class Run:
                def ended(self) -> None: ...

            return Run()

    with use(Project()) as fresh:
        fresh.clock = datetime(2030, 5, 1, 12, 0, 30, tzinfo=UTC).timestamp

        @weft.pipeline(target="numbers", schedule="* * * * *")
        def load() -> list[dict[str, int]]:
            return [{"n": 1}, {"n": 2}]

        with open_traces(collected.url), open_run_log("memory://") as log:
            assert Scheduler(log, Starts(), traces=collected.url).tick() == ["load"]
        environment = started[0].environment
        assert environment["WEFT_TRACES"] == collected.url
        with open_traces(environment["WEFT_TRACES"], environment), open_runner("memory://") as runner:
            (done,) = runner.run_due()
    assert done.status == "succeeded"
    dispatch, run, loads = (collected.spans[each] for each in ("dispatch load", "run load", "load numbers"))
    assert run.trace_id == loads.trace_id == dispatch.trace_id
    assert (run.parent_span_id, loads.parent_span_id) == (dispatch.span_id, run.span_id)
    slot = "2030-05-01T12:00:00+00:00"
    expected = {"weft.pipeline": "load", "weft.run_id": done.run_id, "weft.attempt": 1, "weft.slot": slot}
    assert attributes(run) == expected
    assert attributes(loads)["weft.target"] == "numbers"


@pytest.mark.timing
def test_a_command_that_belongs_to_a_trace(collected: Collector, project: Path) -> None:
    """What starts it names the trace, and the project where spans go."""
    (project / "work.py").write_text(
        "import weft\n@weft.pipeline(target='numbers')\ndef load():\n    return [{'n': 1}]\n"
    )
    (project / "weft.toml").write_text(f'modules = ["work"]\ntraces = "{collected.url}"\n')
    command = [sys.executable, "-m", "weft", "run", "load"]
    done = warm_python.run(command, cwd=project, env={**os.environ, "TRACEPARENT": CALLER}, check=False)
    assert done.returncode == 0
    run = collected.spans["run load"]
    assert (run.trace_id.hex(), run.parent_span_id.hex()) == tuple(CALLER.split("-")[1:3])
    off = warm_python.run([*command, "--traces", "null://"], cwd=project, check=False)
    assert off.returncode == 0
    assert len(collected.spans) == 2


def test_an_error_without_its_secrets(collected: Collector) -> None:
    with open_traces(collected.url), pytest.raises(WeftError), tracing.span("run load", "consumer", {}):
        raise WeftError("postgres://me:hunter2@host/db does not answer.")
    span = collected.spans["run load"]
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert "does not answer" in span.status.message
    assert attributes(span) == {"error.type": "WeftError"}
    assert not span.events
    assert "hunter2" not in str(span)


def test_a_collector_that_hangs_holds_nobody_up(
    numbers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a publish nor the end of the block waits for its answer; the exporter would, for ten minutes."""
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with open_traces(f"otlp://127.0.0.1:{silent.getsockname()[1]}", flush_seconds=0.2):
            assert weft.publish_sync(numbers, {"n": 1})["rows_received"] == 1
        # The spans are still being sent.
        assert "The last spans were not sent" in caplog.text
        assert any(thread.name == "weft-traces" for thread in threading.enumerate())
    assert tracing.tracer is None


def test_a_collector_that_is_away(numbers: Any) -> None:
    with open_traces(f"otlp://127.0.0.1:{servers.free_port()}", flush_seconds=0.2):
        assert weft.publish_sync(numbers, {"n": 1})["rows_received"] == 1


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("otpl://host", NotFoundError, r"no traces sink otpl://[\s\S]*'otlp'"),
        ("stdout://", NotFoundError, "no traces sink stdout"),
        ("otlp://", SettingsError, "needs the host"),
        ("otlp://me:hunter2@host", SettingsError, "too much in it"),
        ("otlp://host:port", SettingsError, "cannot be read"),
    ],
)
def test_refused(url: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught, open_traces(url):
        pass
    assert "hunter2" not in str(caught.value)
    with pytest.raises(error, match=says):
        traces.check(url)


def test_nothing_is_imported_where_nobody_traces(project: Path) -> None:
    (project / "work.py").write_text(
        "import weft\n@weft.pipeline(target='numbers')\ndef load():\n    return [{'n': 1}]\n"
        "@weft.stream(fields={'n': 'int64'})\ndef numbers(): ...\nweft.publish_sync('numbers', {'n': 1})\n"
    )
    program = """
import sys
from weft.cli import main
sys.argv = ["weft", "run", "load", "--module", "work"]
try:
    main()
finally:
    print("loaded:", *(name for name in sys.modules if "opentelemetry" in name))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False)
    assert "succeeded" in done.stdout, done
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
