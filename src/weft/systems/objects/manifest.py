"""The files of a table: a numbered log of loads next to its folder, which our readers follow.

For a table at `lake/orders` the log is `lake/_weft/orders/log/00000000000000000001.json` and so on, one entry for each
load. An entry is created in one step and only if it does not exist: this commits the load. Then its files, staged under
`lake/_weft/orders/staging`, are moved to `lake/orders` (`….published`), files that a truncate replaces are removed, and
so is the staging (`….done`). The next load finishes these steps first if the process of the last one died, so that only
the last entry can be unfinished. Readers read the last entry that is published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from weft.errors import BusyError
from weft.spark_support.folder import Folder, LocalFolder
from weft.spark_support.sessions import reached
from weft.systems import process
from weft.systems.load import Load
from weft.systems.objects.options import FileOptions
from weft.systems.objects.paths import LogFiles, understood
from weft.systems.target import TableLog

# How often an entry has the whole state, so that a reader need not read them all.
_WHOLE_EVERY = 25
_WHOLE = ("files", "narrow", "rows", "ledger", "states")
_ENTRY, _PUBLISHED, _DONE = ".json", ".published", ".done"
_OWNER = ".owner"
_FORGOTTEN = timedelta(days=1)
"""After this long the staging of a load on another machine is taken for a dead one's."""
_RETRIES_END = timedelta(days=7)
"""After this long a load without a commit key is not tried again, so that the ledger may forget it."""


@dataclass(frozen=True)
class TableState:
    """A table after a load."""

    version: int = 0
    format: str = "parquet"
    schema: str | None = None
    """The columns of the table, as Spark writes them in JSON."""
    dialect: dict[str, Any] = field(default_factory=dict)
    """How its CSV files are written."""
    files: tuple[str, ...] = ()
    narrow: tuple[tuple[int, int], ...] = ()
    """Before the table got more columns: so many of the first files have so many of the first columns."""
    rows: int = 0
    ledger: dict[str, list[Any]] = field(default_factory=dict)
    """By writer: its last batch, when that was, and its positions, of those that have some."""
    states: dict[str, str] = field(default_factory=dict)
    """By writer: the state of its last batch, of those that have one."""

    def has(self, load: Load) -> bool:
        last_batch = self.ledger.get(_writer(load))
        return last_batch is not None and int(last_batch[0]) >= load.batch_id


@dataclass(frozen=True)
class StagedFiles:
    """Files that were written but are not yet a table's."""

    folder: str
    files: dict[str, int]
    """Their names and sizes."""
    rows: int


class ReadManifest:
    """The log of one table, to be read."""

    def __init__(self, folder: Folder | LogFiles, path: str) -> None:
        parent, _, name = path.rpartition("/")
        self._files = folder
        self.home = f"{parent}/_weft/{name}"
        self.log = f"{self.home}/log"

    def state(self) -> TableState | None:
        """Return the table as readers see it, or `None` where no load made one here."""
        return self._state(self._published(self._files.files_in(self.log)))

    def version(self) -> int | None:
        """Return the number of the last load that readers see, or `None` where no load made a table here."""
        names = self._files.files_in(self.log)
        return self._published(names) if _last(names) else None

    def kept(self, load: Load) -> TableLog | None:
        """Return the table as the target of a load, or `None` where no load made one here."""
        names = self._files.files_in(self.log)
        published, last = self._published(names), _last(names)
        if not last:
            return None
        state = self._state(published) or TableState()
        batch, at, *positions = state.ledger.get(_writer(load), (-1, None))
        return TableLog(
            state.version,
            state.schema,
            state.rows,
            int(batch),
            state.states.get(_writer(load)),
            None if at is None else datetime.fromisoformat(at),
            positions[0] if positions else None,
            is_complete=published == last,
        )

    def all_files(self) -> list[str]:
        """Return the names of the table's files, also of those that a load which is not finished adds or removes."""
        names = self._files.files_in(self.log)
        last = _last(names)
        # The one before may be gone: an entry with the whole state needs none.
        before = self._state(last - 1) if _name(last - 1, _ENTRY) in names else None
        states = (before, self._state(last))
        return list(dict.fromkeys(name for each in states if each is not None for name in each.files))

    def _published(self, names: Any) -> int:
        """Return the last entry whose files are in place. Those before it are: each load finishes the one before it."""
        last = _last(names)
        return last if {_name(last, _PUBLISHED), _name(last, _DONE)} & set(names) else last - 1

    def _state(self, version: int) -> TableState | None:
        entries: list[dict[str, Any]] = []
        number = version
        while number > 0:
            entry = self._entry(number)
            entries.append(entry)
            if "state" in entry:
                break
            number -= 1
        if not entries:
            return None
        state = TableState()
        for entry in reversed(entries):
            after = _whole if "state" in entry else partial(_after, state)
            state = understood(self._file(entry["version"]), entry, after)
        return state

    def _entry(self, number: int) -> dict[str, Any]:
        def parse(data: bytes) -> dict[str, Any]:
            entry: dict[str, Any] = json.loads(data)
            if entry["version"] != number:
                raise ValueError(f"it says that it is number {entry['version']}")
            return entry

        file = self._file(number)
        return understood(file, self._files.read(file), parse)

    def _file(self, number: int) -> str:
        return f"{self.log}/{_name(number, _ENTRY)}"


class Manifest(ReadManifest):
    """The log of one table."""

    def __init__(self, folder: Folder, path: str) -> None:
        super().__init__(folder, path)
        self.folder, self.path = folder, path
        self.staging = f"{self.home}/staging"

    # ---------------------------------------------------------------------------------------------------------- writing

    def begin(self, load: Load) -> str:
        """Return a new folder to stage files in. A file next to it names its owner, and is written first: a folder
        without one is dead."""
        folder = f"{self.staging}/{uuid4().hex}"
        owner = {"process": process.this_process(), "at": datetime.now(UTC).isoformat(), "load": _writer(load)}
        self.folder.create(f"{folder}{_OWNER}", json.dumps(owner).encode())
        return folder

    def commit(
        self, load: Load, staged: StagedFiles, options: FileOptions, schema: str, before: str | None
    ) -> TableState | None:
        """Commit staged files to the table. Return the state before, or `None` if the table has the load already.
        `before`: the columns of the table that the files were made for."""
        self.folder.flush(f"{staged.folder}/data/{name}" for name in staged.files)
        while True:
            state = self.finish()
            if state.has(load):
                self._drop(staged.folder)
                return None
            if not load.replaces_rows and state.files and state.schema not in (before, schema):
                raise BusyError(f"{load.name} got other columns while this load wrote its files.", hint="Try again.")
            entry: dict[str, Any] = {
                "version": state.version + 1,
                "mode": "truncate" if load.replaces_rows else load.mode,
                "format": options.format,
                "dialect": options.dialect(),
                "schema": schema,
                "writer": _writer(load),
                "batch": load.batch_id,
                "at": load.moment.isoformat(),
                "staging": staged.folder.rpartition("/")[2],
                "files": {name: _published_name(staged, name, number) for number, name in enumerate(staged.files)},
                "bytes": sum(staged.files.values()),
                "rows": staged.rows,
                "removes": list(state.files) if load.replaces_rows else [],
            }
            if load.state is not None:
                entry["stored"] = load.state
            if load.positions is not None:
                entry["positions"] = load.positions
            if entry["version"] % _WHOLE_EVERY == 0:
                whole = _after(state, entry)
                entry["state"] = {name: getattr(whole, name) for name in _WHOLE}
            # An entry is never changed once it can be read.
            if self.folder.create(f"{self.log}/{_name(entry['version'], _ENTRY)}", json.dumps(entry).encode()):
                reached("recorded")
                self._publish(entry)
                return state

    def finish(self) -> TableState:
        """Finish the last load if its process did not, and give the state after it."""
        names = self.folder.files_in(self.log)
        last = _last(names)
        if last and _name(last, _DONE) not in names:
            self._publish(self._entry(last))
        return self._state(last) or TableState()

    def _publish(self, entry: dict[str, Any]) -> None:
        """Bring the files of an entry to where everybody looks. Any number of processes may do so at once."""
        version, staging = entry["version"], f"{self.staging}/{entry['staging']}"
        try:
            self.folder.move(
                {f"{staging}/data/{staged}": f"{self.path}/{name}" for staged, name in entry["files"].items()}
            )
        except FileNotFoundError:
            # Neither staged nor published: another process finished this load, and a truncate after it.
            if _name(version, _DONE) in self.folder.files_in(self.log):
                return
            raise
        reached("moved")
        if entry["removes"]:
            self.folder.create(f"{self.log}/{_name(version, _PUBLISHED)}", b"")
            reached("published")
            self.folder.remove(f"{self.path}/{name}" for name in entry["removes"])
        self._drop(staging)
        self.folder.create(f"{self.log}/{_name(version, _DONE)}", b"")
        reached("committed")

    # --------------------------------------------------------------------------------------------------------- cleaning

    def abandon(self, folder: str) -> None:
        """Remove what a failed load staged, unless it was decided before it failed: then the next one finishes it."""
        last = _last(self.folder.files_in(self.log))
        if not last or self._entry(last)["staging"] != folder.rpartition("/")[2]:
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        self.folder.remove_tree(folder)
        self.folder.remove([f"{folder}{_OWNER}"])

    def sweep(self) -> None:
        """Remove what dead loads staged, and entries that the state no longer needs."""
        now = datetime.now(UTC)
        owned = {name.removesuffix(_OWNER) for name in self.folder.files_in(self.staging) if name.endswith(_OWNER)}
        staged = owned.union(self.folder.folders_in(self.staging))
        dead = [name for name in staged if self._is_dead(f"{self.staging}/{name}", now)]
        # Looked at after that: the dead make no more entries.
        names = self.folder.files_in(self.log)
        last = _last(names)
        pending = self._entry(last)["staging"] if last and _name(last, _DONE) not in names else None
        for name in dead:
            if name != pending:
                self._drop(f"{self.staging}/{name}")
        # The last two whole states stay: a reader may be at the one before.
        oldest = (last // _WHOLE_EVERY - 1) * _WHOLE_EVERY
        old = [name for name in names if name[:20].isdigit() and int(name[:20]) < oldest]
        self.folder.remove(f"{self.log}/{name}" for name in old)

    def _is_dead(self, folder: str, now: datetime) -> bool:
        data = self.folder.read(f"{folder}{_OWNER}")
        if data is None:
            return True
        owner = json.loads(data)
        if process.is_on_this_machine(owner["process"]):
            return process.has_ended(owner["process"])
        return now - datetime.fromisoformat(owner["at"]) > _FORGOTTEN

    @property
    def is_local(self) -> bool:
        """Whether the files are this machine's."""
        return isinstance(self.folder, LocalFolder)


def _writer(load: Load) -> str:
    return json.dumps([load.pipeline, load.checkpoint_id])


def _published_name(staged: StagedFiles, name: str, number: int) -> str:
    """Return a name that is unique to the load, and by which files sort in the order of their tasks."""
    return f"part-{staged.folder.rpartition('/')[2]}-{number:05}{name[name.index('.') :]}"


def _whole(entry: dict[str, Any]) -> TableState:
    return msgspec.convert({**entry, **entry["state"]}, TableState)


def _after(state: TableState, entry: dict[str, Any]) -> TableState:
    replaces = entry["mode"] == "truncate"
    batch = [entry["batch"], entry["at"], *([entry["positions"]] if "positions" in entry else [])]
    ledger = {**state.ledger, entry["writer"]: batch}
    at = datetime.fromisoformat(entry["at"])
    narrow = () if replaces else state.narrow
    if not replaces and state.files and state.schema != entry["schema"]:
        narrow = (*narrow, (len(state.files), len(json.loads(state.schema or "{}")["fields"])))
    return replace(
        state,
        **{name: entry[name] for name in ("version", "format", "dialect", "schema")},
        files=(*(() if replaces else state.files), *entry["files"].values()),
        narrow=narrow,
        rows=entry["rows"] + (0 if replaces else state.rows),
        states={**state.states, entry["writer"]: entry["stored"]} if "stored" in entry else state.states,
        ledger={
            writer: value
            for writer, value in ledger.items()
            if '"once:' not in writer or at - datetime.fromisoformat(value[1]) < _RETRIES_END
        },
    )


def _name(version: int, suffix: str) -> str:
    return f"{version:020}{suffix}"


def _last(names: Any) -> int:
    return max((int(name[:20]) for name in names if name.endswith(_ENTRY) and name[:20].isdigit()), default=0)
