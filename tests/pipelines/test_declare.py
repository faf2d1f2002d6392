"""`@pipeline`: what is wrong is said where it is written, with the nearest name."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

import weft
from documents import ROOT
from weft import CycleError, DeclarationError, NotFoundError
from weft.pipelines import graph
from weft.pipelines.declare import OPTIONS
from weft.project import Project

pytestmark = pytest.mark.usefixtures("local")


def sql() -> str:
    return "SELECT 1 AS id"


def test_the_docs_name_every_option() -> None:
    guide = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
    assert [name for name in OPTIONS if f"`{name}`" not in guide] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs target or targets, not neither"),
        ({"target": "a", "targets": ["b"]}, "needs target or targets, not both"),
        ({"targets": []}, "targets is empty"),
        ({"targets": ["a", "a"]}, "the target a is listed twice"),
        ({"target": "a", "shedule": "* * * * *"}, r"no option 'shedule'\.\n  Did you mean 'schedule'"),
        ({"target": "a", "mode": "upsert"}, "no mode 'upsert'"),
        ({"target": "a", "mode": "merge"}, r"needs keys[\s\S]*pk\(\)"),
        ({"target": "a", "mode": "append", "keys": ["id"]}, "takes no keys"),
        ({"target": "a", "mode": "merge", "keys": ["id"], "handle_deletes": "soft"}, "cannot handle deletes"),
        (
            {"target": "a", "retry": {"max_atempts": 3}},
            r"retry has no option 'max_atempts'\.\n  Did you mean 'max_attempts'",
        ),
        ({"target": "a", "retry": {"max_attempts": 3}}, "and there is no schedule"),
        ({"target": "a", "schedule": "61 * * * *"}, "minute '61'"),
        ({"target": "a", "schedule": "* * * * *", "timezone": "Europe/Berln"}, "Europe/Berlin"),
        ({"target": "a", "on_drift": "evolves"}, r"on_drift is 'evolves'\.\n  Did you mean 'evolve'"),
        ({"target": "a", "engine": "duckdb"}, "It can be 'spark', 'pushdown'"),
        ({"target": "a", "source_connection": "postgres://u:secret@h/d"}, r"(?!.*secret).*where a name is needed"),
        ({"target": "a", "depends_on": [1]}, "depends_on must be a list of texts"),
        ({"target": "a", "upstream_freshness_secs": 5}, "needs depends_on"),
        ({"target": "a", "freshness_sla": -1}, "seconds above 0"),
        ({"target": "a", "continue_on_failure": "yes"}, "must be True or False"),
        ({"target": "a", "count_late": 1}, "count_late must be True or False"),
        ({"target": "a", "name": ""}, "1 to 200 printable characters"),
        ({"target": "a", "transforms_pre": ["x > 1"]}, "filter_where"),
        ({"target": "a", "transforms_post": [1]}, "takes SQL and functions"),
        ({"target": "a", "column_map": ["a"]}, "column_map maps"),
        ({"target": "a", "lookback": "1 day"}, "lookback is a timedelta"),
        ({"target": "a", "mode": "merge", "keys": ["id"], "incremental_column": "id", "lookback": -3}, "-3 cannot be"),
        ({"target": "a", "mode": "merge", "keys": ["id"], "lookback": timedelta(hours=-1)}, "how far back a run reads"),
        ({"target": "a", "mode": "merge", "keys": ["id"], "lookback": math.nan}, "nan cannot be"),
        ({"target": "a", "mode": "scd2", "keys": ["id"], "ttl": 5, "ttl_seconds": 6}, "both ttl and ttl_seconds"),
        ({"target": "a", "mode": "truncate", "allow_empty": "no"}, "allow_empty must be True or False"),
        ({"target": 5}, "a target is a class under @weft.table"),
        ({"target": int}, "the class int is not a table"),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        weft.pipeline(**options)(sql)


def test_options_of_a_target() -> None:
    with pytest.raises(DeclarationError, match=r"target has no option 'moode'\.\n  Did you mean 'mode'"):
        weft.target("a", moode="append")


@pytest.mark.parametrize("function", [lambda a, b, c: "", lambda *, conn: ""])
def test_what_a_function_may_take(function: Any) -> None:
    with pytest.raises(DeclarationError, match="must take nothing, the source's connection, or those of source and"):
        weft.pipeline(target="a", name="f")(function)


def test_the_name_and_the_function_stay() -> None:
    @weft.pipeline(target="a")
    def copy() -> str:
        """What it is for."""
        return "SELECT 1 AS id"

    assert (copy.name, copy.__name__, copy.description) == ("copy", "copy", "What it is for.")
    assert copy() == "SELECT 1 AS id"
    assert copy.declared_at.startswith("/") or "test_declare.py, line" in copy.declared_at


def test_two_of_one_name() -> None:
    @weft.pipeline(target="a", name="copy")
    def one() -> str:
        return sql()

    with pytest.raises(DeclarationError, match=r"'copy' is declared twice: .*line \d+ and .*line \d+"):

        @weft.pipeline(target="a", name="copy")
        def two() -> str:
            return sql()


def test_the_same_function_again() -> None:
    """A reloaded module, a notebook's cell."""
    weft.pipeline(target="a", name="copy")(sql)
    weft.pipeline(target="b", name="copy")(sql)
    assert weft.project.current().pipelines["copy"].targets[0].name == "b"


# ---------------------------------------------------------------------------------------------------------------- rings


def declare(name: str, *upstream: str) -> None:
    def function() -> str:
        return sql()

    function.__qualname__ = name
    weft.pipeline(target=name, name=name, depends_on=list(upstream))(function)


def test_a_ring_is_named() -> None:
    declare("a", "c")
    declare("b", "a")
    with pytest.raises(CycleError, match="a → c → b → a") as caught:
        declare("c", "b")
    assert caught.value.ring == ("a", "c", "b", "a")


def test_one_that_waits_for_itself() -> None:
    with pytest.raises(CycleError, match="a → a"):
        declare("a", "a")


@pytest.mark.full
def test_long_chains(local: Project) -> None:
    for number in range(3000):
        declare(f"p{number}", *([f"p{number - 1}"] if number else []))
    assert [each.name for each in graph.in_order(local.pipelines)] == [f"p{number}" for number in range(3000)]


def test_order(local: Project) -> None:
    declare("last", "one", "two")
    declare("two", "one")
    declare("one")
    declare("other")
    assert [each.name for each in graph.in_order(local.pipelines)] == ["one", "two", "last", "other"]


def test_an_unknown_upstream(local: Project) -> None:
    declare("one")
    declare("two", "onne")
    with pytest.raises(NotFoundError, match=r"'two' .* depends on 'onne'[\s\S]*Did you mean 'one'"):
        graph.refuse_unknown_dependencies(local.pipelines)
