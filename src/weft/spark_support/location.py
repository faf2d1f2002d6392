"""The files of a checkpoint: in a folder of this machine, or at a URL, where Spark's own clients work with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.errors import ConnectionFailedError
from weft.spark_support import outcome
from weft.spark_support.folder import Folder, LocalFolder


@dataclass(frozen=True)
class Location:
    """A file, or a folder of files."""

    folder: Folder
    path: str

    def at(self, name: str) -> Location:
        """Return the file or folder of this name in this folder."""
        return Location(self.folder, f"{self.path}/{name}")

    def beside(self, mark: str) -> Location:
        """Return the file or folder next to this one whose name is this one's and a mark."""
        return Location(self.folder, f"{self.path}{mark}")

    def exists(self) -> bool:
        """Return whether there is a folder with something in it."""
        with self._asked("list"):
            return bool(self.folder.files_in(self.path) or self.folder.folders_in(self.path))

    def names(self) -> list[str]:
        """Return the names of the files in this folder."""
        with self._asked("list"):
            return list(self.folder.files_in(self.path))

    def read(self) -> str | None:
        """Return the text of this file, or `None` where there is none."""
        with self._asked("read"):
            contents = self.folder.read(self.path)
        return None if contents is None else contents.decode()

    def write(self, text: str) -> None:
        """Give this file a text, so that after a power cut it has the old one or this."""
        with self._asked("write"):
            self.folder.write(self.path, text.encode())

    def move(self, target: Location) -> None:
        """Give this folder another name; one that a crash cut off is finished when it is called again."""
        with self._asked("move"):
            self.folder.move_tree(self.path, target.path)

    def remove(self) -> None:
        """Remove this file or folder, where it is there."""
        with self._asked("remove"):
            self.folder.remove_tree(self.path)

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        if isinstance(self.folder, LocalFolder):
            yield
            return
        try:
            with outcome.explained(f"{what} {self.path}"):
                yield
        except ConnectionError:
            raise ConnectionFailedError(f"Cannot {what} {self.path}: Spark's JVM ended.") from None
