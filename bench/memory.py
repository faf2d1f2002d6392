"""The memory of a streaming pipeline over few rows and over many, in batches of one size: `python -m bench.memory` over
1M and 10M rows of files, with `--source rabbitmq` over 100k and 5M messages. What sends them is another process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import servers
import weft
from bench.engine_loads import _rows
from bench.streaming import FILES, Inbox, Registered, Running, Target, _row, _topic, _written
from tests.faults.soak import below, jvm_of, program_of, status

BAR = 1.2
_EACH_SECONDS = 0.05
# So many times before it counts: the heap of a JVM grows until it has seen what it needs.
_WARM_UP = 5
_BATCH = 50_000


class Peaks(threading.Thread):
    """Looks at the driver, the JVM and the workers while something runs, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found = {"driver": 0, "JVM": 0, "workers": 0}
        self._over = threading.Event()

    def run(self) -> None:
        """Look until it is over."""
        driver = os.getpid()
        jvm = jvm_of(driver)
        assert jvm is not None
        while not self._over.wait(_EACH_SECONDS):
            # A process that the JVM forks has all of its memory for a moment.
            workers = sum(status(pid, "VmRSS") for pid in below(jvm) if not program_of(pid).endswith("/java"))
            now = {"driver": status(driver, "VmRSS"), "JVM": status(jvm, "VmRSS"), "workers": workers}
            self.found = {name: max(peak, now[name] // 1024) for name, peak in self.found.items()}

    def end(self) -> dict[str, int]:
        """The highest that was seen."""
        self._over.set()
        self.join()
        return self.found


# --------------------------------------------------------------------------------------- in the process that sends rows

_sending: list[Callable[[int], None]] = []


def _open(kind: str) -> tuple[dict[str, Any], str]:
    """Start a broker; return the fields of a connection to it, and what is read."""
    fields, query, send = _BROKERS[kind]()
    _sending.append(send)
    return fields, query


def _fill(rows: int) -> None:
    _sending[0](rows)


def _rabbitmq() -> Any:
    import pika

    from rabbitmq_server import RabbitMQServer

    server, numbers = RabbitMQServer(), itertools.count()
    server.start()
    queue = server.create_queue()

    def send(rows: int) -> None:
        with contextlib.closing(server.connect()) as opened:
            channel = opened.channel()
            for n in itertools.islice(numbers, rows):
                properties = pika.BasicProperties(message_id=str(n), delivery_mode=2)
                channel.basic_publish("", queue, json.dumps(_row(n)).encode(), properties)
            channel.queue_declare(queue, passive=True)

    return {"kind": "rabbitmq", "amqp_url": server.url()}, queue, send


def _kinesis() -> Any:
    from kinesis_streams import Kinesis

    server = servers.MotoServer()
    server.start()
    kinesis = Kinesis(server)
    stream = kinesis.create_stream()

    def send(rows: int) -> None:
        for at in range(0, rows, _BATCH):
            kinesis.put(stream, [json.dumps(_row(n)).encode() for n in range(at, min(at + _BATCH, rows))])

    return {"kind": "kinesis", **kinesis.fields()}, stream, send


def _pubsub() -> Any:
    from pubsub_server import PubSubServer

    server = PubSubServer()
    server.start()
    topic, subscription = server.create_queue()

    def send(rows: int) -> None:
        for at in range(0, rows, _BATCH):
            server.publish(topic, [json.dumps(_row(n)).encode() for n in range(at, min(at + _BATCH, rows))])

    return {"kind": "pubsub", **server.fields()}, subscription, send


def _registered(payload_format: str) -> Any:
    made = Registered(_topic(0)[0], payload_format)
    return {"kind": "kafka", **made.fields}, made.topic, made.produce


_BROKERS: dict[str, Callable[[], Any]] = {
    "rabbitmq": _rabbitmq,
    "kinesis": _kinesis,
    "pubsub": _pubsub,
    "avro": lambda: _registered("avro"),
    "protobuf": lambda: _registered("protobuf"),
}

# ------------------------------------------------------------------------------------------------------------ measuring


def main() -> int:
    """Measure and print; the exit code says whether the bar was reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--source", choices=("files", *_BROKERS), default="files")
    parser.add_argument("--many", type=int, help="instead of 10M rows or 5M messages")
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    # In a process of its own: what makes the rows takes more memory than what reads them.
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        if options.source == "files":
            few, many = _rows(options.scale), options.many or 10 * _rows(options.scale)
            take = _from_files(pool, few, many)
        else:
            few, many = int(100_000 * options.scale), options.many or int(5_000_000 * options.scale)
            take = _from_broker(pool, options.source)
        found = []
        for rows in [few] * (_WARM_UP + 1) + [many]:
            peaks = Peaks()
            peaks.start()
            take(rows)
            found.append(peaks.end())
            print(f"… {rows:,} rows: {found[-1]}", file=sys.stderr)
    less, more = found[_WARM_UP:]
    print(
        f"| peak memory, MB | {few:,} rows | {many:,} rows | at most | ratio | |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in less:
        print(f"| {name} | {less[name]} | {more[name]} | | {more[name] / less[name]:.2f} | |")
    ratio = sum(more.values()) / sum(less.values())
    mark = "✓" if ratio <= BAR else "✗"
    print(f"| all | {sum(less.values())} | {sum(more.values())} | {BAR} | **{ratio:.2f}** | {mark} |")
    return 0 if ratio <= BAR else 1


def _from_files(pool: ProcessPoolExecutor, few: int, many: int) -> Callable[[int], None]:
    folders = {rows: pool.submit(_written, rows, FILES * rows // few).result() / "parquet" for rows in (few, many)}
    target = Target(few)
    inbox = Inbox(target, "parquet", "ours", FILES)
    target.job("ours", lambda: None).reset()  # type: ignore[attr-defined]
    return lambda rows: inbox.fill(folders[rows], rows)


def _from_broker(pool: ProcessPoolExecutor, kind: str) -> Callable[[int], None]:
    fields, query = pool.submit(_open, kind).result()
    target = Target(10)
    if kind in ("rabbitmq", "pubsub"):
        fields["received_log"] = weft.connect(url=target.url)
    target.job("ours", lambda: None).reset()  # type: ignore[attr-defined]
    running = Running(target, weft.Source(connection=weft.connect(**fields), query=query, max_rows=_BATCH), "ours")
    return lambda rows: running.take(rows, lambda: pool.submit(_fill, rows).result())


if __name__ == "__main__":
    sys.exit(main())
