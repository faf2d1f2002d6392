"""Builds models in tests, and reads what they wrote."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from weft.engine.models.build import ModelRun
from weft.engine.models.freshness import freshness_of
from weft.engine.models.inputs import Observer
from weft.engine.readers import open_tables
from weft.pipelines.execution import Loaded
from weft.pipelines.models import Model
from weft.project import current

ORDERS = [{"order_id": "a", "total": 12.5}, {"order_id": "b", "total": 7.5}]


def build(
    model: Model, *, full: bool = False, key: str | None = None, meanwhile: Callable[[], Any] = lambda: None
) -> Loaded:
    """Build a model once, as a run does. `meanwhile` is called before its result is loaded."""
    run = ModelRun(model, key or uuid4().hex[:24], datetime.now(UTC), full=full, keep=meanwhile)
    run.execute()
    (loaded,) = run.loaded
    return loaded


def query(sql: str) -> list[tuple[Any, ...]]:
    """What the default connection answers."""
    with closing(open_tables(current().connection())) as tables, tables.driver.session("read") as session:
        return [tuple(row) for row in session.rows(sql)]


def run(statement: str) -> None:
    """Change something on the default connection."""
    with closing(open_tables(current().connection())) as tables, tables.driver.session("publish") as session:
        session.run(statement)


def why(model: Model) -> str | None:
    """Why a model is stale."""
    with Observer() as observer:
        return freshness_of([model], observer)[0].why
