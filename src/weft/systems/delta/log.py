"""The log of a Delta table, read without Spark: which columns the table has, and what a writer of loads keeps in it.

A load names itself in its commit (`txn`), and what it keeps is in the information about that commit (`commitInfo`).
Delta removes commits that are older than a month once a checkpoint has what they say, without such information.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import pyarrow.compute as pc
import pyarrow.parquet as pq

from weft.systems.delta.table import writer
from weft.systems.load import Load
from weft.systems.objects.paths import LogFiles, understood
from weft.systems.target import TableLog

_COMMIT = re.compile(r"(\d{20})\.json")
_Last = tuple[int, str | None, datetime | None, str | None]
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\.[\w.-]+)?\.parquet")
# How many parts it has.
_PARTS = re.compile(r"\.\d{10}\.(\d{10})")
_Rows = dict[tuple[str, str | None], int | None]
"""The row count of each file of a table, by its path and deletion vector; `None` without statistics."""


def label_of(load: Load) -> str:
    """Return a text for the information about the commit of a load, which no other one has."""
    named = {"weft": str(uuid4()), "state": load.state, "positions": load.positions}
    return json.dumps({name: value for name, value in named.items() if value is not None})


def version(files: LogFiles, path: str) -> int | None:
    """Return the number of the last commit of the table at a path; `None` where there is no table."""
    return max(_commits(files.files_in(f"{path}/_delta_log")), default=None)


def _commits(names: Iterable[str]) -> list[int]:
    return [int(match[1]) for match in map(_COMMIT.fullmatch, names) if match]


def kept(files: LogFiles, path: str, load: Load, *, with_columns: bool) -> TableLog | None:
    """Return what the log of the table at a path says; `None` where there is no table."""
    log = f"{path}/_delta_log"
    names = files.files_in(log)
    commits = sorted(_commits(names), reverse=True)
    checkpoint = max((match[1] for match in map(_CHECKPOINT.fullmatch, names) if match), default=None)
    if not commits:
        return None
    columns: str | None = None
    last: _Last | None = None
    forgotten = -1
    for version in commits:
        if checkpoint is not None and version <= int(checkpoint):
            # Commits older than the checkpoint are searched only for the one that the checkpoint says exists.
            in_checkpoint, batch = _in_checkpoint(files, log, sorted(names), checkpoint, writer(load))
            columns, checkpoint = columns or in_checkpoint, None
            last = last or (None if batch >= 0 else (-1, None, None, None))
            forgotten = batch
        if last is not None and (columns is not None or not with_columns):
            break
        name = f"{log}/{version:020}.json"
        # Delta may have removed it since it was listed: then a checkpoint has what it said.
        said = understood(name, files.read(name) or b"", partial(_said, writer(load)))
        columns, last = columns or said[0], last or said[1]
    return TableLog(commits[0], columns, None, *(last or (forgotten, None, None, None)))


def rows(files: LogFiles, path: str) -> int | None:
    """Return how many rows the table at a path has; `None` where there is no table, or its log does not say so: the
    statistics of a file may be missing, and a checkpoint may be in parts of other kinds."""
    log = f"{path}/_delta_log"
    names = files.files_in(log)
    commits = sorted(_commits(names))
    parts = [match for match in map(_CHECKPOINT.fullmatch, names) if match]
    checkpoint = max((match[1] for match in parts), default=None)
    first = 0 if checkpoint is None else int(checkpoint) + 1
    since = [version for version in commits if version >= first]
    if not commits or since != list(range(first, commits[-1] + 1)):
        return None
    counted: _Rows = {}
    parts = [each for each in parts if each[1] == checkpoint]
    if any(int(match[1]) > len(parts) for match in (_PARTS.search(each[2] or "") for each in parts) if match):
        return None
    for part in parts:
        file = f"{log}/{part[0]}"
        match = understood(file, files.read(file), _rows_in_part)
        if match is None:
            return None
        counted |= match
    for version in since:
        name = f"{log}/{version:020}.json"
        understood(name, files.read(name), partial(_count, counted))
    known = [each for each in counted.values() if each is not None]
    return sum(known) if len(known) == len(counted) else None


def _count(counted: _Rows, commit: bytes) -> None:
    """Count the rows of the files that a commit adds, and no longer those that it removes."""
    for action in map(json.loads, commit.splitlines()):
        if (gone := action.get("remove")) is not None:
            counted.pop(_file_key(gone), None)
        if (file := action.get("add")) is not None:
            counted[_file_key(file)] = _rows_of(file)


def _file_key(file: dict[str, Any]) -> tuple[str, str | None]:
    """A file with other deleted rows counts as another one."""
    deleted = file.get("deletionVector")
    return file["path"], None if deleted is None else f"{deleted['pathOrInlineDv']} {deleted.get('offset')}"


def _rows_of(file: dict[str, Any]) -> int | None:
    written = json.loads(file.get("stats") or "{}").get("numRecords")
    return None if written is None else int(written) - int((file.get("deletionVector") or {}).get("cardinality", 0))


def _said(by: str, commit: bytes) -> tuple[str | None, _Last | None]:
    """Return the columns that a commit gives the table, and what it has of a writer."""
    columns: str | None = None
    info: dict[str, Any] = {}
    batch = -1
    for action in map(json.loads, commit.splitlines()):
        columns = columns or (action.get("metaData") or {}).get("schemaString")
        info = action.get("commitInfo") or info
        mark = action.get("txn") or {}
        batch = int(mark["version"]) if mark.get("appId") == by else batch
    if batch < 0:
        return columns, None
    moment = datetime.fromtimestamp(int(info.get("timestamp", 0)) / 1000, UTC)
    label = info.get("userMetadata")
    return columns, (batch, _labelled(label, "state"), moment, _labelled(label, "positions"))


def _labelled(text: str | None, name: str) -> str | None:
    try:
        value = json.loads(text or "null")[name]
    except (ValueError, TypeError, KeyError):  # what somebody else wrote there
        return None
    return str(value)


def _in_checkpoint(files: LogFiles, log: str, names: list[str], version: str, by: str) -> tuple[str | None, int]:
    """Return the columns that a checkpoint has, and the last batch of a writer."""
    columns, batch = None, -1
    for name in names:
        if not name.startswith(f"{version}.checkpoint"):
            continue
        file = f"{log}/{name}"
        names_in, number = understood(file, files.read(file), partial(_in_part, by))
        columns, batch = names_in or columns, max(number, batch)
    return columns, batch


def _in_part(by: str, checkpoint: bytes) -> tuple[str | None, int]:
    """Return both of one file of a checkpoint, which has a row for each file of the table: few become Python's."""
    names = ["metaData.schemaString", "txn.appId", "txn.version"]
    rows = pq.ParquetFile(io.BytesIO(checkpoint)).read(columns=names).flatten()
    texts = rows["metaData.schemaString"].drop_null()
    marks = rows.filter(pc.equal(rows["txn.appId"], by))["txn.version"].to_pylist()
    return (texts[-1].as_py() if len(texts) else None), max(marks, default=-1)


def _rows_in_part(checkpoint: bytes) -> _Rows | None:
    """Return the files that one file of a checkpoint has; `None` where others have them."""
    file = pq.ParquetFile(io.BytesIO(checkpoint))
    if "sidecar" in file.schema_arrow.names:
        return None
    added = file.read(columns=["add.path", "add.stats", "add.deletionVector"])["add"].drop_null().to_pylist()
    return {_file_key(each): _rows_of(each) for each in added}
