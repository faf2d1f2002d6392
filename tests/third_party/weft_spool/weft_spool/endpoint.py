"""What pipelines can name on a spool. It is imported while pipelines are declared, so it imports no Spark."""

from __future__ import annotations

from weft.systems.endpoint import Endpoint


class SpoolEndpoint(Endpoint):
    """A queue is a source, the `stream` of a target, and the `dead_letter_topic` of a pipeline."""

    is_source = True
    places = ("stream",)
    dead_letters = ("topic",)
