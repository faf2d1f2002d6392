"""PostgreSQL into files and Delta, against Spark's own JDBC reader into the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import weft
from bench.engine_loads import SELECT, Job, Pair, _folder, _rows
from bench.harness import Case, SkippedError

_DRIVER = Path("/usr/share/java/postgresql.jar")


def _jdbc(pair: Pair, spark: Any) -> Any:
    """The table by Spark's own reader."""
    parts = urlsplit(pair.here)
    url = f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}"
    reader = spark.read.format("jdbc").option("url", url).option("dbtable", "orders")
    return reader.option("user", parts.username or "postgres").option("driver", "org.postgresql.Driver").load()


def _into(kind: str) -> Callable[[float], tuple[Job, Job]]:
    def prepare(scale: float) -> tuple[Job, Job]:
        if not _DRIVER.exists():
            raise SkippedError("Spark's JDBC reader needs a driver: sudo apt-get install libpostgresql-jdbc-java")
        from weft.engine import connectors

        pair = Pair(_rows(scale))
        folder = Path(tempfile.mkdtemp(dir=_folder.name))
        connection: Any = weft.ObjectStoreLocalConnection(path=str(folder / "ours"), format="parquet")
        spark = weft.spark(jars=[_DRIVER])
        if kind == "delta":
            connection = weft.DeltaLocalConnection(path=str(folder / "ours"))
            spark = connectors.ready(spark, connection)

        def ours() -> int:
            weft.load(SELECT, source=weft.connect(url=pair.here), target="orders", connection=connection)
            return pair.rows

        def theirs() -> int:
            _jdbc(pair, spark).write.format(kind).save(str(folder / "theirs"))
            return pair.rows

        for job, name in ((ours, "ours"), (theirs, "theirs")):
            job.reset = lambda name=name: shutil.rmtree(folder / name, ignore_errors=True)  # type: ignore[attr-defined]
        return ours, theirs

    return prepare


CASES = [
    Case("PostgreSQL to Parquet", "Spark's JDBC reader into the same", 2, _into("parquet"), needs="postgres"),
    Case("PostgreSQL to Delta", "Spark's JDBC reader into the same", 2, _into("delta"), needs="postgres"),
]
