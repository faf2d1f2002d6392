"""Spark sessions for readers and writers: settings of their own, frames between sessions, classes of the JVM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Literal

# Tests stop a process at each step of a load, by a handler on this logger.
_steps = logging.getLogger("weft.commit")

TIME_FORMATS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of Spark by which times in CSV and JSON keep their microseconds."""
FILE_METADATA = "_metadata"
"""The column in which Spark's readers describe the file of each row."""
QUOTED_NAMES = "spark.sql.ansi.doubleQuotedIdentifiers"
"""The setting by which SQL has names in double quotes."""
OPERATORS: dict[str, Literal["=", "<", "<=", ">", ">="]] = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
"""By the names of Spark's classes of filters, what they compare by."""
CONF = {
    # The default is a form of twelve bytes that other readers take for nanoseconds, which the year 1 does not fit.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Dates before 1900 as they are, not as an older calendar had them.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.session.timeZone": "UTC",
    # A value that does not fit is an error, not a null.
    "spark.sql.ansi.enabled": "true",
    # `a` and `A` are two columns in every file format.
    "spark.sql.caseSensitive": "true",
}


def reached(step: str) -> None:
    """Say which step of a load is done."""
    _steps.debug(step)


def java_class(spark: Any, name: str) -> Any:
    """A class of the JVM. By its whole name at once: each dot of `spark._jvm.a.b.C` is a question to the JVM, which
    looks for such a class in every jar."""
    from py4j.java_gateway import JavaClass

    return JavaClass(name, spark._jvm._gateway_client)


def own_session(spark: Any) -> Any:
    """Return a copy of a session with settings of its own, so that two loads at once do not read each other's."""
    from pyspark.sql import SparkSession

    own = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    for name, value in CONF.items():
        own.conf.set(name, value)
    return own


@contextmanager
def quoted_names(spark: Any) -> Iterator[None]:
    """Read "…" in SQL as a name, as the databases do, while the block runs. To Spark alone it is a text, so that each
    row would have the name of a column in place of its value."""
    before = spark.conf.get(QUOTED_NAMES)
    if before == "true":
        yield
        return
    spark.conf.set(QUOTED_NAMES, "true")
    try:
        yield
    finally:
        spark.conf.set(QUOTED_NAMES, before)


@contextmanager
def active(spark: Any) -> Iterator[None]:
    """Let Spark take this session for the current one: Delta asks for it in places where none is handed over. The one
    before is the current one again at the end, also after `createDataFrame`, which makes its session current."""
    from pyspark.sql import SparkSession

    sessions = java_class(spark, "org.apache.spark.sql.SparkSession")
    before, held = sessions.getActiveSession(), SparkSession._activeSession
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        SparkSession._activeSession = held
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def moved_to(frame: Any, spark: Any) -> Any:
    """Return a DataFrame as one of another session, whose settings then count for it."""
    return of_plan(spark, frame._jdf.queryExecution().analyzed())


def union_of(frames: Sequence[Any]) -> Any:
    """Return one DataFrame of several, with the columns of all. `Id` and `id` of two of them are one column, as in most
    databases, also in a session in which they are two."""
    names: dict[str, str] = {}
    alike = []
    for frame in frames:
        spelled = {name: names.setdefault(name.lower(), name) for name in frame.columns}
        changed = {name: other for name, other in spelled.items() if other not in (name, *frame.columns)}
        alike.append(frame.withColumnsRenamed(changed) if changed else frame)
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), alike)


def of_plan(spark: Any, plan: Any) -> Any:
    """Return the DataFrame of a logical plan."""
    from pyspark.sql import DataFrame

    dataset = java_class(spark, "org.apache.spark.sql.classic.Dataset")
    return DataFrame(dataset.ofRows(spark._jsparkSession, plan), spark)


def read_source(spark: Any, name: str, schema: Any, reader: Callable[[], Any], *, follow: bool = False) -> Any:
    """Return the DataFrame of a data source in Python, whose partitions a `DataSourceReader` reads; to `follow` it, a
    `SimpleDataSourceStreamReader`."""
    from pyspark.sql.datasource import DataSource

    class Source(DataSource):
        """Defined here, so that it travels by value, the reader inside: as an option, a plan would show its secrets."""

        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            return schema

        def reader(self, schema: Any) -> Any:
            return reader()

        def simpleStreamReader(self, schema: Any) -> Any:
            return reader()

    spark.dataSource.register(Source)
    return (spark.readStream if follow else spark.read).format(name).load()


def references(frame: Any, name: str) -> bool:
    """Whether a query needs columns with this in their names, once Spark has left out columns that are not used."""
    nodes = [frame._jdf.queryExecution().optimizedPlan()]
    while nodes:
        node = nodes.pop()
        if name in node.references().toString():
            return True
        for others in (node.children(), node.subqueries()):
            nodes += [others.apply(number) for number in range(others.size())]
    return False


def quoted(name: str) -> str:
    """Return a column's name in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def numbered(frame: Any) -> Any:
    """Return the rows with numbers as names of columns: `mapInArrow` reads `a.b` as the field `b` of a column `a`."""
    return frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))
