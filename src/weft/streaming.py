"""Streaming pipelines from Python: their parts, and how to run them."""

from __future__ import annotations

import os
from typing import Any

from weft.pipelines.streaming.declare import make, streaming_pipeline
from weft.pipelines.streaming.spec import Lookup, Source, StreamingPipeline, Target

__all__ = [
    "Lookup",
    "Source",
    "StreamingPipeline",
    "Target",
    "run_pipeline",
    "run_streaming_pipeline",
    "streaming_pipeline",
]


def run_streaming_pipeline(
    *,
    once: bool = False,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    restart_on_error: bool = False,
    min_backoff_ms: int = 1000,
    max_backoff_ms: int = 30_000,
    max_restarts: int | None = None,
    **options: Any,
) -> None:
    """Declare a streaming pipeline and run it until it is stopped.

        weft.run_streaming_pipeline(name="copies", source=orders, target="warehouse", target_table="orders", once=True)

    `options` are those of `@weft.streaming_pipeline`, the others those of `weft consume`. SIGTERM and Ctrl-C finish the
    batch in hand; then it returns, or raises `KeyboardInterrupt`.
    """
    from weft.operate.supervisor import supervise

    supervise(
        make(**options),
        once=once,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        restart_on_error=restart_on_error,
        min_backoff_ms=min_backoff_ms,
        max_backoff_ms=max_backoff_ms,
        max_restarts=max_restarts,
    )


def run_pipeline(
    config: str | os.PathLike[str],
    *,
    once: bool = False,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    restart_on_error: bool = False,
    min_backoff_ms: int = 1000,
    max_backoff_ms: int = 30_000,
    max_restarts: int | None = None,
) -> None:
    """Run the streaming pipeline of a TOML file until it is stopped, as `weft consume pipeline.toml` does."""
    from weft.operate.supervisor import supervise
    from weft.pipelines.streaming.toml import read

    supervise(
        read(config),
        once=once,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        restart_on_error=restart_on_error,
        min_backoff_ms=min_backoff_ms,
        max_backoff_ms=max_backoff_ms,
        max_restarts=max_restarts,
    )
