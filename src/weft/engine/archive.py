"""The archive of loaded classes with which Spark's JVM starts in half the time.

Most of a start is Java reading, checking and linking 15,000 classes. Java can keep the result in a file and map it into
memory the next time. The file fits one Java and one set of jars. Where there is none that fits, the session starts
without it, and a process of the lowest priority makes one beside it, once:

    python -m weft.engine.archive        makes it now, for an image of a container say, and prints where it is
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine import config, jvm
from weft.engine.jars import cache_folder
from weft.engine.java import Java, find_java
from weft.engine.log import Log
from weft.errors import StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TRAINING = 1
"""Raised when the training below changes, so that it is done again."""
_UNUSED_DAYS = 30
_DUMP_PATIENCE = 300.0


def archives_folder() -> Path:
    """Where the archives are. Each may be removed at any time: it is made again."""
    return cache_folder() / "archives"


def archive_flags(java: Java) -> list[str]:
    """The flags with which Java uses the archive that fits it, none where there is none."""
    base, archive = _files(java)
    if not archive.exists() or not (base is None or base.exists()):
        return []
    for path in filter(None, (base, archive)):
        _mark_used(path)
    # auto: without a word, Java does without it where it does not fit after all.
    return [
        f"-XX:SharedArchiveFile={f'{base}:' if base else ''}{archive}",
        "-Xshare:auto",
        "-Xlog:cds=off,cds+dynamic=off",
    ]


def build_in_background(java: Java) -> None:
    """Have another process make the archive, unless one is at it. It goes on when this one ends."""
    try:
        with _alone(wait=False):
            pass
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.engine.archive", "--low-priority"],
            cwd=archives_folder(),  # not where this process is: a module there might be taken for one of ours
            env={**os.environ, "JAVA_HOME": str(java.home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no room or no right to write: it stays as slow as it is
        return
    # Waited for, so that it leaves no zombie behind.
    threading.Thread(target=process.wait, name="weft-spark-archive", daemon=True).start()


def build(java: Java) -> Path:
    """Make the archive if there is none that fits, and give its file."""
    base, archive = _files(java)
    try:
        with _alone(wait=True):
            _sweep()
            if base is not None and not base.exists():
                with _in_place_of(base) as unfinished:
                    _dump_base(java, unfinished)
            if not archive.exists():
                with _in_place_of(archive) as unfinished:
                    _train(java, base, unfinished)
    except OSError as error:
        raise StorageError(
            f"The archive of Spark's classes cannot be made in {archives_folder()}: {error.strerror or error}.",
            hint="Spark works without it. WEFT_CACHE names another folder; archive = false in [spark] does without.",
        ) from None
    return archive


def _files(java: Java) -> tuple[Path | None, Path]:
    """The archive of Java's own classes, which some runtimes bring along, and the one of Spark's on top of it."""
    of_java = (java.home, java.version, _changed(java.home / "release"))
    home = jvm.spark_home()
    of_spark = (*of_java, home, _changed(home / "jars"), *jvm.MODULE_FLAGS, _TRAINING)
    folder = archives_folder()
    has_own = (java.home / "lib" / "server" / "classes.jsa").exists()
    base = None if has_own else folder / f"java-{java.version}-{_digest(of_java)}.jsa"
    return base, folder / f"spark-{_digest(of_spark)}.jsa"


def _digest(parts: tuple[object, ...]) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _mark_used(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > 86_400:
            os.utime(path)


def _sweep() -> None:
    """Remove what killed processes left half made, and what nobody used for long: it is 160 MB for each environment."""
    for path in archives_folder().iterdir():
        stale = time.time() - _changed(path) / 1e9 > _UNUSED_DAYS * 86_400
        if path.name.startswith("unfinished-") or (path.suffix == ".jsa" and stale):
            path.unlink(missing_ok=True)


@contextmanager
def _alone(*, wait: bool) -> Iterator[None]:
    """Hold the folder's lock, which ends with its process; without `wait`, an OSError if somebody has it."""
    archives_folder().mkdir(parents=True, exist_ok=True)
    with (archives_folder() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path` in one step when it is whole."""
    unfinished = path.with_name(f"unfinished-{os.getpid()}-{path.name}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _dump_base(java: Java, path: Path) -> None:
    subprocess.run(
        [str(java.executable), "-Xshare:dump", f"-XX:SharedArchiveFile={path}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _train(java: Java, base: Path | None, path: Path) -> None:
    """Run a session that does a little of everything, and have Java keep what it loaded."""
    from weft.engine.session import connect, disconnect

    with tempfile.TemporaryDirectory(prefix="weft-archive-") as root:
        settings = config.SparkSettings(Path(root), master="local[2]")
        conf = {**config.session_conf(settings), "spark.driver.memory": "1g"}
        flags = [*jvm.profile_flags("quick"), f"-XX:ArchiveClassesAtExit={path}"]
        if base is not None:
            flags.append(f"-XX:SharedArchiveFile={base}")
        log = Log(Path(root) / "spark.log")
        machine = jvm.start_jvm(java, conf, flags=flags, log=log)
        try:
            session, gateway = connect(machine, conf)
            _exercise(session, Path(root) / "files")
            disconnect(session, gateway)
        finally:
            machine.stop(patience=_DUMP_PATIENCE)


def _exercise(spark: SparkSession, folder: Path) -> None:
    """What loads and queries usually do, so that the classes for it are in the archive."""
    import pyarrow as pa
    from pyspark.sql import functions
    from pyspark.sql.datasource import DataSource, DataSourceReader

    def same(batches: Any) -> Any:
        yield from batches

    class Numbers(DataSource):
        """A data source in Python, as those of SQL databases are."""

        @classmethod
        def name(cls) -> str:
            return "weft_training"

        def schema(self) -> str:
            return "id bigint, name string"

        def reader(self, schema: Any) -> DataSourceReader:
            class Reader(DataSourceReader):
                def read(self, partition: Any) -> Any:
                    import pyarrow

                    yield pyarrow.RecordBatch.from_pydict({"id": [1, 2], "name": ["a", "b"]})

            return Reader()

    rows = pa.table({"id": [1, 2, 3], "name": ["a", "b", None], "amount": [1.5, 2.5, None]})
    table = spark.createDataFrame(rows).withColumn("at", functions.current_timestamp())
    table.createOrReplaceTempView("training")
    query = """
        SELECT a.id, max(b.name) AS name, count(*) AS n, sum(CAST(b.amount AS DECIMAL(18, 4))) AS total,
               row_number() OVER (ORDER BY a.id) AS place
        FROM training a JOIN training b ON a.id = b.id WHERE a.id > 0 GROUP BY a.id ORDER BY 1
    """
    spark.sql(query).toArrow()
    spark.sql(query).collect()
    table.mapInArrow(same, table.schema).toArrow()
    spark.sparkContext.parallelize([1, 2], 2).map(str).collect()
    spark.dataSource.register(Numbers)
    spark.read.format("weft_training").load().filter("id > 1").toArrow()
    for form in ("parquet", "json", "csv", "orc"):
        path = str(folder / form)
        table.write.format(form).mode("overwrite").save(path)
        spark.read.format(form).schema(table.schema).load(path).groupBy("name").count().toArrow()
    stream = spark.readStream.schema(table.schema).parquet(str(folder / "parquet")).select("id", "name")
    started = (
        stream.writeStream.foreachBatch(lambda frame, _: frame.toArrow() and None)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    started.awaitTermination()


def main() -> None:
    """Make the archive for the Java that would be used."""
    if "--low-priority" in sys.argv[1:]:
        os.nice(19)
    print(build(find_java()))


if __name__ == "__main__":
    main()
