"""Runs a streaming pipeline over what is there, and kills it (-9) at a point of a batch.

python streaming_process.py '{"targets": […], "point": "loaded", "times": 2, "with_jvm": true, "way": "tasks", …}'

Every Python process of Spark's has the same eyes, by `sitecustomize`: what reads offsets and what writes rows in tasks
is seen where it happens.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

# When Spark knows how far a batch is to reach, and has not written it down yet. Then, in order:
BEFORE_OFFSETS, AFTER_OFFSETS, MID_SINK = "before the offset log", "after the offset log", "mid-sink"
AFTER_TARGET = "after the target's commit"
BEFORE_COMMIT, AFTER_COMMIT = "before Spark's commit", "after Spark's commit"
POINTS = (BEFORE_OFFSETS, AFTER_OFFSETS, MID_SINK, AFTER_TARGET, BEFORE_COMMIT, AFTER_COMMIT)
_STEPS = {
    AFTER_OFFSETS: ("weft.streaming", {"begun"}),
    MID_SINK: ("weft.commit", {"claimed", "staged", "checked", "created", "moved", "recorded"}),
    AFTER_TARGET: ("weft.streaming", {"loaded"}),
    BEFORE_COMMIT: ("weft.streaming", {"done"}),
}
# By Spark's own writers there is no step between the first and the last.
_SPARK_WRITES = ("weft.commit", {"begun"})
_SPARK_WRITES_SECONDS = 0.3


class Killer:
    """Ends the driver when something has happened so often, in whichever of its processes."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def seen(self, seconds: float = 0.0) -> None:
        with open("seen", "ab") as file:
            file.write(b".")
            number = file.tell()
        if number == self.job["times"]:
            if seconds:
                threading.Timer(seconds, self.kill).start()
            else:
                self.kill()

    def kill(self) -> None:
        driver = int(Path("driver.pid").read_text())
        if self.job["with_jvm"]:
            for jvm in _children(driver):
                os.kill(jvm, signal.SIGKILL)
        os.kill(driver, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    return [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


def watch(job: dict[str, Any]) -> None:
    """In every process: have it end the driver where the job says."""
    killer, point = Killer(job), job["point"]
    if point == BEFORE_OFFSETS:
        _watch_offsets(killer)
    elif point in _STEPS:
        by_spark = point == MID_SINK and job["spark_writes"]
        name, steps = _SPARK_WRITES if by_spark else _STEPS[point]

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if record.getMessage() in steps:
                    killer.seen(_SPARK_WRITES_SECONDS if by_spark else 0.0)

        logging.getLogger(name).setLevel(logging.DEBUG)
        logging.getLogger(name).addHandler(Listener())


def _watch_offsets(killer: Killer) -> None:
    """Spark asks for the offsets of the next batch, and gets no answer."""
    from weft.engine.streaming.log_source import Offsets

    following = Offsets.following

    def asked(self: Offsets, after: int) -> int:
        upto = following(self, after)
        if upto > after:
            killer.seen()
        return upto

    Offsets.following = asked  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------------------------------- the driver


def _watch_publishes(killer: Killer) -> None:
    """A batch is several publishes, and one of them is done."""
    from weft.engine.streaming import target_streams

    target_streams._EVENTS = 7
    real = target_streams.publish_batch

    def publish_batch(*given: Any) -> Any:
        told = real(*given)
        killer.seen()
        return told

    target_streams.publish_batch = publish_batch


def _watch_topic(killer: Killer, bootstrap: str, topic: str) -> None:
    """Some of the messages are there, and nobody told the driver yet."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "watch", "log_level": 0})

    def end() -> int:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), 10)[1])

    def follow() -> None:
        last = end()
        while True:
            if (now := end()) > last:
                last = now
                killer.seen()

    threading.Thread(target=follow, daemon=True).start()


def _watch_commits(killer: Killer) -> None:
    folder = Path(".weft/checkpoints/copy/commits")

    def committed() -> int:
        return (
            max((int(each) for each in os.listdir(folder) if each.isdecimal()), default=-1) if folder.exists() else -1
        )

    def follow() -> None:
        last = committed()
        while True:
            if committed() > last:
                last += 1
                killer.seen()
            time.sleep(0.0005)

    threading.Thread(target=follow, daemon=True).start()


def declared(targets: list[dict[str, Any]]) -> list[Any]:
    """The targets of a pipeline, made of JSON."""
    import weft

    made = []
    for each in targets:
        connection = weft.connect(**each["connection"])
        about = dict(each["target"])
        if "stream" in about and connection.kind != "kafka":
            fields = {"n": "int64", "name": "string"}
            about["stream"] = weft.stream(name=about["stream"], fields=fields, connection=connection)(lambda: None)
        made.append(weft.Target(connection=connection, **about))
    return made


def in_lakes(targets: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The numbers in files and Delta tables, by connection: a caller without Spark cannot read them."""
    import weft

    found = {}
    for each in targets:
        if not each["connection"].get("kind", "").startswith(("delta", "object_store")):
            continue
        connection, target = weft.connect(**each["connection"]), each["target"]
        rows = weft.read(target.get("table") or target["prefix"], source=connection).select("n").collect()
        found[each["connection"]["name"]] = [row["n"] for row in rows]
    return found


def main(job: dict[str, Any]) -> None:
    import weft
    from weft.engine.streaming import transform
    from weft.engine.streaming.spark_engine import SparkEngine
    from weft.operate.run_options import Running
    from weft.operate.supervisor import supervise
    from weft.pipelines.streaming.declare import make

    Path("driver.pid").write_text(str(os.getpid()))
    killer = Killer(job)
    if job["way"] == "tasks":
        transform.SMALL = 0
    for each in job["targets"]:
        if job["point"] == MID_SINK and each["connection"].get("kind") == "kafka":
            _watch_topic(killer, each["connection"]["bootstrap_servers"], each["target"]["stream"])
    if job["point"] == MID_SINK and any("stream" in each["target"] for each in job["targets"]):
        _watch_publishes(killer)
    if job["point"] == AFTER_COMMIT:
        _watch_commits(killer)
    events = weft.stream(name="events", fields={"n": "int64", "name": "string"})(lambda: None)
    pipeline = make(
        name="copy",
        source=events,
        targets=declared(job["targets"]),
        transform_sql="SELECT n, name FROM source" if job["has_sql"] else None,
    )
    supervise(SparkEngine(pipeline), Running(once=True))
    if job["point"] is None:
        print(json.dumps(in_lakes(job["targets"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
