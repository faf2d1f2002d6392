"""A Delta table as a source of streaming pipelines. A position is the version that is read next, or is being read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, NotFoundError
from weft.spark_support.folder import Location
from weft.spark_support.lazy import F
from weft.systems.delta.table import DeltaTable, read
from weft.systems.objects.paths import client, list_files, path_of, table_path
from weft.systems.stream_source import EVENT_TIME, MAX_FILES, FrameRows, Rewind, SourceSettings, StreamSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FUTURE_VERSIONS = "spark.databricks.delta.changeDataFeed.timestampOutOfRange.enabled"
_VERSION = re.compile(r"(\d{20})\.json")


class DeltaSource(StreamSource):
    """Follows what is added to one table."""

    unit = "versions"

    def __init__(self, connection: Any, settings: SourceSettings) -> None:
        super().__init__(connection, settings)
        self._folder = f"{path_of(table_path(connection.root, None, settings.name))}/_delta_log"

    def follow(self, spark: SparkSession, start: str) -> DataFrame:
        read(spark, self.connection, self.name)  # refuses one that is not there
        table = DeltaTable(spark, self.connection, None, self.name)
        reader = spark.readStream.format("delta").option("maxFilesPerTrigger", self.settings.max_files or MAX_FILES)
        if start != "earliest":
            reader = reader.option("startingVersion", start)
        if start == str(table.version() + 1):
            # Delta knows "latest", which is another version whenever it is asked, and else refuses one that is to come.
            spark.conf.set(_FUTURE_VERSIONS, "true")
        rows = reader.load(table.path)
        # Rows of a table have no arrival time. The time of the batch is in Spark's log, and the same in every retry.
        return rows.select("*", F.current_timestamp().alias(EVENT_TIME))

    def take(self, frame: DataFrame) -> FrameRows:
        return FrameRows(self.name, frame)

    def validate(self) -> str:
        if not self._versions():
            raise NotFoundError(f"There is no Delta table {self.name!r} in {self.connection.label}.")
        return ""

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        """Return the last version of which something was read."""
        is_version = isinstance(position, Mapping) and "reservoirVersion" in position
        return f"version {_before(position):,}" if is_version else None

    def lag(self, position: Mapping[str, Any] | None, source_log: Location | None) -> int | None:
        """Return how many versions were not read to their end."""
        versions, start = self._versions(), self.settings.start
        if not versions or (position is None and start == "latest"):
            return None
        first = position["reservoirVersion"] if position is not None else 0 if start == "earliest" else int(start)
        return max(versions[-1] + 1 - int(first), 0)

    def end(self) -> str:
        return str(max(self._versions(), default=-1) + 1)

    def stay(self, position: Any | None, source_log: Location) -> Rewind:
        return Rewind(position, None if position is None else position["reservoirVersion"])

    def rewind_to_offset(self, position: Any | None, offset: str, source_log: Location) -> Rewind:
        if not offset.isdecimal():
            raise DeclarationError(f"{offset!r} is not a version of {self.name}: a version is one number.")
        return self._from(position, int(offset))

    def rewind_to_time(self, position: Any | None, moment: datetime, source_log: Location) -> Rewind:
        first = None
        for version in reversed(self._versions()):
            if self._committed_at(version) < moment:
                break
            first = version
        if first is None:
            raise DeclarationError(f"{self.name} has no version of {moment:%Y-%m-%d %H:%M:%S} or later.")
        return self._from(position, first)

    def _from(self, position: Any | None, version: int) -> Rewind:
        if position is None:
            raise self.never_read()
        if position["isStartingVersion"]:
            raise DeclarationError(
                f"{self.name} is still being read for the first time, as the whole that it was then.",
                hint="To begin again: weft checkpoints reset.",
            )
        if version > _before(position):
            raise self.after_position(f"version {_before(position):,}", f"{version:,}")
        versions, note = self._versions(), None
        if versions and version < versions[0]:
            note = f"the log of {self.name} begins with version {versions[0]:,}."
            version = versions[0]
        moved = {**position, "reservoirVersion": version, "index": -1}
        summary = f"version {version:,} of {self.name}; it was at {_before(position):,}"
        return Rewind(moved, version, summary, note)

    def _versions(self) -> list[int]:
        names = (each.rpartition("/")[2] for each in list_files(self.connection, self._folder))
        return sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)))

    def _committed_at(self, version: int) -> datetime:
        store, path = client(self.connection), f"{self._folder}/{version:020}.json"
        try:
            with store.open_input_stream(path) as file:
                actions = [json.loads(line) for line in file.read().splitlines()]
            info: dict[str, Any] = next((each["commitInfo"] for each in actions if "commitInfo" in each), {})
            milliseconds = info.get("inCommitTimestamp") or info.get("timestamp")
            if milliseconds is not None:
                return datetime.fromtimestamp(milliseconds / 1000, UTC)
            changed: datetime = store.get_file_info(path).mtime
            return changed
        except OSError as error:
            raise self.connection.failed(error) from None


def _before(position: Mapping[str, Any]) -> int:
    """Return the last version of which something was read."""
    version: int = position["reservoirVersion"]
    return version if position["index"] >= 0 else version - 1
