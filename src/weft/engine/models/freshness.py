"""Which models are stale: what each has read, compared with what its inputs have now. No message can be lost, because
there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.engine.models.inputs import Observer
from weft.engine.models.state import Marks, State
from weft.errors import WeftError
from weft.pipelines.models import Model


@dataclass(frozen=True)
class Freshness:
    """Whether a model is fresh against its inputs, and why not."""

    model: Model
    why: str | None = None
    """Why it is to be built; `None` where it is fresh."""
    marks: Marks = field(default_factory=dict)
    """What its inputs have now."""
    problem: WeftError | None = None
    """What kept its inputs from being looked at: a build would fail by it too."""


def freshness_of(models: Iterable[Model], observer: Observer) -> list[Freshness]:
    """Return the freshness of models, each by its own database."""
    with observer.remembering():
        return [_freshness_of(each, observer) for each in models]


def _freshness_of(model: Model, observer: Observer) -> Freshness:
    try:
        last, marks = observer.state(model), observer.marks(model)
        why = rebuild(model, last, has_table=last is None or observer.has_table(model))
    except WeftError as error:
        return Freshness(model, error.what, problem=error)
    if why is None and last is not None and model.materialise != "view":
        reasons = (news(name, mark, last.inputs.get(name)) for name, mark in marks.items())
        why = "; ".join(each for each in reasons if each is not None) or None
    return Freshness(model, why, marks)


def rebuild(model: Model, last: State | None, *, has_table: bool) -> str | None:
    """Say why a model is to be built, whatever its inputs have; `None` where that depends on them."""
    if last is None:
        return "never built"
    if not has_table:
        return "its table is gone"
    if last.materialise != model.materialise:
        return f"was a {last.materialise}" if last.materialise else "was being replaced"
    return "its code has changed" if last.fingerprint != model.fingerprint and not model.is_incremental else None


def news(name: str, now: Marks | None, read: Marks | None) -> str | None:
    """Say what is new in an input since a build; `None` where nothing is, or it cannot be known."""
    # A cursor is how far the rows were read. It does not show that there are new ones.
    before = {} if read is None else {key: read[key] for key in now or () if key in read}
    # A stream that nobody had made yet had no identity.
    if now is None or (
        read is not None and before == {key: now[key] for key in now if key in before or key != "stream"}
    ):
        return None
    if before.get("stream", now.get("stream")) != now.get("stream"):
        return f"{name} was deleted and created again"
    if isinstance(upto := now.get("upto"), int):
        events = upto - int(before.get("upto") or 0)
        return f"{name} has {events:,} new event{'' if events == 1 else 's'}"
    return f"{name} was {'loaded' if 'loads' in now else 'built again'}"
