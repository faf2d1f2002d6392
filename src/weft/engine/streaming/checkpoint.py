"""Where a streaming pipeline remembers how far it has come, who may go on from there, and how to move it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from weft.engine.streaming.columns import Columns
from weft.engine.streaming.lock import Lock
from weft.engine.streaming.starts import Sources, Starts
from weft.errors import DeclarationError, NotFoundError, StorageError, nearest
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.settings import interpolate
from weft.systems.objects.folder import place_of

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BUCKET = re.compile(r"^s3n?://")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
# Between the name of a checkpoint and what a file beside it is for: no folder of a pipeline has one in its name.
_BESIDE = "~"
_REWOUND = "rewound"
_ANEW = "Bring it back from a copy, or have the pipeline begin anew: weft checkpoints reset."
_COLUMNS, _STARTS, _SOURCES = "columns.json", "starts.json", "sources.json"


@dataclass(frozen=True)
class State:
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
    """The folder of Spark's own log of offsets and commits, and what lies beside it."""

    def __init__(self, name: str, location: str | None = None) -> None:
        self.name = name
        location = location and _BUCKET.sub("s3a://", location)
        safe = _UNSAFE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)
        own = folder() / safe
        self.is_url = location is not None and _URL.match(location) is not None
        self.path = Path(location).expanduser().absolute() if location is not None and not self.is_url else own
        """Of a URL, where files beside it would be if it were a folder here."""
        self.location = location if location is not None and self.is_url else str(self.path)
        self._lock = Lock(name, self._beside("lock"), self.location if self.is_url else None)

    @classmethod
    def of(cls, pipeline: StreamingPipeline) -> Checkpoint:
        """That of a pipeline."""
        place = pipeline.checkpoint
        return cls(pipeline.name, place and interpolate(place, f"the checkpoint of {pipeline.name}"))

    def _beside(self, purpose: str) -> Path:
        return self.path.with_name(f"{self.path.name}{_BESIDE}{purpose}")

    # --------------------------------------------------------------------------------------------------------- one only

    def lock(self) -> None:
        """Keep others of this machine from it, until `unlock` or the end of this process."""
        self._lock.take()

    def hold(self, spark: Any, lost: Callable[[], None]) -> None:
        """Go on holding it with this session; at a URL, keep other machines from it too. `lost` is called when another
        one took it."""
        self._lock.hold(spark, lost)

    def check(self) -> None:
        """Raise where another machine may have taken it."""
        self._lock.check()

    def unlock(self) -> None:
        """Let others have it."""
        self._lock.release()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from it during the block."""
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def runner(self) -> int | None:
        """The process that runs its pipeline now."""
        return self._lock.holder()

    # -------------------------------------------------------------------------------------------------------- how it is

    def columns(self, spark: Any = None) -> Columns:
        """The columns that its sources have had, kept with Spark's log and moved with it: at a URL by this session."""
        folder, path = place_of(spark, self.location)
        return Columns(folder, f"{path}/{_COLUMNS}")

    def starts(self, spark: Any = None) -> Starts:
        """Where its sources began, kept and moved like their columns."""
        folder, path = place_of(spark, self.location)
        return Starts(folder, f"{path}/{_STARTS}")

    def sources(self, spark: Any = None) -> Sources:
        """Which sources its places are of, kept and moved like their columns."""
        folder, path = place_of(spark, self.location)
        return Sources(folder, f"{path}/{_SOURCES}")

    def log_of(self, number: int) -> Path | None:
        """Where Spark keeps what a source has of its own, such as the names of files that were read."""
        return None if self.is_url else self.path / "sources" / str(number)

    def state(self) -> State:
        """What Spark's log says, without Spark."""
        self._refuse_url("read")
        try:
            query_id = json.loads((self.path / "metadata").read_text(encoding="utf-8"))["id"]
        except FileNotFoundError:
            return State()
        except (OSError, ValueError, LookupError) as error:
            raise StorageError(f"The checkpoint {self.location} cannot be read: {error}.", hint=_ANEW) from None
        committed, planned = _last(self.path / "commits"), _last(self.path / "offsets")
        if committed is None:
            return State(query_id, planned=planned)
        moment, offsets = _entry(self.path / "offsets" / str(committed))
        return State(query_id, committed, planned, offsets, moment)

    def places(self, batch_id: int) -> tuple[Any, ...]:
        """By source, how far a batch reaches that is begun."""
        return () if self.is_url else _entry(self.path / "offsets" / str(batch_id))[1]

    # -------------------------------------------------------------------------------------------------------- moving it

    def settle(self) -> None:
        """Finish a rewind that a crash cut off between its two renames, and forget one that it cut off before them."""
        rewound = self._beside(_REWOUND)
        if self.is_url or not rewound.exists():
            return
        if self.path.exists():
            shutil.rmtree(rewound)
        else:
            os.rename(rewound, self.path)

    def reset(self, *, dry_run: bool = False) -> Path:
        """Move it aside, so that the pipeline begins anew, and give the place where it is now."""
        with self.changing():
            aside = self._aside()
            if not dry_run:
                os.rename(self.path, aside)
            return aside

    def rewind(self, places: Sequence[Any], files: Mapping[int, str], *, dry_run: bool = False) -> Path:
        """Move it aside, and let another one go on from these places, one a source. `files` is by the number of a
        source what Spark's log says of files that were read. Whoever calls it chose them while `changing`.

        The new log has two batches that end at these places and are done, and an id of its own: to the targets' ledgers
        what comes is new. Two, because Spark asks a source again for what is between the last two."""
        aside = self._aside()
        if not dry_run:
            rewound = self._beside(_REWOUND)
            self._write_log(rewound, places, files)
            os.rename(self.path, aside)
            os.rename(rewound, self.path)
        return aside

    def _write_log(self, folder: Path, places: Sequence[Any], files: Mapping[int, str]) -> None:
        state = self.state()
        offsets, commit = (self.path / each / str(state.committed) for each in ("offsets", "commits"))
        version, about, *_ = offsets.read_text(encoding="utf-8").splitlines()
        made = {"metadata": json.dumps({"id": str(uuid4())})}
        for batch in ("0", "1"):
            made[f"offsets/{batch}"] = "\n".join((version, about, *map(_line, places)))
            made[f"commits/{batch}"] = commit.read_text(encoding="utf-8")
        made |= {f"sources/{number}/0": text for number, text in files.items()}
        if (columns := self.path / _COLUMNS).exists():
            known = json.loads(columns.read_text(encoding="utf-8"))
            made[_COLUMNS] = json.dumps({**known, "checkpoint": json.loads(made["metadata"])["id"]})
        for name in (_STARTS, _SOURCES):
            if (kept := self.path / name).exists():
                made[name] = kept.read_text(encoding="utf-8")
        for name, text in made.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep others from it while somebody looks at it and changes it; what a crash left is settled before."""
        self._refuse_url("changed")
        if not self.path.exists() and not self._beside(_REWOUND).exists():
            close = nearest(self.name, [each.name for each in stored()])
            raise NotFoundError(
                f"There is no checkpoint of {self.name!r}: {self.location} is not there.",
                hint=f"Did you mean {close!r}?" if close else "weft checkpoints list",
            )
        with self.locked():
            self.settle()
            yield

    def _aside(self) -> Path:
        return self._beside(f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")

    def _refuse_url(self, what: str) -> None:
        if self.is_url:
            raise DeclarationError(
                f"The checkpoint {self.location} is not in a folder of this machine, so it cannot be {what} here.",
                hint="Use the tools of where it is; a pipeline without its checkpoint begins anew.",
            )


def folder() -> Path:
    """Where the checkpoints of a project are, if it does not say otherwise."""
    return current().root.absolute() / ".weft" / "checkpoints"


def stored() -> list[Checkpoint]:
    """Every checkpoint in the project's own folder."""
    if not folder().is_dir():
        return []
    found = [each.name for each in folder().iterdir() if each.is_dir() and _BESIDE not in each.name]
    return [Checkpoint(unquote(each)) for each in sorted(found)]


# ---------------------------------------------------------------------------------------------------------------- files


def _last(log: Path) -> int | None:
    try:
        names = os.listdir(log)
    except FileNotFoundError:
        return None
    return max((int(each) for each in names if each.isdecimal()), default=None)


def _entry(file: Path) -> tuple[datetime | None, tuple[Any, ...]]:
    """When a batch was begun, and how far it reaches in each source."""
    try:
        _, about, *lines = file.read_text(encoding="utf-8").splitlines()
        began = json.loads(about).get("batchTimestampMs")
    except (OSError, ValueError) as error:
        raise StorageError(f"Spark's log cannot be read at {file}: {error}.", hint=_ANEW) from None
    moment = datetime.fromtimestamp(began / 1000, UTC) if began else None
    return moment, tuple(_offset(each) for each in lines)


def _offset(line: str) -> Any:
    """What a source calls its place; of our own streams the offset alone."""
    if line == "-":
        return None  # the batch has nothing of this source, nor had those before it
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return found["offset"] if isinstance(found, dict) and set(found) == {"offset"} else found


def _line(place: Any) -> str:
    """A place as Spark's log has it."""
    if place is None:
        return "-"
    return json.dumps({"offset": place} if type(place) is int else place, separators=(",", ":"))
