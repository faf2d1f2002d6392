"""Dead letters in files of JSON lines in a folder of this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from weft.errors import StorageError, WeftError
from weft.spark_support.folder import LocalFolder
from weft.systems.base import Connection
from weft.systems.dead_letter_store import StoredLetter, as_json, decoded, digest


class LetterFiles:
    """The dead letters in one folder. Pipelines add files; to remove letters is to write the others again."""

    def __init__(self, path: str, connection: Connection | None = None) -> None:
        self.path, self._connection = path, connection
        self._ids: dict[str, set[str]] = {}
        """By file, the letters that were in it when it was last read: other processes only remove some."""
        self.name = f"path {path}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        # Named by its contents: the same letters again are the same file.
        name = f"letters-{digest(' '.join(each.letter_id for each in letters))}.json"
        with self._explained():
            self._create(name, b"".join(as_json(each.record()).encode() + b"\n" for each in letters))

    def records(self) -> Iterator[Mapping[str, Any]]:
        with self._explained():
            for name in self._names():
                yield from (record for _, record in self._lines(name))

    def remove(self, ids: Collection[str]) -> None:
        """Write the files of letters again without them."""
        wanted = set(ids)
        with self._explained():
            for name in self._names():
                if name in self._ids and wanted.isdisjoint(self._ids[name]):
                    continue
                lines = self._lines(name)
                kept = [line for line, record in lines if record.get("letter_id") not in wanted]
                if len(kept) < len(lines):
                    self._replace(name, b"".join(kept))

    def _lines(self, name: str) -> list[tuple[bytes, dict[str, Any]]]:
        """Return the lines of a file with the record of each."""
        lines = [(line, decoded(line)) for line in (self._read(name) or b"").splitlines(keepends=True)]
        self._ids[name] = {str(record.get("letter_id")) for _, record in lines}
        return lines

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except WeftError:
            raise
        except OSError as error:
            if self._connection is not None:
                raise self._connection.failed(error) from None
            raise StorageError(f"The dead letters in {self.path} cannot be read or written: {error}.") from None

    def _names(self) -> list[str]:
        return sorted(name for name in LocalFolder().files_in(self.path) if name.endswith(".json") and name[0] != ".")

    def _read(self, name: str) -> bytes | None:
        return LocalFolder().read(f"{self.path}/{name}")

    def _create(self, name: str, data: bytes) -> None:
        """Make a file, unless it is there."""
        LocalFolder().create(f"{self.path}/{name}", data)

    def _replace(self, name: str, data: bytes) -> None:
        """Replace the contents of a file, or remove it where there are none. A move waits for the disk, so that a power
        cut does not bring the old contents back."""
        folder, path, hidden = LocalFolder(), f"{self.path}/{name}", f"{self.path}/.{uuid4().hex}.tmp"
        if data:
            folder.create(hidden, data)
            folder.move({hidden: path})
        else:
            folder.move({path: hidden})
            folder.remove([hidden])
