"""Files of this machine and of buckets: what loads and checkpoints do with them besides reading and writing rows."""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from weft.errors import ConnectionFailedError
from weft.spark_support import outcome

_COPIES_AT_ONCE = 8
_HEAD = 64 * 1024
GLOB = re.compile(r"[*?\[{]")
"""What makes a path one that stands for several."""
COMPRESSED = (".gz", ".bz2", ".zst")
"""How the names of files end whose contents are compressed."""


class Folder(ABC):
    """A folder of files with absolute paths. What is said to be atomic is seen by others whole or not at all."""

    @abstractmethod
    def files_in(self, path: str) -> dict[str, int]:
        """Return the names and sizes of the files directly in a folder; nothing where it is not there."""

    @abstractmethod
    def folders_in(self, path: str) -> list[str]:
        """Return the names of the folders directly in a folder."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return a file's contents, or `None` where there is none."""

    @abstractmethod
    def _start(self, path: str, size: int) -> bytes:
        """Return the first bytes of a file."""

    def head(self, path: str, size: int = _HEAD) -> bytes:
        """What a file begins with, uncompressed: enough for a line. Of a compressed one it may be less than `size`."""
        codec = pa.Codec.detect(path).name if path.endswith(COMPRESSED) else None
        if codec is None:
            return self._start(path, size)
        # Of bzip2 nothing can be read but whole blocks, of up to 900 kB.
        with pa.input_stream(pa.py_buffer(self._start(path, 16 * _HEAD)), compression=codec) as stream:
            return bytes(stream.read(_HEAD))

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Make a file, atomically, unless it is there: whether it was made."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Make a file, or give one other contents, so that after a power cut it has the old ones or these."""

    @abstractmethod
    def move(self, moves: Mapping[str, str]) -> None:
        """Give files other names, each atomically. Those that another process moved already are skipped."""

    @abstractmethod
    def move_tree(self, source: str, target: str) -> None:
        """Give a folder another name, where it is there. In a bucket each of its files is moved atomically: what a
        crash cut off is finished when it is called again."""

    @abstractmethod
    def remove(self, paths: Iterable[str]) -> None:
        """Remove files where they are there."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Remove a file, or a folder and all in it, where it is there."""

    def flush(self, paths: Iterable[str]) -> None:  # noqa: B027 - optional, not forgotten
        """Wait until files are on the disk."""


class LocalFolder(Folder):
    """Files of this machine."""

    def files_in(self, path: str) -> dict[str, int]:
        sizes = {}
        try:
            with os.scandir(path) as entries:
                for each in entries:
                    with suppress(FileNotFoundError):  # one that goes meanwhile: the others are there
                        if each.is_file():
                            sizes[each.name] = each.stat().st_size
        except FileNotFoundError:
            return {}
        return sizes

    def folders_in(self, path: str) -> list[str]:
        try:
            with os.scandir(path) as entries:
                return [each.name for each in entries if each.is_dir()]
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None

    def _start(self, path: str, size: int) -> bytes:
        with open(path, "rb") as file:
            return file.read(size)

    def create(self, path: str, data: bytes) -> bool:
        with _drafted(path, data) as draft:
            try:
                # A second name for the whole file: fails where the name is taken, which a rename does not.
                os.link(draft, path)
            except FileExistsError:
                return False
        _flush_folder(os.path.dirname(path))
        return True

    def write(self, path: str, data: bytes) -> None:
        with _drafted(path, data) as draft:
            os.replace(draft, path)
        _flush_folder(os.path.dirname(path))

    def move(self, moves: Mapping[str, str]) -> None:
        for source, target in moves.items():
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                os.rename(source, target)
            except FileNotFoundError:
                if not os.path.exists(target):
                    raise
        for folder in {os.path.dirname(target) for target in moves.values()}:
            _flush_folder(folder)

    def move_tree(self, source: str, target: str) -> None:
        if os.path.exists(source):
            os.rename(source, target)
            _flush_folder(os.path.dirname(target))

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def remove_tree(self, path: str) -> None:
        if os.path.isfile(path):
            self.remove([path])
        else:
            shutil.rmtree(path, ignore_errors=True)

    def flush(self, paths: Iterable[str]) -> None:
        for path in paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _drafted(path: str, data: bytes) -> Iterator[str]:
    """Yield a file in the same folder with these contents, on the disk. Unless it was renamed, it is removed after."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f".{uuid4().hex}.tmp")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)


def _flush_folder(path: str) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class BucketFolder(Folder):
    """Files of a bucket, by the client that Spark's tasks use too: one set of keys, and those of a machine's role."""

    def __init__(self, spark: Any, root: str) -> None:
        self.jvm = spark._jvm
        self.files = self._path(root).getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())

    def _path(self, path: str) -> Any:
        return self.jvm.org.apache.hadoop.fs.Path(path)

    def _statuses(self, path: str) -> list[Any]:
        try:
            return list(self.files.listStatus(self._path(path)))
        except Exception as error:
            if _is(error, "FileNotFoundException"):
                return []
            raise

    def files_in(self, path: str) -> dict[str, int]:
        return {each.getPath().getName(): each.getLen() for each in self._statuses(path) if each.isFile()}

    def folders_in(self, path: str) -> list[str]:
        return [each.getPath().getName() for each in self._statuses(path) if each.isDirectory()]

    def read(self, path: str) -> bytes | None:
        try:
            stream = self.files.open(self._path(path))
            try:
                return bytes(self.jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()
        except Exception as error:
            # It may also go between the two.
            if _is(error, "FileNotFoundException"):
                return None
            raise

    def _start(self, path: str, size: int) -> bytes:
        stream = self.files.open(self._path(path))
        try:
            return bytes(stream.readNBytes(size))
        finally:
            stream.close()

    def create(self, path: str, data: bytes) -> bool:
        builder = self.files.createFile(self._path(path)).recursive()
        if path.startswith("s3a:"):
            # S3 refuses the object if there is one of that name (If-None-Match), so that of two at once one wins.
            builder.overwrite(True).must("fs.option.create.conditional.overwrite", True)
        else:
            builder.overwrite(False)
        try:
            stream = builder.build()
            stream.write(data)
            stream.close()
        except Exception as error:
            if _is(error, "RemoteFileChangedException") or _is(error, "FileAlreadyExistsException"):
                return False
            raise
        return True

    def write(self, path: str, data: bytes) -> None:
        stream = self.files.create(self._path(path), True)
        stream.write(data)
        stream.close()

    def move(self, moves: Mapping[str, str]) -> None:
        def one(pair: tuple[str, str]) -> None:
            source, target = map(self._path, pair)
            if self.files.exists(target):
                self.files.delete(source, False)
                return
            try:
                done = self.files.rename(source, target)
            except Exception:
                # The copy appears whole: where it is there, another process finished what this load began.
                if self.files.exists(target):
                    return
                raise
            if not done and not self.files.exists(target):
                raise FileNotFoundError(f"{pair[0]} is not there, nor is {pair[1]}")

        with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
            list(pool.map(one, moves.items()))

    def move_tree(self, source: str, target: str) -> None:
        moves = {f"{source}/{each}": f"{target}/{each}" for each in self._below(source)}
        for folder in {path.rpartition("/")[0] for path in moves.values()}:
            self.files.mkdirs(self._path(folder))
        self.move(moves)
        self.remove_tree(source)

    def _below(self, path: str) -> list[str]:
        """Return the files in a folder and in those in it, each as its path from there."""
        inner = (f"{folder}/{each}" for folder in self.folders_in(path) for each in self._below(f"{path}/{folder}"))
        return [*self.files_in(path), *inner]

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.files.delete(self._path(path), False)

    def remove_tree(self, path: str) -> None:
        self.files.delete(self._path(path), True)


def _is(error: BaseException, name: str) -> bool:
    """Return whether an error of the JVM, or one that caused it, is of this class."""
    cause = getattr(error, "java_exception", None)
    while cause is not None:
        if str(cause.getClass().getName()).endswith(name):
            return True
        cause = cause.getCause()
    return False


def folder_for(spark: Any, path: str) -> Folder:
    return BucketFolder(spark, path) if "://" in path else LocalFolder()


def place_of(spark: Any, location: str) -> tuple[Folder, str]:
    """Return the folder class for a path or a URL, and the path in its form."""
    path = location.rstrip("/")
    if path.startswith("file:"):
        path = "/" + path.removeprefix("file:").lstrip("/")
    return folder_for(spark, path), path


@dataclass(frozen=True)
class Location:
    """A file of a checkpoint, or a folder of them: of this machine, or at a URL, by the clients that Spark has."""

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
        contents = self.read_bytes()
        return None if contents is None else contents.decode()

    def read_bytes(self) -> bytes | None:
        """Return the contents of this file, or `None` where there is none."""
        with self._asked("read"):
            return self.folder.read(self.path)

    def write_bytes(self, contents: bytes) -> None:
        """Give this file other contents, so that after a power cut it has the old ones or these."""
        with self._asked("write"):
            self.folder.write(self.path, contents)

    def create(self, text: str) -> bool:
        """Make this file, atomically, unless it is there; return whether it was made."""
        with self._asked("write"):
            return self.folder.create(self.path, text.encode())

    def write(self, text: str) -> None:
        """Give this file a text, so that after a power cut it has the old one or this."""
        self.write_bytes(text.encode())

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
