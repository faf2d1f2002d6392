"""Files under a prefix as a source of streaming pipelines. A position is a number of Spark's own log of the files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, NotFoundError, StorageError
from weft.spark_support import outcome
from weft.spark_support.folder import GLOB, Location
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.objects import file_stream
from weft.systems.objects.paths import client, list_files, path_of
from weft.systems.objects.reading import BAD
from weft.systems.stream_source import (
    MAX_FILES,
    OFFSET,
    FrameRows,
    Rewind,
    SourceSettings,
    StreamSource,
    UntypedRows,
    counted,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEME = re.compile(r"^\w+:/+")


class FileRows(UntypedRows):
    """The files of a micro-batch."""

    def __init__(self, source: FileSource, files: Collection[str], spark: SparkSession) -> None:
        super().__init__(source.name, files)
        self._connection, self._spark = source.connection, spark
        self._declared = tuple(source.settings.columns)

    def read(self, known: Mapping[str, DataType], *, widens: bool, again: bool = False) -> TypedFileRows | None:
        dated = self._read(known, widens=widens) if self.files else None
        if dated is None:
            return None
        return TypedFileRows(self.source, dated, with_files=lambda: self._with_offsets(known, widens))

    def _with_offsets(self, known: Mapping[str, DataType], widens: bool) -> DataFrame:
        """Return the rows with the file of each."""
        dated = self._read(known, with_offsets=True, widens=widens)
        assert dated is not None
        return dated(True)

    def split(self, known: Mapping[str, DataType], *, widens: bool, grows: bool) -> SplitFileRows | None:
        if not self.files:
            return None
        dated = self._read(known, with_offsets=True, bad_column=BAD, widens=widens, grows=grows)
        if dated is None:
            return None
        # Whether a row can be read depends on the columns that are asked for. Here it is all of them, once.
        rows = dated(True).persist()
        try:
            with outcome.explained(f"read the files of {self.source}"):
                selected = rows.where(f"{BAD} IS NOT NULL").selectExpr(f"{BAD}.error", f"binary({BAD}.payload)", OFFSET)
                columns = selected.toArrow().to_pydict().values()
        except BaseException:
            rows.unpersist()
            raise
        bad = tuple(
            DeadLetter("read", why, self.source, payload.decode(errors="backslashreplace"), file)
            for why, payload, file in zip(*columns, strict=True)
        )
        return SplitFileRows(self.source, rows.where(f"{BAD} IS NULL").drop(BAD), bad=bad, held=rows)

    def _read(self, known: Mapping[str, DataType], **more: Any) -> file_stream.Dated | None:
        more["declared"] = self._declared
        with outcome.explained(f"read the files of {self.source}"):
            return file_stream.read_files(self._spark, self._connection, self.source, self.files, known, **more)


@dataclass(frozen=True)
class TypedFileRows(FrameRows):
    """The rows of files; `data` makes the DataFrame with or without the time at which each file was changed."""

    with_files: Any = None
    """Reads the files again, with the name of each next to its rows."""
    # Spark's readers of texts write all that there is to know of a file next to each of its rows, a third of their
    # work, as soon as a query could ask for it.
    time_is_costly = True

    def frame(self, *, timed: bool = True) -> Any:
        return self.data(timed)

    def with_offsets(self) -> Any:
        """Return the rows with the file of each: the files are read again."""
        return self.with_files()


@dataclass(frozen=True)
class SplitFileRows(FrameRows):
    """The good rows of files that were read once and are held."""

    held: Any = None

    def frame(self, *, timed: bool = True) -> Any:
        return self.data.drop(OFFSET)

    def close(self) -> None:
        self.held.unpersist()


class FileSource(StreamSource):
    """Follows the files under a prefix of a folder or bucket."""

    unit = "files"

    def __init__(self, connection: Any, settings: SourceSettings) -> None:
        super().__init__(connection, settings)
        self.brings_keys = connection.format_of(self.name) == "json_lines"
        self._seen: set[str] = set()
        self._upto = -1
        self._digest: tuple[str, int, str] | None = None
        """The last files that were planned: their log, its number, and their digest."""

    @property
    def sends_json(self) -> bool:
        return self.connection.format_of(self.name) in ("json", "json_lines")

    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        self.connection.configure(spark)
        # Their contents are read by the batch, with the schema that they have then.
        reader = (
            spark.readStream.format("binaryFile")
            .schema("path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY")
            .option("recursiveFileLookup", True)
            .option("maxFilesPerTrigger", self.settings.max_files or MAX_FILES)
            # Else files that are a week older than the newest would be passed over without a word.
            .option("maxFileAge", "36500d")
            # A file that was renamed by now would stop the pipeline indefinitely.
            .option("ignoreMissingFiles", True)
        )
        try:
            return reader.load(self._root).select("path", "modificationTime")
        except Exception as error:
            if "PATH_NOT_FOUND" in str(error)[:200]:
                raise self._missing() from None
            raise

    def take(self, frame: DataFrame) -> FileRows:
        return FileRows(self, tuple(dict.fromkeys(path for path, _ in frame.collect())), frame.sparkSession)

    def validate(self) -> str:
        # One that a glob names may come later.
        if self.connection.one_host and not GLOB.search(self._root) and not os.path.exists(self._root):
            raise self._missing()
        return ""

    @property
    def _root(self) -> str:
        return f"{self.connection.root}/{self.name.strip('/')}"

    def _missing(self) -> NotFoundError:
        return NotFoundError(
            f"There is nothing at {self._root}.",
            hint="Make the folder or put the first file there, or correct the source's query.",
        )

    def why_not_replayed(self, offset: str | None) -> str | None:
        """Return the reason for lines below a header: it names their columns, and it is in the file."""
        kind = self.connection.format_of(offset or "")
        if kind == "json_lines":
            return None
        return f"it is a line of {kind}: put it, mended, into a new file of {self.name}"

    def removed(
        self, read: Collection[str], source_log: Location, before: Any | None, position: Any | None
    ) -> Iterable[str]:
        """Return the files of Spark's log that are gone; not those that were read. Spark reads no empty ones."""
        after, upto = (-1 if each is None else each["logOffset"] for each in (before, position))
        known = {_SCHEME.sub("/", path) for path in read}
        paths = sorted({path_of(each["path"]) for each in entries(source_log, upto, after)})
        missing = [path for path in paths if f"/{path.lstrip('/')}" not in known]
        if not missing:
            return []
        return [each.path for each in client(self.connection).get_file_info(missing) if not each.is_file]

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        # One of a plan has a digest of its files, too.
        if not isinstance(position, Mapping) or set(position) - {"files"} != {"logOffset"}:
            return None
        if source_log is None:
            return ""
        return counted(sum(1 for _ in entries(source_log, position["logOffset"])), cls.unit)

    def lag(self, position: Mapping[str, int] | None, source_log: Location | None) -> int | None:
        """Return how many files are there that were not read. Files that a pattern names are not counted."""
        if source_log is None or GLOB.search(self.name):
            return None
        upto = -1 if position is None else position["logOffset"]
        if upto < self._upto:
            self._seen, self._upto = set(), -1
        self._seen.update(path_of(each["path"]) for each in entries(source_log, upto, self._upto))
        self._upto = upto
        return sum(path not in self._seen for path in _visible(self.connection, self.name))

    def end(self) -> str:
        """Files are read from the first on."""
        raise AssertionError("refused where it is declared")

    def planned(self, position: Any | None, source_log: Location) -> Any:
        """Return the position with a digest of its files: by itself it is a number in Spark's own log of them."""
        if not isinstance(position, Mapping) or "logOffset" not in position:
            return position
        upto = position["logOffset"]
        # While no files come, every batch of the other sources asks for the same: each tenth file of the log has all.
        if self._digest is None or self._digest[:2] != (source_log.path, upto):
            files = [[each["path"], each["timestamp"]] for each in entries(source_log, upto, upto - 1)]
            self._digest = source_log.path, upto, sha256(json.dumps(files).encode()).hexdigest()[:16]
        return {**position, "files": self._digest[2]}

    def stay(self, position: Any | None, source_log: Location) -> Rewind:
        """Return a position before which all files that were read stay read."""
        return self._without(position, float("inf"), source_log)

    def rewind_to_offset(self, position: Any | None, offset: str, source_log: Location) -> Rewind:
        raise DeclarationError(
            f"{self.name} is files, which have no offsets.",
            hint="Read those again that changed since: --to-time.",
        )

    def rewind_to_time(self, position: Any | None, moment: datetime, source_log: Location) -> Rewind:
        # The millisecond that it is in: Spark's log has whole ones.
        rewind = self._without(position, (moment - _EPOCH) // timedelta(milliseconds=1), source_log)
        if not rewind.first:
            since = f"{moment:%Y-%m-%d %H:%M:%S}"
            raise DeclarationError(f"No file of {self.name} that was read has changed since {since}.")
        return rewind

    def _without(self, position: Any | None, milliseconds: float, source_log: Location) -> Rewind:
        if position is None:
            raise self.never_read()
        read = list(entries(source_log, position["logOffset"]))
        stay = [each for each in read if each["timestamp"] < milliseconds]
        again = len(read) - len(stay)
        lines = (json.dumps({**each, "batchId": 0}, separators=(",", ":")) for each in stay)
        summary = f"{again:,} of {counted(len(read), self.unit)} of {self.name} that were read" if again else ""
        return Rewind({"logOffset": 0}, again, summary, source_log="\n".join(("v1", *lines)))


def entries(source_log: Location, upto: int, after: int = -1) -> Iterator[dict[str, Any]]:
    """Yield path and time of change of each file that Spark's log has for a source. Each tenth file of the log repeats
    all before it."""
    names = {int(stem): each for each in source_log.names() if (stem := each.partition(".")[0]).isdecimal()}
    whole = max((number for number, each in names.items() if "." in each and number <= upto), default=-1)
    wanted = [number for number in sorted(names) if max(whole, after + 1) <= number <= upto]
    for number in wanted:
        file = source_log.at(names[number])
        try:
            _, *lines = (file.read() or "").splitlines()
            for line in lines:
                if (entry := json.loads(line))["batchId"] > after:
                    yield entry
        except (OSError, ValueError, LookupError) as error:
            raise StorageError(f"Spark's log cannot be read at {file.path}: {error}.") from None


def _visible(connection: Any, prefix: str) -> Iterator[str]:
    """Yield the files under a prefix that Spark sees too."""
    root = path_of(connection.root)
    for path in list_files(connection, f"{root}/{prefix.strip('/')}", recursive=True):
        if not any(_is_hidden(part) for part in path.removeprefix(root).split("/")):
            yield path


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith("._COPYING_") or (name.startswith("_") and "=" not in name)
