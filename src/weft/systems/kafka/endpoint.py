"""Topics as sources, targets and dead letters of streaming pipelines."""

from __future__ import annotations

from typing import ClassVar

from weft.systems.endpoint import Endpoint


class KafkaEndpoint(Endpoint):
    """A topic. A source may start at an offset of each partition: `0:120,1:95`."""

    is_source = True
    start_forms: ClassVar = {**Endpoint.start_forms, r"\d+:\d+(,\d+:\d+)*": "offsets of partitions, which Kafka has"}
    places = ("stream",)
    dead_letters = ("topic",)
