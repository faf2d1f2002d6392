"""Where files are: a folder or a bucket, and how the files in it are written and read."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from weft.errors import DeclarationError
from weft.options import errors_at
from weft.systems.base import Connection, Settings
from weft.systems.endpoint import Endpoint
from weft.systems.objects.formats import format_from_path
from weft.systems.objects.local import FolderConnection
from weft.systems.objects.options import FileOptions, FormatFields, format_of_option
from weft.systems.objects.s3 import S3Connection


@dataclass(frozen=True, kw_only=True)
class FileFields(FormatFields, Connection):
    """The format of the files of a connection, and the options of that format."""

    def __post_init__(self) -> None:
        for name in ("csv_read_options", "json_read_options"):
            value = getattr(self, name)
            if isinstance(value, dict):
                # A copy that can be hashed: the caller may change the original later.
                object.__setattr__(self, name, Settings(value))
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        with errors_at(type(self).__name__):
            _ = self.options

    @property
    def options(self) -> FileOptions:
        """How files are written and read here."""
        return FileOptions.declare(**{each.name: getattr(self, each.name) for each in fields(FileOptions)})

    def has_path(self, name: str, path: str) -> bool:
        return f"{path}/".startswith(f"{self.root}/{name.strip('/')}/")  # type: ignore[attr-defined]

    def format_of(self, path: str) -> str:
        """Return the format of a file here: the one that is declared, else the one of its name."""
        return self.format or format_from_path(path) or FileOptions.format


@dataclass(frozen=True)
class ObjectStoreLocalConnection(FileFields, FolderConnection):
    """Files in a folder: `ObjectStoreLocalConnection("/data/lake", format="parquet")`.

    A table is the folder of its name in `path`, under `prefix` where there is one.
    """

    kind: ClassVar[str] = "object_store_local"

    prefix: str = field(default="", kw_only=True)

    @property
    def root(self) -> str:
        """The folder that tables are in."""
        prefix = self.resolved().prefix.strip("/")
        return f"{super().root}/{prefix}" if prefix else super().root


@dataclass(frozen=True)
class ObjectStoreS3Connection(FileFields, S3Connection):
    """Files in a bucket: `ObjectStoreS3Connection("my-lake", region="eu-west-1", format="parquet")`.

    A table is what begins with its name in the bucket, under `prefix` where there is one. `endpoint` names a server
    other than Amazon's.
    """

    kind: ClassVar[str] = "object_store_s3"


FilesConnection = ObjectStoreLocalConnection | ObjectStoreS3Connection


_HINTS = typing.get_type_hints(FileFields)


class FileEndpoint(Endpoint):
    """The files under a prefix of a folder or bucket. They are read from the first on."""

    is_source = True
    limit = "max_files"
    start_forms: ClassVar = {"earliest": "a start"}
    places = ("prefix",)
    dead_letters = ("path",)
    options: ClassVar = {each.name: _HINTS[each.name] for each in fields(FileOptions)}
    holds = "files"

    def parse_start(self, start: str, connection: Connection, query: str) -> str:
        """Return `earliest`: files have no offsets."""
        if start == "latest":
            raise DeclarationError("files are read from the first on: leave start='latest' out.")
        if start != "earliest":
            raise DeclarationError(f"start={start!r} is an offset, and {connection.kind} has none.")
        return start

    def check_options(self, connection: Connection, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options as `FileOptions` has them."""
        super().check_options(connection, options)
        checked = merged_options(connection, options)
        return Settings({name: getattr(checked, name) for name in options})

    def with_options(self, connection: Connection, options: Mapping[str, Any]) -> Connection:
        return replace(connection, **vars(merged_options(connection, options)))

    def why_no_columns(self, connection: Any) -> str | None:
        """Return the reason for Parquet."""
        return "files of parquet have types of their own" if connection.format == "parquet" else None

    def nested_option(self, name: str, value: Any, connection: Connection | None, options: Mapping[str, Any]) -> Any:
        """Return the option of one format if the files are of that format; `None` if they are of another, which is not
        an error."""
        format = format_of_option(name)
        checked = FileOptions.declare(format, **{name: value})
        own = connection.format or FileOptions.format if isinstance(connection, FileFields) else format
        return getattr(checked, name) if (options.get("format") or own) == format else None


def merged_options(connection: Connection, options: Mapping[str, Any]) -> FileOptions:
    """Return how files of a connection are written and read where a source or target says more of it."""
    own = {each.name: getattr(connection, each.name) for each in fields(FileOptions)}
    if options.get("format") not in (None, own["format"] or FileOptions.format):
        own = {}  # An option of one format means nothing to another.
    return FileOptions.declare(**{**own, **options})
