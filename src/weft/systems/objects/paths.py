"""Where a table of a folder or bucket is, and its files as Arrow's own client lists them: nobody should wait for Spark
to count files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import unquote

from msgspec import MsgspecError

from weft.errors import DeclarationError, WeftError

T = TypeVar("T")
R = TypeVar("R")

_MOST_SCHEMAS = 100
"""In how many folders tables are looked for."""
# What Hadoop's paths and the globs of Spark's readers take for something else, and what is hidden from readers.
_UNSAFE = re.compile(r"[^\w .@+=,~()'-]")


def table_path(root: str, schema: str | None, table: str) -> str:
    """Return the folder of a table. A slash in a name makes folders; characters that paths cannot have become %XX."""
    parts = [part for name in (schema, table) if name for part in name.split("/") if part]
    if not parts:
        raise DeclarationError("A table needs a name.")
    return "/".join([root.rstrip("/"), *(_safe(part) for part in parts)])


def _safe(part: str) -> str:
    if part in (".", ".."):
        raise DeclarationError(f"{part!r} cannot be part of a table's name.", hint="A table is inside its connection.")
    encoded = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), part)
    # Names that begin so are hidden: readers pass them by. Blanks at an end get lost on the way.
    if encoded[0] in "_. ":
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    if encoded[-1] in " .":
        encoded = f"{encoded[:-1]}%{ord(encoded[-1]):02X}"
    return encoded


def client(connection: Any) -> Any:
    """Return Arrow's client of a folder or bucket."""
    from pyarrow import fs

    return connection.filesystem() if hasattr(connection, "filesystem") else fs.LocalFileSystem()


def list_files(connection: Any, folder: str, *, recursive: bool = False, store: Any = None) -> list[str]:
    """Return the paths of the files in a folder; none where it is not there. `store`: a client that is open."""
    from pyarrow import fs

    selector = fs.FileSelector(folder.rstrip("/") or "/", recursive=recursive, allow_not_found=True)
    try:
        return [each.path for each in (store or client(connection)).get_file_info(selector) if each.is_file]
    except OSError as error:
        raise connection.failed(error) from None


@dataclass(frozen=True)
class LogFiles:
    """Files that are read and removed without Spark: the log of a table, and all that it names."""

    connection: Any

    @cached_property
    def _store(self) -> Any:
        return client(self.connection)

    def files_in(self, path: str) -> dict[str, int]:
        """Return the names of the files directly in a folder."""
        paths = list_files(self.connection, path_of(path), store=self._store)
        return {each.rpartition("/")[2]: 0 for each in paths}

    def read(self, path: str) -> bytes | None:
        """Return a file's contents, or `None` where there is none."""
        try:
            with self._store.open_input_file(path_of(path)) as file:
                return bytes(file.readall())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.connection.failed(error) from None

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, one after the other, where they are there."""
        for path in paths:
            try:
                self._store.delete_file(path_of(path))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self.connection.failed(error) from None

    def remove_folder(self, path: str, *, recursive: bool = True) -> None:
        """Remove the files in a folder, the oldest of a log first, then the folder; without `recursive` what is in
        folders inside it stays, and so does it."""
        inside = list_files(self.connection, path_of(path), recursive=recursive, store=self._store)
        self.remove(sorted(inside))
        if recursive or not folders_in(self.connection, path):
            try:
                self._store.delete_dir(path_of(path))
            except FileNotFoundError:  # a bucket has no empty folders
                return
            except OSError as error:
                raise self.connection.failed(error) from None


def understood(file: str, data: T | None, parse: Callable[[T], R]) -> R:
    """Return what a file of a table's log says; raise where it is missing, or was cut off or changed."""
    try:
        if data is not None:
            return parse(data)
        why = "it is missing"
    # No JSON or Parquet (ValueError, of Arrow also OSError), a codec that Arrow lacks (NotImplementedError), a state
    # with values of other types (MsgspecError); JSON without a key (KeyError), with null for a number (TypeError), or
    # with a list for an object (TypeError, AttributeError).
    except (ValueError, OSError, NotImplementedError, MsgspecError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
    raise WeftError(
        f"The log of a table is damaged: {file} cannot be read ({why}).",
        hint="Bring the file back from a copy, or move the table away and load it again.",
    )


def folders_in(connection: Any, folder: str) -> list[str]:
    """Return the names of the folders in a folder, but for hidden ones."""
    from pyarrow import fs

    selector = fs.FileSelector(path_of(folder), allow_not_found=True)
    try:
        entries = client(connection).get_file_info(selector)
    except OSError as error:
        raise connection.failed(error) from None
    names = (each.base_name for each in entries if each.type == fs.FileType.Directory)
    return sorted(each for each in names if each[0] != ".")


def find_tables(connection: Any, tables_in: Callable[[str], list[str]]) -> list[tuple[str | None, str]]:
    """Return schema and name of the tables of a connection: those that `tables_in` finds in its folder, and in the
    folders of that."""
    root = connection.root
    schemas = [each for each in folders_in(connection, root)[:_MOST_SCHEMAS] if each[0] != "_"]
    tables: list[tuple[str | None, str]] = [(None, unquote(each)) for each in tables_in(root)]
    tables += [(unquote(schema), unquote(each)) for schema in schemas for each in tables_in(f"{root}/{schema}")]
    return tables


def path_of(url: str) -> str:
    """Return a path as Arrow has it, of the URL or path that Spark has."""
    scheme, separator, rest = url.partition("://")
    return unquote(rest) if separator else scheme
