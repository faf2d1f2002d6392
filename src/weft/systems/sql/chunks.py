"""A range read in chunks by threads, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

# How large events are is not known before some are read.
_FIRST_CHUNK = 256
_MAX_CHUNK = 131_072

Read = Callable[[int, int], tuple[list[pa.RecordBatch], int]]
"""Reads `after < offset <= upto`: the batches, and how many bytes the database sent for them."""


def in_order(read: Read, after: int, upto: int, *, workers: int, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """Read the batches of a range. A chunk grows and shrinks with its rows, so that each takes about `chunk_bytes`."""
    size = _FIRST_CHUNK
    waiting: deque[Future[tuple[list[pa.RecordBatch], int]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="weft-arrow") as pool:
        while waiting or after < upto:
            while after < upto and len(waiting) <= workers:
                end = min(after + size, upto)
                waiting.append(pool.submit(read, after, end))
                after = end
            done, sent = waiting.popleft().result()
            rows = sum(batch.num_rows for batch in done)
            if rows:
                size = max(1, min(_MAX_CHUNK, size * 4, chunk_bytes * rows // max(sent, 1)))
            yield from done
