"""Which dead letters somebody means, how many there are by error, and their removal: for `weft dlq` and the service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.replay import alone, chosen
from weft.errors import DeclarationError, NotFoundError, did_you_mean
from weft.systems.dead_letter_store import STAGES, StoredLetter, digest

Wanted = Callable[[StoredLetter], bool]
# Enough of an id to distinguish letters, and short enough to be typed.
SHORT_ID = 12
_NAMED = 5
_PURGED = 1000
_ERROR, _PAYLOAD = 300, 2000
_SAMPLES = 1000


def passing(
    error: str | None = None, stage: str | None = None, before: datetime | None = None, group: str | None = None
) -> Wanted:
    """Return whether a letter has the text in its error, failed in the stage, before the time, and is of the group.
    Notes of replays never pass."""
    text, stages = (error or "").casefold(), (stage,) if stage else STAGES
    return lambda letter: (
        letter.stage in stages
        and text in letter.error.casefold()
        and (before is None or letter.failed_at < before)
        and (group is None or group_id(*_kind(letter)) == group)
    )


def _kind(letter: StoredLetter) -> tuple[str, str]:
    """Return what the letters of a group have in common: the stage, and the beginning of the error's first line."""
    return letter.stage, letter.error.strip().partition("\n")[0][:_ERROR]


def group_id(stage: str, error: str) -> str:
    """Return the name of a group: of the error as it is stored, because many errors may look alike without secrets."""
    return digest(f"{stage} {error}")


def named(box: DeadLetterBox, ids: Sequence[str]) -> dict[str, StoredLetter]:
    """Return the letters with these ids, of which the beginning is enough."""
    known: set[str] = set()

    def letters() -> Iterable[StoredLetter]:
        for each in box.letters():
            known.add(each.letter_id)
            yield each

    matches = chosen(ids, letters())
    for start, matching in matches.items():
        if not matching:
            starts = {each[: max(len(start), SHORT_ID)] for each in known}
            hint = did_you_mean(start, starts, f"weft dlq list {box.pipeline.name}")
            raise NotFoundError(f"{box.pipeline.name} has no dead letter {start!r}.", hint=hint)
        if len(matching) > 1:
            some = ", ".join(each.letter_id for each in matching[:_NAMED])
            raise DeclarationError(f"{len(matching)} dead letters begin with {start!r}.", hint=f"They are {some}.")
    return {start: matching[0] for start, matching in matches.items()}


def wanted(
    box: DeadLetterBox,
    ids: Sequence[str] = (),
    error: str | None = None,
    stage: str | None = None,
    before: datetime | None = None,
    group: str | None = None,
) -> Wanted:
    """Return the filter for the letters with these ids; without ids for those that pass, which without a filter are
    all."""
    if ids:
        letter_ids = {each.letter_id for each in named(box, ids).values()}
        return lambda letter: letter.letter_id in letter_ids
    return passing(error, stage, before, group)


def purge(box: DeadLetterBox, letter_ids: Sequence[str]) -> None:
    """Remove letters. Nobody else of this machine replays or removes some meanwhile."""
    with alone(box.pipeline):
        for first in range(0, len(letter_ids), _PURGED):
            box.remove(letter_ids[first : first + _PURGED])


@dataclass
class LetterGroup:
    """Letters that failed in one stage with one error."""

    stage: str
    error: str
    """The beginning of its first line."""
    count: int
    newest: StoredLetter
    """With the beginning of its payload."""

    @property
    def group_id(self) -> str:
        """What chooses these letters and no others."""
        return group_id(self.stage, self.error)


@dataclass
class Summary:
    """Letters by their errors."""

    count: int = 0
    more: bool = False
    """Whether there are more than were looked at."""
    newest: datetime | None = None
    """When the newest failed."""
    groups: list[LetterGroup] = field(default_factory=list)
    """The commonest first."""


def summary(letters: Iterable[StoredLetter], passes: Wanted | None = None, most: int | None = None) -> Summary:
    """Group the letters that pass by stage and error; at most so many are looked at."""
    counts: Counter[tuple[str, str]] = Counter()
    samples: dict[tuple[str, str], StoredLetter] = {}
    total, matching = Summary(), filter(passes or passing(), letters)
    for letter in islice(matching, most):
        group = _kind(letter)
        counts[group] += 1
        total.newest = max(total.newest or letter.failed_at, letter.failed_at)
        if group not in samples or letter.failed_at > samples[group].failed_at:
            samples[group] = replace(letter, payload=letter.payload[:_PAYLOAD])
            if len(samples) > 2 * _SAMPLES:  # each letter may have an error of its own, and all do not fit into memory
                samples = {each: samples[each] for each, _ in counts.most_common(_SAMPLES) if each in samples}
    total.count, total.more = counts.total(), next(matching, None) is not None
    total.groups = [LetterGroup(*each, count, samples[each]) for each, count in counts.most_common() if each in samples]
    return total
