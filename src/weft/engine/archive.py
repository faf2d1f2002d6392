"""The archive of loaded classes with which Spark's JVM starts in half the time.

Most of a start is Java reading, checking and linking 15,000 classes. Java can keep the result in a file and map it into
memory the next time. The file fits one Java and one set of jars. Where there is none that fits, the session starts
without it, and a process of the lowest priority makes one meanwhile, once:

    python -m weft.engine.archive        makes it now, for an image of a container say, and prints where it is
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine import config, jvm
from weft.engine.archive_files import archive_files, archives_folder, changed_at
from weft.engine.jars import locked_folder
from weft.engine.java import Java, find_java
from weft.engine.log import EngineLog
from weft.engine.session import connect, disconnect
from weft.errors import StorageError
from weft.spark_support.sessions import read_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNUSED_DAYS = 30
_DUMP_PATIENCE = 300.0


def build(java: Java) -> Path:
    """Make the archive if there is none that fits, and give its file."""
    base, archive = archive_files(java)
    try:
        with locked_folder(archives_folder()):
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


def _sweep() -> None:
    """Remove what killed processes left, and archives that were not used for long: 160 MB for each environment."""
    for path in archives_folder().iterdir():
        stale = time.time() - changed_at(path) / 1e9 > _UNUSED_DAYS * 86_400
        if path.name.startswith("unfinished-") or (path.suffix == ".jsa" and stale):
            path.unlink(missing_ok=True)


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """Yield a file to write that becomes `path` in one step when it is whole."""
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
    with tempfile.TemporaryDirectory(prefix="weft-archive-") as root:
        settings = config.SparkSettings(Path(root), master="local[2]")
        conf = {**config.session_conf(settings), "spark.driver.memory": "1g"}
        flags = [*jvm.PROFILES["quick"], f"-XX:ArchiveClassesAtExit={path}"]
        if base is not None:
            flags.append(f"-XX:SharedArchiveFile={base}")
        log = EngineLog(Path(root) / "spark.log")
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
    from pyspark.sql.datasource import DataSourceReader

    def same(batches: Any) -> Any:
        yield from batches

    class Numbers(DataSourceReader):
        """A data source in Python, as those of SQL databases are."""

        def read(self, partition: Any) -> Any:
            import pyarrow

            yield pyarrow.RecordBatch.from_pydict({"id": [1, 2], "name": ["a", "b"]})

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
    read_source(spark, "weft_training", "id bigint, name string", Numbers).filter("id > 1").toArrow()
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
