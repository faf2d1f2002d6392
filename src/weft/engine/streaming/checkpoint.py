"""The checkpoint of a streaming pipeline: its positions, the process that may go on from them, and how to move it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from weft.engine import connectors, session
from weft.engine.streaming.checkpoint_files import Columns, Copies, Sources, Starts
from weft.engine.streaming.lock import Lock
from weft.errors import NotFoundError, StorageError, did_you_mean
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.settings import interpolate
from weft.spark_support import outcome
from weft.spark_support.folder import Location, place_of

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BUCKET = re.compile(r"^s3n?://")
# Between the name of a checkpoint and the purpose of a file next to it: no folder of a pipeline has one in its name.
_MARK = "~"
_REWOUND, _MOVING, _READER = "rewound", "moving", "reader"
# What the note on a move says between its two steps; before, what is behind the name of what is moved aside.
_MOVED_ASIDE = "aside"
# Consumers of a log have names of up to 255 characters.
_LONGEST_NAME = 200
_FULL = os.strerror(errno.ENOSPC)
# What Spark could not write is more than what is left; it removes the part that it wrote.
_LITTLE_SPACE = 1024 * 1024
_RESET = "Restore it from a copy, or let the pipeline start again: weft checkpoints reset."


@dataclass(frozen=True)
class CheckpointState:
    """What Spark's log says."""

    query_id: str | None = None
    committed: int | None = None
    """The last batch that is done."""
    planned: int | None = None
    """The last batch whose rows are chosen: more than `committed` while it is carried out, or after a crash."""
    offsets: tuple[Any, ...] = ()
    """By source, how far the batches that are done have come."""
    moment: datetime | None = None
    """When the last batch that is done was begun."""


class Checkpoint:
    """The folder of Spark's own log of offsets and commits, and the files next to it."""

    def __init__(self, name: str, location: str | None = None, pipeline: StreamingPipeline | None = None) -> None:
        self.name, self._pipeline = name, pipeline
        location = location and _BUCKET.sub("s3a://", location)
        own = folder() / quote(name, safe="").replace(_MARK, "%7E")
        self.is_url = location is not None and _URL.match(location) is not None
        self.path = Path(location).expanduser().absolute() if location is not None and not self.is_url else own
        """The checkpoint's folder; for a URL, a local folder that stands for it."""
        self.location = location if location is not None and self.is_url else str(self.path)
        self._home = None if self.is_url and not self.location.startswith("file:") else self._located(None)
        self.lock = Lock(name, self.path.with_name(f"{self.path.name}{_MARK}lock"), self.location)

    @classmethod
    def of(cls, pipeline: StreamingPipeline) -> Checkpoint:
        place = pipeline.checkpoint
        return cls(pipeline.name, place and interpolate(place, f"the checkpoint of {pipeline.name}"), pipeline)

    @property
    def home(self) -> Location:
        """Where it is; of a URL by the session of this process, which is started for it."""
        if self._home is None:
            spark = session.spark()
            if self._pipeline is not None:
                spark = prepared_session(spark, self._pipeline)
            self._open(spark)
        assert self._home is not None
        return self._home

    @property
    def is_open(self) -> bool:
        """Whether it can be read without a session being started."""
        return self._home is not None

    def _open(self, spark: Any) -> None:
        if self.location.startswith("s3a:"):
            connectors.add(spark, "s3")
        with outcome.explained(f"open the checkpoint {self.location}"):
            self._home = self._located(spark)

    def _located(self, spark: Any) -> Location:
        return Location(*place_of(spark, self.location))

    @contextmanager
    def naming_full_disk(self) -> Iterator[None]:
        """Name the checkpoint where its disk is full: Spark's error has no path."""
        try:
            yield
        except Exception as error:
            if _FULL not in str(error) or not self._has_full_disk():
                raise
            raise StorageError(
                f"The disk of the checkpoint {self.location} is full ({_FULL}).",
                hint=f"Free some space there, and {self.name} goes on where it was.",
            ) from error

    def _has_full_disk(self) -> bool:
        try:
            disk = os.statvfs(next(each for each in (self.path, *self.path.parents) if each.exists()))
        except OSError:
            return False
        return not self.is_url and disk.f_bavail * disk.f_frsize < _LITTLE_SPACE

    # --------------------------------------------------------------------------------------------------------- one only

    def hold(self, spark: Any, lost: Callable[[], None]) -> None:
        """Go on holding it with this session; at a URL, keep other machines from it too. `lost` is called when another
        one took it."""
        if self.is_url:
            self._open(spark)  # the session before may be of a JVM that ended
        self.lock.hold(spark)
        self._lease(lost)

    def _lease(self, lost: Callable[[], None]) -> None:
        if self.is_url:
            with outcome.explained(f"open the checkpoint {self.location}"):
                self.lock.lease(self.home.beside(f"{_MARK}lock"), lost)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from it during the block."""
        with self.naming_full_disk():
            self.lock.take()
        try:
            yield
        finally:
            self.lock.release()

    # -------------------------------------------------------------------------------------------------------- how it is

    def source_log(self, number: int) -> Location:
        """Return where Spark keeps what a source has of its own, such as the names of files that were read."""
        return self.home.at(f"sources/{number}")

    def state(self) -> CheckpointState:
        """Return what Spark's log says, without Spark."""
        try:
            metadata = self.home.at("metadata").read()
            if metadata is None:
                return CheckpointState()
            query_id = json.loads(metadata)["id"]
        except (OSError, ValueError, LookupError) as error:
            raise StorageError(f"The checkpoint {self.location} cannot be read: {error}.", hint=_RESET) from None
        committed, planned = _last(self.home.at("commits")), _last(self.home.at("offsets"))
        if committed is None:
            return CheckpointState(query_id, planned=planned)
        moment, offsets = _entry(self.home.at(f"offsets/{committed}"))
        return CheckpointState(query_id, committed, planned, offsets, moment)

    def positions(self, batch_id: int) -> tuple[Any, ...]:
        """Return the position of each source at the end of a batch that was begun."""
        return _entry(self.home.at(f"offsets/{batch_id}"))[1]

    def reader(self) -> str:
        """Return the name by which a source knows what has read it: that of the pipeline, and an id.

        Two checkpoints of one pipeline, or of one name in two projects, have different ones. It is next to the
        checkpoint, with the place of that: it stays the same after a reset and a rewind, and a copy of the checkpoint
        gets one of its own, also a copy of all that is next to it. The caller holds the checkpoint."""
        file, place = self._beside(_READER), self.home.path
        place = place if _URL.match(place) else os.path.realpath(place)
        known, _, noted = (file.read() or "").partition("\n")
        if not known or noted != place:
            known = known if known and not noted else uuid4().hex[:12]
            file.write(f"{known}\n{place}")
        return f"{self.name[:_LONGEST_NAME]}-{known}"

    # -------------------------------------------------------------------------------------------------------- moving it

    def settle(self) -> None:
        """Finish a move that a crash cut off, and forget a rewind that it cut off before it was moved here."""
        moving, rewound = self._beside(_MOVING), self._beside(_REWOUND)
        noted = moving.read()
        if noted is None:
            if rewound.exists():
                rewound.remove()
            return
        if noted != _MOVED_ASIDE:
            self.home.move(self._beside(noted))
            moving.write(_MOVED_ASIDE)  # what is here from now on is the new one
        rewound.move(self.home)  # of a reset there is none
        moving.remove()

    def reset(self, *, dry_run: bool = False) -> str:
        """Move it aside, so that the pipeline starts again, and return where it is now."""
        with self.changing():
            return self._move_aside(dry_run=dry_run)

    def rewind(self, positions: Sequence[Any], source_logs: Mapping[int, str], *, dry_run: bool = False) -> str:
        """Move the checkpoint aside, and let a new one go on from these positions, one a source. `source_logs` has by
        the number of a source what Spark's own log of it says. A caller chooses both while `changing`.

        The new log has two batches that end at these positions and are done, and an id of its own: to the targets'
        ledgers what comes is new. Two, because Spark asks a source again for what is between the last two."""
        if not dry_run:
            self._write_log(self._beside(_REWOUND), positions, source_logs)
        return self._move_aside(dry_run=dry_run)

    def _move_aside(self, *, dry_run: bool) -> str:
        mark = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        if not dry_run:
            self.lock.check()
            self._beside(_MOVING).write(mark)
            self.settle()
        return self._beside(mark).path

    def _write_log(self, rewound: Location, positions: Sequence[Any], source_logs: Mapping[int, str]) -> None:
        committed = self.state().committed
        offsets, commit = (self.home.at(f"{each}/{committed}").read() or "" for each in ("offsets", "commits"))
        version, about, *_ = offsets.splitlines()
        query_id = str(uuid4())
        files = {"metadata": json.dumps({"id": query_id})}
        for batch in ("0", "1"):
            files[f"offsets/{batch}"] = "\n".join((version, about, *map(_line, positions)))
            files[f"commits/{batch}"] = commit
        files |= {f"sources/{number}/0": text for number, text in source_logs.items()}
        if (columns := self.home.at(Columns.NAME).read()) is not None:
            files[Columns.NAME] = json.dumps({**json.loads(columns), "checkpoint": query_id})
        for name in (Starts.NAME, Sources.NAME, Copies.NAME):
            if (kept := self.home.at(name).read()) is not None:
                files[name] = kept
        for name, text in files.items():
            rewound.at(name).write(text)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other processes from it during a block that reads and changes it, and settle what a crash left."""
        if not self.home.exists() and self._beside(_MOVING).read() is None:
            raise NotFoundError(
                f"There is no checkpoint of {self.name!r}: {self.location} is not there.",
                hint=did_you_mean(self.name, [each.name for each in stored()], "weft checkpoints list"),
            )
        with self.locked():
            self._lease(lambda: None)  # `check` raises in what changes it
            self.settle()
            yield

    def _beside(self, purpose: str) -> Location:
        return self.home.beside(f"{_MARK}{purpose}")


def prepared_session(spark: Any, pipeline: StreamingPipeline) -> Any:
    """A session like this one that can use a pipeline's connections: its checkpoint may be in a bucket of theirs."""
    named = [each.connection for each in pipeline.sources] + [each.connection for each in pipeline.targets]
    used = [current().connection(each) for each in named]
    spark = connectors.ready(spark, *used)
    for each in used:
        each.configure(spark)
    return spark


def folder() -> Path:
    """Return where the checkpoints of a project are, if it does not say otherwise."""
    return current().root.absolute() / ".weft" / "checkpoints"


def stored() -> list[Checkpoint]:
    """Return every checkpoint in the project's own folder."""
    if not folder().is_dir():
        return []
    names = [each.name for each in folder().iterdir() if each.is_dir() and _MARK not in each.name]
    return [Checkpoint(unquote(each)) for each in sorted(names)]


# ---------------------------------------------------------------------------------------------------------------- files


def _last(log: Location) -> int | None:
    return max((int(each) for each in log.names() if each.isdecimal()), default=None)


def _entry(file: Location) -> tuple[datetime | None, tuple[Any, ...]]:
    """Return when a batch was begun, and how far it reaches in each source."""
    try:
        text = file.read()
        if text is None:
            raise ValueError("it is not there")
        _, about, *lines = text.splitlines()
        began = json.loads(about).get("batchTimestampMs")
    except (OSError, ValueError) as error:
        raise StorageError(f"Spark's log cannot be read at {file.path}: {error}.", hint=_RESET) from None
    moment = datetime.fromtimestamp(began / 1000, UTC) if began else None
    return moment, tuple(_offset(each) for each in lines)


def _offset(line: str) -> Any:
    """Return a position as a source has it; of Weft streams the offset alone."""
    if line == "-":
        return None  # the batch has nothing of this source, nor had those before it
    try:
        position = json.loads(line)
    except ValueError:
        return line
    return position["offset"] if isinstance(position, dict) and set(position) == {"offset"} else position


def _line(position: Any) -> str:
    """Return a position as Spark's log has it."""
    if position is None:
        return "-"
    return json.dumps({"offset": position} if type(position) is int else position, separators=(",", ":"))
