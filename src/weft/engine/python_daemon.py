"""What Spark starts in local mode to fork its Python workers: PySpark's own, with what a load needs imported before.

Spark ends workers that were idle for a minute, which no setting changes. The next one would import all of it again,
which takes as long as a small load. Several workers at once would each import it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module

VARIABLE = "WEFT_ENGINE_IMPORTS"
"""Set for the workers of an engine, which import more, because it lasts."""
_TASKS = ("weft.engine.tasks", "pandas")  # which Arrow imports, where it is installed, when it makes an array
_SYSTEMS = (
    "weft.systems.duckdb.tables",
    "weft.systems.mysql.tables",
    "weft.systems.postgres.tables",
    "weft.systems.sqlite.tables",
)


def import_all(names: Iterable[str]) -> None:
    """Import the modules that can be: one may not be installed, and Spark has another Python for some workers."""
    for name in names:
        with suppress(Exception):
            import_module(name)


def is_jar_of_spark(path: str) -> bool:
    """Return whether a path is the jar that Spark adds to the paths of its Python processes; no module is in it. A
    worker forgets what it knows of paths before each task, and would read the names of all classes again, which takes
    longer than a small task."""
    return os.path.basename(path).startswith("spark-core_") and path.endswith(".jar")


def forget_jar_of_spark() -> None:
    """Look for no module in that jar any more."""
    for path in filter(is_jar_of_spark, list(sys.path)):
        sys.path.remove(path)
        sys.path_importer_cache.pop(path, None)


def draw_other_numbers() -> None:
    """In a fork: have numpy draw other random numbers than the other forks, as Python's own module does."""
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()


def main() -> None:
    worker = sys.argv[1]
    import_all([worker])
    if worker != "pyspark.sql.worker.lookup_data_sources":  # it looks for packages, and has nothing to do with loads
        import_all(_TASKS)
        if os.environ.get(VARIABLE):
            import_all(_SYSTEMS)
    forget_jar_of_spark()
    os.register_at_fork(after_in_child=draw_other_numbers)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy all that is imported
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
