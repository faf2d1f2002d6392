"""Files that are read by their path alone, without a connection: on this machine, or in a bucket."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError
from weft.spark_support.folder import GLOB
from weft.spark_support.sessions import own_session
from weft.systems.base import Connection, system_for

if TYPE_CHECKING:
    from weft.systems.target import Documents

_BUCKET = re.compile(r"s3[an]?://")


def spark_path(path: str) -> str:
    """Return a path as Spark names it."""
    if _BUCKET.match(path):
        return _BUCKET.sub("s3a://", path)
    if "://" in path:
        raise DeclarationError(
            f"Files cannot be read from {path.partition('://')[0]}://.", hint="A path of this machine, or s3://bucket/…"
        )
    # The JVM keeps the folder that it was started in.
    return os.path.abspath(os.path.expanduser(path))


def connection_for(path: str) -> tuple[Connection, str] | None:
    """Return a connection to the folder of a path of this machine, and the path in it; `None` where a name is none."""
    from weft.systems.objects.formats import format_from_path

    if "://" in path or not ("/" in path or format_from_path(path)):
        return None
    parts = spark_path(path).split("/")
    # Up to the folder of the file, or to what a glob stands for.
    first = next((number for number, part in enumerate(parts) if GLOB.search(part)), len(parts) - 1)
    root = "/".join(parts[:first]) or "/"
    kind = "delta_local" if _is_delta(spark_path(path)) else "object_store_local"
    return system_for(kind).load_connection().from_fields({"path": root}, name=None), "/".join(parts[first:])


def jars_for(path: str) -> tuple[str, ...]:
    """Return the jars that Spark needs to read a path."""
    if path.startswith("s3a://"):
        return ("s3",)  # with the keys of the environment: a path has none
    return ("delta",) if _is_delta(path) else ()


def read(spark: Any, path: str, documents: Documents | None = None) -> Any:
    """Return the rows of a table or of files. The session has the jars. `documents`: see
    `SparkTarget.read_documents`."""
    from weft.systems.objects import source

    if _is_delta(path):
        return spark.read.format("delta").load(path)
    own = own_session(spark)
    table = source.read_table(own, path)
    return source.read_path(own, path, documents=documents) if table is None else table


def _is_delta(path: str) -> bool:
    return "://" not in path and os.path.isdir(os.path.join(path, "_delta_log"))
