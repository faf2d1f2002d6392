"""The dependencies between pipelines."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.errors import CycleError, NotFoundError, unknown

if TYPE_CHECKING:
    from weft.pipelines.declare import Pipeline


def refuse_cycles(pipelines: Mapping[str, Pipeline]) -> None:
    """Raise where pipelines wait for each other in a ring, naming it."""
    try:
        graphlib.TopologicalSorter({name: each.depends_on for name, each in pipelines.items()}).prepare()
    except graphlib.CycleError as error:
        # Each of these waits for the next one, and the last for the first.
        names = error.args[1][:0:-1]
        first = min(names, key=list(pipelines).index)
        start = names.index(first)
        ring = (*names[start:], *names[:start], first)
        what, hint = "Pipelines wait", "Remove one of these from depends_on."
        if all(hasattr(pipelines[each], "materialise") for each in ring):
            what, hint = "Models wait", "Remove one of these inputs. A model reads its own last result as this."
        raise CycleError(f"{what} for each other in a ring: {' → '.join(ring)}.", ring=ring, hint=hint) from None


def refuse_unknown_dependencies(pipelines: Mapping[str, Pipeline]) -> None:
    """Raise where a pipeline depends on one that is not declared."""
    for each in pipelines.values():
        for name in each.depends_on:
            if name not in pipelines:
                raise NotFoundError(
                    f"Pipeline {each.name!r} ({each.declared_at}) depends on {name!r}, which is not declared.",
                    hint=unknown("pipeline", name, pipelines).hint,
                )


def in_order(pipelines: Mapping[str, Pipeline]) -> list[Pipeline]:
    """Return all of them, each after those that it waits for, otherwise in the order in which they were declared."""
    ordered: dict[str, Pipeline] = {}
    for start in pipelines:
        waiting = [start]
        while waiting:
            name = waiting[-1]
            missing = [each for each in pipelines[name].depends_on if each in pipelines and each not in ordered]
            if missing:
                waiting += reversed(missing)
            else:
                ordered.setdefault(waiting.pop(), pipelines[name])
    return list(ordered.values())
