"""Users test their models on sample rows, in code and by `weft test`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import weft
from weft.cli import cli
from weft.project import Project, use
from weft.testing import assert_rows, build
from workers import declare_model as declare


@pytest.fixture(autouse=True)
def shop() -> Iterator[None]:
    with use(Project()) as made:
        weft.register_connection(weft.PostgresConnection(url="postgres://127.0.0.1:1/none", name="warehouse"))

        @weft.stream(fields={"id": "int64", "city": "string", "total": "float64", "at": "timestamp?"})
        def orders() -> None:
            pass

        @weft.model(connection="warehouse")
        def by_city(orders: Any) -> Any:
            return orders.group_by("city").aggregate(revenue=orders.total.sum(), last=orders["at"].max())

        yield
        weft.streams.close(made)


OSLO = {"id": 1, "city": "Oslo", "total": 2.0, "at": datetime(2026, 1, 1, tzinfo=UTC)}


def test_build_of_a_stream() -> None:
    rows = build("by_city", orders=[OSLO, {**OSLO, "id": 2, "total": 0.1}])
    assert rows == [{"city": "Oslo", "revenue": 2.1, "last": OSLO["at"]}]
    # Each begins with nothing, and leaves nothing: neither here nor in the project.
    assert build("by_city") == []
    assert not Path(".weft").exists()


def test_build_of_models_and_tables() -> None:
    named = declare(
        "named",
        "-- materialise: merge\n-- key: country\nSELECT c.country, sum(revenue) AS revenue FROM warehouse.by_city "
        "JOIN lake.geo.cities c USING (city) GROUP BY 1",
    )
    cities = [{"city": "Oslo", "country": "Norway"}, {"city": "Bergen", "country": "Norway"}]
    revenue = [{"city": "Oslo", "revenue": 1.5}, {"city": "Bergen", "revenue": 2.0}]
    rows = build(named, {"warehouse.by_city": revenue}, lake_geo_cities=cities)
    assert rows == [{"country": "Norway", "revenue": 3.5}]
    with pytest.raises(weft.DeclarationError, match=r"warehouse\.by_city of named needs at least one row"):
        build(named)
    with pytest.raises(weft.NotFoundError, match="citys"):
        build(named, citys=cities)


def test_last_result() -> None:
    added = declare(
        "added",
        "-- materialise: merge\n-- key: city\nSELECT o.city, coalesce(t.n, 0) + count(*) AS n FROM orders o "
        "LEFT JOIN this t USING (city) GROUP BY o.city, t.n",
    )
    assert build(added, orders=[OSLO]) == [{"city": "Oslo", "n": 1}]
    rows = build(added, orders=[OSLO], this=[{"city": "Oslo", "n": 4}, {"city": "Rome", "n": 1}])
    assert rows == [{"city": "Oslo", "n": 5}, {"city": "Rome", "n": 1}]


def test_a_pipeline_is_no_model() -> None:
    @weft.pipeline(target="copies")
    def copied() -> str:
        return "SELECT 1"

    with pytest.raises(weft.DeclarationError, match="run_pipeline"):
        build(copied)  # type: ignore[arg-type]


def test_rows_are_compared() -> None:
    rows = [{"a": 1, "b": 0.1 + 0.2, "c": None}, {"a": 2, "b": 1.0, "c": date(2026, 1, 1)}]
    assert_rows(rows, [{"a": 2}, {"a": 1}])
    assert_rows(rows, [{"b": 0.3}, {"b": 1, "c": "2026-01-01"}])
    assert_rows([{"d": Decimal("2.50"), "t": OSLO["at"]}], [{"d": "2.50", "t": "2026-01-01T00:00:00Z"}])
    assert_rows([{"d": Decimal("2.50")}], [{"d": 2.5}])
    assert_rows([], [])
    with pytest.raises(AssertionError) as caught:
        assert_rows(rows, [{"a": 1, "c": None}, {"a": 3, "x": 1}])
    assert str(caught.value).splitlines() == [
        "The rows differ (- expected, + found):",
        "- a=3, c=None, x=1",
        "+ a=2, c='2026-01-01', x=None",
        "There is no column 'x': there are a, b, c.",
    ]
    with pytest.raises(AssertionError, match=r"\+ a=1, b="):
        assert_rows(rows[:1], [])


# ------------------------------------------------------------------------------------------------------------ weft test


@pytest.fixture
def call() -> Callable[..., Any]:
    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(cli, ["test", *arguments], prog_name="weft")
        assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
        return done

    return run


CASE = """model = "by_city"
name = "a sum"
[[inputs.orders]]
id = 1
city = "Oslo"
total = 2
at = 2026-01-01T00:00:00Z
[[inputs.orders]]
id = 2
city = "Oslo"
total = 0.5
[[expected]]
city = "Oslo"
revenue = 2.5
last = 2026-01-01T00:00:00Z
"""


def test_cases_of_files(call: Callable[..., Any]) -> None:
    folder = Path("tests/models")
    folder.mkdir(parents=True)
    (folder / "one.toml").write_text(CASE)
    case = {"model": "by_city", "inputs": {"orders": [{**OSLO, "at": "2026-01-01T00:00:00Z"}]}}
    good = {**case, "expected": [{"city": "Oslo", "last": "2026-01-01T00:00:00Z"}]}
    (folder / "two.json").write_text(json.dumps([good, {**good, "expected": []}]))
    done = call(code=1).stdout.splitlines()
    assert done[:2] == ["ok by_city: a sum (tests/models/one.toml)", "ok by_city (tests/models/two.json)"]
    assert done[2] == "failed by_city (tests/models/two.json)"
    assert done[3].startswith("  + city='Oslo', revenue=2.0")
    assert done[-1] == "3 cases, 1 failed"
    assert call("tests/models/one.toml").stdout.endswith("1 case, 0 failed\n")
    found = json.loads(call("--format", "json", code=1).stdout)
    assert [each["status"] for each in found] == ["ok", "ok", "failed"]


def test_files_that_are_wrong(call: Callable[..., Any]) -> None:
    assert "There is no tests/models." in call(code=1).stderr
    file = Path("case.toml")
    file.write_text(CASE.replace("expected", "expect"))
    assert "a case has a model, its inputs and the rows that are expected" in call("case.toml", code=1).stderr
    file.write_text(f"inputz = 1\n{CASE}")
    assert "Did you mean 'inputs'?" in call("case.toml", code=1).stderr
    file.write_text(CASE.replace("inputs.orders", "inputs.order"))
    done = call("case.toml", code=1).stdout
    assert done.startswith("error by_city: a sum (case.toml)\n") and "Did you mean 'orders'?" in done
    file.write_text(CASE.replace("by_city", "by_town"))
    assert "by_town" in call("case.toml", code=1).stderr


def test_events_say_when_they_were_published() -> None:
    @weft.stream(fields={"total": "float64"})
    def payments() -> None:
        pass

    @weft.model
    def daily(payments):  # type: ignore[no-untyped-def]
        days = payments.mutate(day=payments._weft_published_at.cast("date"))
        return days.group_by("day").aggregate(total=days.total.sum())

    late = datetime(2026, 3, 2, 1, tzinfo=timezone(timedelta(hours=2)))
    rows = [
        {"total": 1.0, "_weft_published_at": "2026-03-02T08:00:00Z"},
        {"total": 2.0, "_weft_published_at": late},
        {"total": 4.0},
        {"total": 8.0, "_weft_published_at": datetime(2026, 3, 2, 23, 59)},
    ]
    weft.testing.assert_rows(
        weft.testing.build(daily, payments=rows),
        [
            {"day": date(2026, 1, 1), "total": 4.0},
            {"day": date(2026, 3, 1), "total": 2.0},
            {"day": date(2026, 3, 2), "total": 9.0},
        ],
    )
