"""Delta tables as sources, targets and dead letters of streaming pipelines."""

from __future__ import annotations

from weft.systems.endpoint import Endpoint


class DeltaEndpoint(Endpoint):
    """A table of a folder or bucket. A source may start at a version."""

    is_source = True
    limit = "max_files"
    places = ("table",)
    prefix_is_table = True
    dead_letters = ("table",)
