"""A run log in an object store: a document for each pipeline, which is replaced only as it was read.

    pipelines/NAME-HASH.json        who runs the pipeline, and its newest attempts
    archive/NAME-HASH/TIME.json     older attempts, a page an object; the newest page has the smallest name
    runs/RUN                        the name of the pipeline that a run is of

Every change is one replacement of one document: of two processes that decide at once, the slower one reads again. The
document has what most claims ask for: a claim takes four requests, and a page of runs about as many as it has rows.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from weft.errors import ConnectionFailedError
from weft.operate.records import CLOCK_ERROR, Attempt, PipelineState, Status
from weft.operate.run_store import Claim, LockedPipeline, RunStore, is_live
from weft.systems.object_stores.objects import Objects, StoredObject

T = TypeVar("T")

_KEPT, _PAGE = 60, 40
"""A document with more attempts than the first moves so many of the oldest to a page of the archive."""
_TRIES = 40
_AT_ONCE = 16
# If more pipelines are asked for, a listing shows which documents have changed.
_LISTED = 20
# The most by which the clock of a host, which names slots, may differ from that of the store.
_SKEW = timedelta(days=1)
_MOMENTS = 10**17


class Document(msgspec.Struct):
    """What the store has of a pipeline."""

    pipeline: str
    write: str = ""
    """Names the change that made it so: a put that failed on the way may have taken effect."""
    fence: int = 0
    run_id: str | None = None
    attempt: int | None = None
    owner: str | None = None
    expires_at: datetime | None = None
    slot_run_id: str | None = None
    slot_attempt: int | None = None
    skip_run_id: str | None = None
    failures: int = 0
    succeeded_at: datetime | None = None
    paused_at: datetime | None = None
    cancelled: str | None = None
    watched_at: datetime | None = None
    stale_at: datetime | None = None
    lease_seconds: float | None = None
    attempts: list[Attempt] = []
    """The newest ones, in the order in which they began."""
    is_archived: bool = False
    """Whether there may be older ones in the archive."""

    def find(self, run_id: str | None, attempt: int | None) -> Attempt | None:
        for each in reversed(self.attempts):
            if (each.run_id, each.attempt) == (run_id, attempt):
                return each
        return None


_FIELDS = dict.fromkeys(Attempt.__slots__)


class RunObjects(RunStore):
    """The records of a run log as objects."""

    def __init__(self, objects: Objects) -> None:
        self._objects, self.shown = objects, objects.shown
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weft run log")
        self._known: dict[str, tuple[str, Document]] = {}
        """Documents by their keys, as they were read, with their versions."""

    def secrets(self) -> Collection[str]:
        return ()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Raise unless the store can be written."""
        self._objects.now()

    # ---------------------------------------------------------------------------------------------------------- changes

    def locked(self, pipeline: str, work: Callable[[LockedPipeline], T]) -> T:
        key = _key(pipeline)
        for number in range(_TRIES):
            stored = self._objects.get(key)
            document = Document(pipeline) if stored is None else _read(stored)
            # Stores have the time in whole seconds: what is recorded already was not later, but where the clock was set
            # back since.
            now = self._objects.now()
            recorded = (each.finished_at or each.started_at for each in document.attempts)
            records = _Records(self, document, max([now, *(each for each in recorded if each <= now + CLOCK_ERROR)]))
            result = work(records)
            if not records.is_changed:
                return result
            for run_id in records.begun:
                self._objects.overwrite(f"runs/{run_id}", pipeline.encode())
            self._archive(document)
            document.write = uuid4().hex
            failure = None
            try:
                if self._objects.put(key, msgspec.json.encode(document), None if stored is None else stored.version):
                    return result
            except ConnectionFailedError as error:
                failure = error
            after = self._objects.get(key)
            if after is not None and _read(after).write == document.write:
                return result
            if failure is not None:
                raise failure
            time.sleep(random.random() * min(2.0, 0.02 * 2**number))
        raise ConnectionFailedError(
            f"The records of {pipeline} in {self.shown} could not be changed: other processes change them all the time."
        )

    def _archive(self, document: Document) -> None:
        """Move the oldest attempts of a document to a page. They are in both where the document is not replaced."""
        if len(document.attempts) <= _KEPT:
            return
        needed = {document.run_id, document.slot_run_id, document.skip_run_id}
        old = [each for each in document.attempts if each.run_id not in needed][:_PAGE]
        if not old:
            return
        moved = {(each.run_id, each.attempt) for each in old}
        self._objects.overwrite(_page_key(document.pipeline, old), msgspec.json.encode(old))
        document.attempts = [each for each in document.attempts if (each.run_id, each.attempt) not in moved]
        document.is_archived = True

    def forget(self, pipeline: str, keep: int) -> None:
        newest = self.runs(pipeline, None, None, keep + 1)
        if len(newest) <= keep:
            return
        since = newest[-2].started_at
        seen: set[str] = set()
        left: set[str] = set()

        def staying(attempts: list[Attempt]) -> list[Attempt]:
            kept = [
                each
                for each in attempts
                if each.started_at >= since or each.status != "succeeded" or each.slot is not None
            ]
            seen.update(each.run_id for each in attempts)
            left.update(each.run_id for each in kept)
            return kept

        def remove(records: LockedPipeline) -> None:
            assert isinstance(records, _Records)
            records.keep(staying(records.document.attempts))

        self.locked(pipeline, remove)
        for listed in self._objects.listing(_pages_of(pipeline)):
            page = self._page(listed.key)
            kept = staying(page)
            if not kept:
                self._objects.delete(listed.key)
            elif len(kept) < len(page):
                self._objects.overwrite(listed.key, msgspec.json.encode(kept))
        list(self._pool.map(self._objects.delete, [f"runs/{run_id}" for run_id in seen - left]))

    # ---------------------------------------------------------------------------------------------------------- reading

    def latest(self, pipelines: Sequence[str] | None) -> list[PipelineState]:
        if pipelines is not None and len(pipelines) <= _LISTED:
            stored = self._pool.map(self._objects.get, map(_key, pipelines))
            documents = [_read(each) for each in stored if each is not None]
        else:
            documents = self._documents(None if pipelines is None else set(map(_key, pipelines)))
        now = self._objects.now() if documents else datetime.now(UTC)
        return [
            PipelineState(
                each.pipeline,
                each.find(each.run_id, each.attempt),
                each.find(each.slot_run_id, each.slot_attempt),
                each.find(each.skip_run_id, 0),
                each.succeeded_at,
                each.failures,
                is_live(each.owner, each.expires_at, now),
                each.paused_at,
                each.watched_at,
                each.stale_at,
                now,
                each.expires_at,
                each.owner,
            )
            for each in documents
        ]

    def _documents(self, keys: Collection[str] | None) -> list[Document]:
        """Return these documents, or all; those that have not changed are not read again."""
        versions = {
            each.key: each.version for each in self._objects.listing("pipelines/") if keys is None or each.key in keys
        }
        changed = [key for key, version in versions.items() if self._known.get(key, ("",))[0] != version]
        for key, stored in zip(changed, self._pool.map(self._objects.get, changed), strict=True):
            if stored is not None:
                # Not the version that was read: a listing of Azure writes the same one differently.
                self._known[key] = versions[key], _read(stored)
        return [self._known[key][1] for key in versions if key in self._known]

    def runs(self, pipeline: str | None, status: Status | None, since: datetime | None, limit: int) -> list[Attempt]:
        def wanted(attempts: Iterable[Attempt]) -> list[Attempt]:
            return [
                each
                for each in attempts
                if (status is None or each.status == status) and (since is None or each.started_at >= since)
            ]

        if pipeline is not None:
            by_key = _unique(self._attempts(pipeline, wanted, limit))
        else:
            by_key = {}
            listed = sorted(self._objects.listing("pipelines/"), key=lambda each: each.modified, reverse=True)
            for first in range(0, len(listed), _AT_ONCE):
                # The newest attempts are in the documents that changed last. Times of a listing are whole seconds.
                newest = sorted((each.started_at for each in by_key.values()), reverse=True)
                before = listed[first].modified + timedelta(seconds=1)
                if (len(newest) >= limit and newest[limit - 1] > before) or (since is not None and since > before):
                    break
                part = [each.key for each in listed[first : first + _AT_ONCE]]
                for stored in self._pool.map(self._objects.get, part):
                    if stored is not None:
                        by_key |= _unique(self._of(_read(stored), wanted, limit))
        ordered = sorted(by_key.values(), key=lambda each: (each.run_id, -each.attempt))
        return sorted(ordered, key=lambda each: each.started_at, reverse=True)[:limit]

    def _attempts(
        self, pipeline: str, wanted: Callable[[Iterable[Attempt]], list[Attempt]], limit: int
    ) -> Iterator[Attempt]:
        stored = self._objects.get(_key(pipeline))
        if stored is not None:
            yield from self._of(_read(stored), wanted, limit)

    def _of(
        self, document: Document, wanted: Callable[[Iterable[Attempt]], list[Attempt]], limit: int
    ) -> Iterator[Attempt]:
        """Yield the attempts of a document, and of as many pages of its archive as are needed."""
        first = wanted(document.attempts)
        yield from first
        if len(first) >= limit or not document.is_archived:
            return
        count = len(first)
        for listed in self._objects.listing(_pages_of(document.pipeline)):
            if count >= limit:
                return
            part = wanted(self._page(listed.key))
            count += len(part)
            yield from part

    def run(self, run_id: str) -> list[Attempt]:
        pointer = self._objects.get(f"runs/{run_id}") if re.fullmatch(r"[0-9a-f]{1,64}", run_id) else None
        stored = None if pointer is None else self._objects.get(_key(pointer.data.decode()))
        return [] if stored is None else self.attempts_at(_read(stored), run_id, None)

    def attempts_at(self, document: Document, run_id: str, since: datetime | None) -> list[Attempt]:
        """Return all attempts at a run, the first of which began not long before a moment where one is given."""
        attempts = [each for each in document.attempts if each.run_id == run_id]
        is_whole = bool(attempts) and attempts[0].attempt <= 1
        # One that never began is in no page.
        if not is_whole and document.is_archived and self._objects.get(f"runs/{run_id}") is not None:
            for listed in self._objects.listing(_pages_of(document.pipeline)):
                if since is not None and _newest_of(listed.key) < since - _SKEW:
                    break
                part = [each for each in self._page(listed.key) if each.run_id == run_id]
                attempts += part
                if any(each.attempt <= 1 for each in part):
                    break
        return sorted(_unique(attempts).values(), key=lambda each: each.attempt)

    def _page(self, key: str) -> list[Attempt]:
        stored = self._objects.get(key)
        return [] if stored is None else msgspec.json.decode(stored.data, type=list[Attempt])


class _Records(LockedPipeline):
    """A document in the hands of one process. The change counts when the store takes it."""

    def __init__(self, store: RunObjects, document: Document, now: datetime) -> None:
        self._store, self.document = store, document
        self.claim = Claim(
            document.pipeline,
            document.fence,
            document.run_id,
            document.attempt,
            document.owner,
            document.expires_at,
            document.failures,
            now,
            document.paused_at,
            document.cancelled,
            document.watched_at,
            document.stale_at,
            document.lease_seconds,
        )
        self.begun: list[str] = []
        self.is_changed = False

    def attempts_at(self, run_id: str, since: datetime | None = None) -> list[Attempt]:
        return self._store.attempts_at(self.document, run_id, since)

    def add(self, values: Mapping[str, Any]) -> None:
        attempt = Attempt(**{**_FIELDS, **values})
        self.document.attempts.append(attempt)
        if attempt.attempt <= 1:
            self.begun.append(attempt.run_id)
        self.is_changed = True

    def end(self, run_id: str, attempt: int, values: Mapping[str, Any], was: Status = "running") -> None:
        metrics = values.get("metrics")
        plain = dict(values) if metrics is None else {**values, "metrics": json.loads(json.dumps(metrics, default=str))}
        for at, each in enumerate(self.document.attempts):
            if (each.run_id, each.attempt, each.status) == (run_id, attempt, was):
                self.document.attempts[at] = replace(each, **plain)
        self.is_changed = True

    def change(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.document, name, value)
        self.is_changed = True

    def keep(self, attempts: list[Attempt]) -> None:
        """Keep these attempts alone."""
        self.document.attempts, self.is_changed = attempts, True


def _read(stored: StoredObject) -> Document:
    return msgspec.json.decode(stored.data, type=Document)


def _unique(attempts: Iterable[Attempt]) -> dict[tuple[str, int], Attempt]:
    """Return attempts by run and number: what was moved to a page may be in the document too."""
    by_key: dict[tuple[str, int], Attempt] = {}
    for each in attempts:
        by_key.setdefault((each.run_id, each.attempt), each)
    return by_key


def _name(pipeline: str) -> str:
    """Return a name for objects of a pipeline: one that people can read, and that no other pipeline has."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", pipeline)[:60]
    return f"{readable}-{blake2b(pipeline.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _key(pipeline: str) -> str:
    return f"pipelines/{_name(pipeline)}.json"


def _pages_of(pipeline: str) -> str:
    return f"archive/{_name(pipeline)}/"


def _page_key(pipeline: str, attempts: Sequence[Attempt]) -> str:
    newest = max(each.started_at for each in attempts)
    return f"{_pages_of(pipeline)}{_MOMENTS - int(newest.timestamp() * 1e6):018d}.json"


def _newest_of(key: str) -> datetime:
    moment = _MOMENTS - int(key.rpartition("/")[2].removesuffix(".json"))
    return datetime.fromtimestamp(moment / 1e6, UTC)
