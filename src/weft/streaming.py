"""Streaming pipelines from Python: their parts, and how to run them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Unpack, overload

from weft.operate.run_options import OPTIONS, RunKeywords, Running
from weft.options import refuse_unknown
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.declare import make, streaming_pipeline
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.options import StreamingOptions
from weft.pipelines.streaming.spec import Lookup, Source, StreamingPipeline, Target
from weft.pipelines.streaming.windows import Aggregation, StateStore, Watermark, Window

__all__ = [
    "CDC",
    "Aggregation",
    "Join",
    "Lookup",
    "Source",
    "StateStore",
    "StreamingPipeline",
    "Target",
    "Watermark",
    "Window",
    "run_pipeline",
    "run_streaming_pipeline",
    "streaming_pipeline",
]


class RunOptions(StreamingOptions, RunKeywords, total=False):
    """What `run_streaming_pipeline` takes."""


@overload
def run_streaming_pipeline(**options: Unpack[RunOptions]) -> None: ...
@overload
def run_streaming_pipeline(*, source_kind: str, **options: Any) -> None:
    """The fields of a connection stand next to the options."""


def run_streaming_pipeline(**options: Any) -> None:
    """Declare a streaming pipeline and run it until it is stopped.

        weft.run_streaming_pipeline(name="copies", source=orders, target="warehouse", target_table="orders", once=True)

    `options` are those of `@weft.streaming_pipeline` and those of `weft consume`: `once`, `metrics`,
    `metrics_port`, `metrics_host`, `restart_on_error`, `min_backoff_ms`, `max_backoff_ms`, `max_restarts`. SIGTERM and
    Ctrl-C finish the current batch; then it returns, or raises `KeyboardInterrupt`.
    """
    running = Running(**{name: options.pop(name) for name in OPTIONS if name in options})
    _supervise(make(OPTIONS, **options), running)


def run_pipeline(config: str | os.PathLike[str], **options: Unpack[RunKeywords]) -> None:
    """Run the streaming pipeline of a TOML file until it is stopped, as `weft consume pipeline.toml` does.

    `options` are those of the command: `once`, `metrics`, `metrics_port`, `metrics_host`, `restart_on_error`,
    `min_backoff_ms`, `max_backoff_ms`, `max_restarts`.
    """
    from weft.pipelines.streaming.toml import read

    refuse_unknown(options, OPTIONS, "run_pipeline")
    running = Running(**options)
    _supervise(read(config), running)


def _supervise(pipeline: StreamingPipeline, running: Running) -> None:
    # Spark and Arrow, which declaring a pipeline does not need.
    from weft.engine.streaming.spark_engine import SparkEngine
    from weft.operate import sinks
    from weft.operate.streaming_alerts import reported
    from weft.operate.supervisor import supervise
    from weft.operate.traces import open_traces, project_url

    running = replace(running, metrics=sinks.url_beside_scrapes(running.metrics))
    with open_traces(project_url()), reported(pipeline) as listeners:
        supervise(SparkEngine(pipeline), running, listeners)
