"""Files of a folder or bucket as Arrow's own client lists them: nobody should wait for Spark to count files."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def client(connection: Any) -> Any:
    """Return Arrow's client of a folder or bucket."""
    from pyarrow import fs

    return connection.filesystem() if hasattr(connection, "filesystem") else fs.LocalFileSystem()


def list_files(connection: Any, folder: str, *, recursive: bool = False) -> list[str]:
    """Return the paths of the files in a folder; none where it is not there."""
    from pyarrow import fs

    selector = fs.FileSelector(folder.rstrip("/") or "/", recursive=recursive, allow_not_found=True)
    try:
        return [each.path for each in client(connection).get_file_info(selector) if each.is_file]
    except OSError as error:
        raise connection.failed(error) from None


def path_of(url: str) -> str:
    """Return a path as Arrow has it, of the URL or path that Spark has."""
    scheme, separator, rest = url.partition("://")
    return unquote(rest) if separator else scheme
