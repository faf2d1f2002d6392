"""Which pipeline waits for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.errors import CycleError, unknown

if TYPE_CHECKING:
    from weft.pipelines.declare import Pipeline


def refuse_rings(pipelines: Mapping[str, Pipeline]) -> None:
    """Raise where pipelines wait for each other in a ring, naming it."""
    done: set[str] = set()
    for start in pipelines:
        path: list[str] = []
        # A stack of what is still to look at, not recursion: a chain may be longer than Python's stack.
        waiting = [iter((start,))]
        while waiting:
            name = next(waiting[-1], None)
            if name is None:
                waiting.pop()
                if path:
                    done.add(path.pop())
            elif name in path:
                ring = [*path[path.index(name) :], name]
                raise CycleError(
                    f"Pipelines wait for each other in a ring: {' → '.join(ring)}.",
                    ring=tuple(ring),
                    hint="Remove one of these from depends_on.",
                )
            elif name not in done and name in pipelines:
                path.append(name)
                waiting.append(iter(pipelines[name].depends_on))


def refuse_unknown(pipelines: Mapping[str, Pipeline]) -> None:
    """Raise where a pipeline waits for one that nobody declared."""
    for each in pipelines.values():
        for name in each.depends_on:
            if name not in pipelines:
                error = unknown("pipeline", name, pipelines)
                error.what = f"Pipeline {each.name!r} ({each.place}) depends on {name!r}, which is not declared."
                error.args = (f"{error.what}\n  {error.hint}",)
                raise error


def in_order(pipelines: Mapping[str, Pipeline]) -> list[Pipeline]:
    """All of them, each after those that it waits for, otherwise in the order in which they were declared."""
    found: dict[str, Pipeline] = {}
    for start in pipelines:
        waiting = [start]
        while waiting:
            name = waiting[-1]
            missing = [each for each in pipelines[name].depends_on if each in pipelines and each not in found]
            if missing:
                waiting += reversed(missing)
            else:
                found.setdefault(waiting.pop(), pipelines[name])
    return list(found.values())
