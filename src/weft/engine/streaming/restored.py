"""A checkpoint and targets that are of different times, because one of them was restored from a backup, or a database
lost its last commits when another server took over: found before the first batch."""

from __future__ import annotations

import json

from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.checkpoint_files import Written
from weft.engine.streaming.sources import show_position
from weft.engine.streaming.targets import Targets, place_of
from weft.errors import LoadRefusedError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current


def refuse_restored(
    pipeline: StreamingPipeline, targets: Targets, written: Written, batch: BatchId, checkpoint: str
) -> None:
    """Refuse a batch whose number a target has with other rows, or which comes before what a target has: it would count
    as done. Refuse a batch before which a target lacks one that the checkpoint has finished: nobody would add it."""
    if batch.positions is None:
        return
    connections = [each.connection_with_options(current().connection(each.connection)) for each in pipeline.targets]
    places = [place_of(*each) for each in zip(pipeline.targets, connections, strict=True)]
    loaded = -1
    # Of changes for several tables each has the batches with changes for it. Of a step the state has every batch, and
    # the targets have those that emit rows.
    if pipeline.step is None and not pipeline.is_routed:
        written.keep(places, batch)
        loaded = written.last_loaded(batch)
    for target, connection, place in zip(pipeline.targets, connections, places, strict=True):
        last = targets.last_batch(target, batch)
        if last is None:
            continue
        number, positions = last
        what, rewind = f"target {target.name} of {connection.label}", f"weft checkpoints rewind {pipeline.name}"
        has_others = number == batch.number and positions not in (None, batch.positions)  # an older version noted none
        if number > batch.number or has_others:
            raise LoadRefusedError(
                f"The checkpoint of {pipeline.name} is older than its {what}: that has batch {number}"
                f"{_reach(pipeline, positions)}, and the checkpoint planned batch {batch.number}"
                f"{_reach(pipeline, batch.positions)}. Taken as done, its new rows would be lost.",
                hint=f"Restore the newer checkpoint to {checkpoint}. Without one, have the rows since read again: "
                f"{rewind if pipeline.step is None else f'weft checkpoints reset {pipeline.name}'}. In the mode append "
                "remove them from the table first, else they are there twice.",
            )
        # A ledger without any batch may be that of a pipeline that was renamed, or went with its table.
        is_known = written.has(place) if number >= 0 else written.has_ledger(place, pipeline.name)
        if number < loaded and is_known:
            has = "no batch" if number < 0 else f"the last batch {number}{_reach(pipeline, positions)}"
            raise LoadRefusedError(
                f"The {what} is older than the checkpoint of {pipeline.name}: the target has {has}, and the checkpoint "
                f"has finished batch {loaded}. The rows between them would be missing.",
                hint=f"Restore the newer target. Without one, have the rows since read again: {rewind}. Targets with "
                "the mode append that have these rows get them twice: remove them there first.",
            )


def _reach(pipeline: StreamingPipeline, positions: str | None) -> str:
    """Return in words how far a batch reaches."""
    if positions is None or not positions.startswith("["):
        return "" if positions is None else f" ({positions})"
    ends = zip(pipeline.sources, json.loads(positions), strict=False)
    return f" up to {', '.join(f'{each.name} {show_position(end, source=each)}' for each, end in ends)}"
