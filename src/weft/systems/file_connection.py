"""How to reach a database that is one file."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from weft.errors import ConnectionFailedError, DeclarationError, nearest
from weft.systems.base import Connection

MEMORY = ":memory:"
_UNKNOWN = (-1, -1)


def file_number(path: str) -> tuple[int, int] | None:
    """Return what identifies a file as long as somebody has it open; `None` where there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN
    return status.st_dev, status.st_ino


def is_file(path: str, number: tuple[int, int] | None) -> bool:
    """Whether the file at a path is the one with a number. One that cannot be looked at now has not become another."""
    return file_number(path) in (number, _UNKNOWN)


@dataclass(frozen=True)
class FileConnection(Connection):
    """A database in a file. A relative path is relative to the working directory at use."""

    one_host: ClassVar[bool] = True
    product: ClassVar[str]
    example: ClassVar[str]

    path: str | None = None
    url: str | None = field(default=None, kw_only=True, metadata={"url": True})

    def validate(self) -> None:
        """Exactly one of path and url, and a URL that names a file."""
        if (not self.path) == (not self.url):
            raise DeclarationError(
                f"Either path or url is needed for {self.label}.",
                hint=f'For example {type(self).__name__}("{self.example}").',
            )
        super().validate()

    @property
    def target(self) -> str:
        """The path or URL as it was written."""
        return self.path or super().target

    def resolved(self) -> Self:
        """A copy with the path made absolute and no URL, its `${VAR}` references substituted."""
        resolved = super().resolved()
        path = resolved.path or self._path_in(resolved.url or "")
        if path != MEMORY:
            path = os.path.abspath(os.path.expanduser(path))
        object.__setattr__(resolved, "path", path)
        object.__setattr__(resolved, "url", None)
        return resolved

    def _path_in(self, url: str) -> str:
        rest = url.partition("://")[2]
        if rest == "/":
            # Most often a variable that is not set: what is written to memory would be gone with the process.
            raise DeclarationError(
                f"The URL of {self.label} names no file.",
                hint=f"Write {self.kind}:///{self.example}, or {self.kind}:// for a database in memory.",
            )
        if rest in ("", "/" + MEMORY):
            return MEMORY
        if not rest.startswith("/"):
            raise DeclarationError(
                f"The URL of {self.label} needs three slashes before a relative path, four before an absolute one.",
                hint=f"Write {self.kind}:///{rest}.",
            )
        path, question, _ = rest[1:].partition("?")
        if question:
            raise DeclarationError(
                f"The URL of {self.label} has parameters, and {self.product} takes none.",
                hint="A ? in a file's name is %3F.",
            )
        return unquote(path)

    def make_folder(self) -> None:
        """Make the folder of the file, for the first process that writes it."""
        path = self.resolved().path or ""
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise ConnectionFailedError(
                f"The folder of the {self.product} database {path} cannot be made: {error.strerror}.",
                is_transient=False,
            ) from None

    def not_there_yet(self, report: dict[str, Any]) -> dict[str, Any] | None:
        """Return the report of a check for a file yet to be created; `None` if it exists. Raise if it cannot be."""
        path = self.resolved().path or ""
        if path == MEMORY or os.path.exists(path):
            return None
        folder = next(each for each in Path(path).parents if each.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise self.failed(OSError(f"the file cannot be created in {folder}"), hint="Choose another path.")
        return report | {"latency_ms": None, "note": "the file is created at first use"}

    def missing(self) -> ConnectionFailedError:
        """Return the error to raise where a file is to be read that is not there."""
        folder, name = os.path.split(self.resolved().path or "")
        hint = f"The folder {folder} is not there either."
        with suppress(OSError):
            close = nearest(name, (each.name for each in os.scandir(folder) if each.is_file()))
            hint = f"Did you mean {close!r}, which is in the same folder?" if close else "Check the path."
        return ConnectionFailedError(
            f"Cannot read {self.label}: there is no file {os.path.join(folder, name)}.",
            hint=f"{hint} The first load into it would make it.",
        )

    def replaced(self) -> ConnectionFailedError:
        """Return the error to raise where the file was another one after a commit than before it."""
        return ConnectionFailedError(
            f"The {self.product} database {self.resolved().path} was removed or replaced while it was written, and "
            "what was written is not in the file that is there now.",
            hint="Do it again. Stop what uses a database before you restore or move it.",
        )

    def is_missing(self) -> bool:
        path = self.resolved().path or ""
        return path != MEMORY and not os.path.exists(path)

    def refuse_missing(self) -> None:
        if self.is_missing():
            raise self.missing()
