"""Models in `weft validate`, `preview`, `list` and `status`, and what is expected of their rows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import weft
from weft.engine.models.build import ModelRun
from weft.engine.preview import Preview, preview
from weft.engine.validate import validate
from weft.pipelines import model_files
from weft.pipelines.models import Model, models
from weft.project import Project
from weft.testing import table_rows


@pytest.fixture(autouse=True)
def orders(streams: Project) -> None:
    @weft.stream(fields={"id": "int64", "city": "string"})
    def orders() -> None:
        pass

    publish(1, "Oslo")


def publish(number: int, city: str | None) -> None:
    weft.publish_sync("orders", {"id": number, "city": city} if city else {"id": number})


def declare(text: str, name: str = "cities") -> Model:
    file = Path(f"{name}.sql")
    file.write_text(text)
    return model_files.declare(file)


def build(model: Model) -> None:
    ModelRun(model, f"test {uuid4()}", datetime.now(UTC)).execute()


def look(model: Model, **options: Any) -> Preview:
    return preview(model, model.target, datetime.now(UTC), **options)


def checks(model: Model) -> dict[str, str]:
    return {each.check: each.problem or each.detail for each in validate(model)}


@pytest.mark.parametrize("header", ["", "-- materialise: merge\n-- key: id\n", "-- materialise: incremental\n"])
def test_failed_expectation_keeps_the_old_rows(header: str) -> None:
    model = declare(f'{header}-- expectations: not_null("city")\nSELECT id, city FROM orders')
    build(model)
    publish(2, None)
    assert "not_null" in str(look(model).refused)
    for _ in range(2):
        with pytest.raises(weft.WeftError, match="not_null"):
            build(model)
    assert table_rows("cities") == [{"id": 1, "city": "Oslo"}]
    # With another table that replaces it too.
    model = declare(f'{header}-- expectations: not_null("city")\nSELECT id, city, 1 AS one FROM orders')
    with pytest.raises(weft.WeftError, match="not_null"):
        ModelRun(model, f"test {uuid4()}", datetime.now(UTC), full=True).execute()
    assert table_rows("cities") == [{"id": 1, "city": "Oslo"}]


def test_preview_changes_nothing() -> None:
    model = declare("-- materialise: merge\n-- key: id\nSELECT id, city FROM events.orders")
    found = look(model)
    assert found.counts is not None and found.sample is not None
    assert (found.engine, found.mode, found.counts.inserted) == ("pushdown", "merge", 1)
    assert found.creates is not None and found.sample.to_pylist() == [{"id": 1, "city": "Oslo"}]
    build(model)
    assert look(model).engine == "none"
    publish(1, "Rome")
    again = look(model)
    assert again.counts is not None and (again.counts.rows_read, again.counts.updated) == (1, 1)
    assert table_rows("cities") == [{"id": 1, "city": "Oslo"}]
    table = declare("SELECT id FROM orders", "plain")
    build(table)
    assert (found := look(table)).counts is not None and found.counts.rows_read == 2
    # Other columns come in a new table.
    assert "city" in str(look(declare("SELECT id, city FROM orders", "plain")).creates)
    assert table_rows("plain") == [{"id": 1}, {"id": 1}]
    view = look(declare("-- materialise: view\nSELECT id FROM plain", "seen"))
    assert view.sample is not None and view.sample.num_rows == 2 and view.creates == "CREATE VIEW seen"


def test_validate() -> None:
    model = declare("SELECT id, city FROM orders")
    above = declare("SELECT * FROM cities", "above")
    found = checks(model)
    assert list(found) == ["upstream", "target", "input orders", "build cities"]
    assert found["input orders"].startswith("stream with 5 columns")
    assert found["build cities"] == "table by pushdown; creates the table; exactly once"
    # What it reads is not built yet, but will be.
    assert checks(above)["build above"] == found["build cities"]
    assert "no_such" in checks(declare("SELECT no_such FROM orders", "bad"))["build bad"]
    missing = checks(declare("SELECT * FROM ordrs", "gone"))
    assert "There is no table ordrs" in missing["input ordrs"]
    build(model)
    assert "the table is there" in checks(model)["build cities"]
    assert set(models()) == {"cities", "above", "bad", "gone"}
