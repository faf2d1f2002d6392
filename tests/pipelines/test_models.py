"""What `@weft.model` takes, and what it refuses where it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft.errors import CycleError, DeclarationError
from weft.pipelines.models import Model, dependents, models, triggered_by
from weft.project import Project, use


@pytest.fixture(autouse=True)
def fresh() -> Iterator[Project]:
    with use(Project()) as project:
        yield project


def declare(**options: Any) -> Model:
    @weft.model(**options)
    def orders_by_day(orders):  # type: ignore[no-untyped-def]
        return orders

    return orders_by_day


def test_bare_decorator() -> None:
    @weft.model
    def everything(orders):  # type: ignore[no-untyped-def]
        """All of them."""
        return orders

    assert (everything.name, everything.materialise, everything.trigger) == ("everything", "table", "auto")
    assert everything.description == "All of them."
    assert [(each.parameter, each.name) for each in everything.inputs] == [("orders", "orders")]


def test_dependencies_by_name_stream_table_and_model() -> None:
    stream = weft.stream(name="orders")(lambda: None)
    first = declare(name="first")

    @weft.table(schema="crm")
    class Customers:
        primary_key = "id"

    @weft.model(dependencies=[stream, first, Customers, "warehouse.public.items"])
    def joined(orders, first, customers, items):  # type: ignore[no-untyped-def]
        return orders

    names = [each.name for each in joined.inputs]
    assert names == ["events.orders", "first", "crm.customers", "warehouse.public.items"]
    assert joined.depends_on == ("first",)


def test_parameter_with_a_default_is_no_input() -> None:
    @weft.model
    def newest(orders, *, limit=5, this=None):  # type: ignore[no-untyped-def]
        return orders.limit(limit)

    @weft.model(dependencies=["limit"])
    def limits(limit=None, at_most=5):  # type: ignore[no-untyped-def]
        return limit

    assert [each.name for each in newest.inputs] == ["orders"] and newest.takes_this
    assert [each.name for each in limits.inputs] == ["limit"]


def test_dependencies_of_one_last_name_need_parameters() -> None:
    with pytest.raises(DeclarationError, match="the same last part"):
        declare(dependencies=["shop.orders", "archive.orders"])
    declare(dependencies={"orders": "shop.orders", "old": "archive.orders"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "x" * 64}, "1 to 63 bytes"),
        ({"name": "a\nb"}, "1 to 63 bytes"),
        ({"materialize": "table"}, "has no option 'materialize'"),
        ({"materialise": "tabel"}, "materialise is 'tabel'"),
        ({"materialise": "merge"}, "needs key"),
        ({"key": "order_id"}, "key is an option of merge and scd2"),
        ({"dependencies": ["customers"]}, "parameter 'orders' is not among its dependencies"),
        ({"dependencies": [7]}, "dependencies takes streams, models, tables"),
        ({"deduplicate_by": "at"}, "there is no key"),
        ({"debounce": -1}, "debounce must be a number of seconds"),
        ({"max_staleness": 10}, "max_staleness limits debounce"),
        ({"cursor": "updated_at"}, "has no cursor"),
        ({"timezone": "Europe/Zurich"}, "timezone is that of a schedule"),
        ({"trigger": "always"}, "trigger is 'always'"),
        ({"connection": "postgres://me@host/db"}, "where a name is needed"),
        ({"expectations": ["x"]}, "is not an expectation"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare(**options)


def test_parameters_that_name_no_input() -> None:
    with pytest.raises(DeclarationError, match="must name an input"):

        @weft.model
        def anything(*tables):  # type: ignore[no-untyped-def]
            return tables[0]


def test_model_and_stream_of_one_name() -> None:
    weft.stream(name="orders_by_day")(lambda: None)
    with pytest.raises(DeclarationError, match="a stream has this name"):
        declare()


def test_two_models_of_one_name() -> None:
    declare()

    def other(items):  # type: ignore[no-untyped-def]
        return items

    with pytest.raises(DeclarationError, match="declared twice"):
        weft.model(name="orders_by_day")(other)


def test_cycle_is_refused_and_forgotten() -> None:
    @weft.model
    def one(two):  # type: ignore[no-untyped-def]
        return two

    def two(one):  # type: ignore[no-untyped-def]
        return one

    with pytest.raises(CycleError) as caught:
        weft.model(two)
    assert set(caught.value.ring) == {"one", "two"}
    assert caught.value.what == "Models wait for each other in a ring: one → two → one."
    assert caught.value.hint == "Remove one of these inputs. A model reads its own last result as this."
    assert one.depends_on == ()


def test_dependents_in_the_order_of_their_builds() -> None:
    @weft.model
    def last(middle, first):  # type: ignore[no-untyped-def]
        return middle

    @weft.model(materialise="view")
    def middle(first):  # type: ignore[no-untyped-def]
        return first

    @weft.model(dependencies=["events.orders"])
    def first(orders):  # type: ignore[no-untyped-def]
        return orders

    @weft.model(trigger="manual")
    def by_hand(first):  # type: ignore[no-untyped-def]
        return first

    @weft.model
    def after_by_hand(by_hand):  # type: ignore[no-untyped-def]
        return by_hand

    assert triggered_by(weft.stream(name="orders")(lambda: None)) == ("first", "last")
    assert dependents(["events.orders"], models()) == ["first", "middle", "last", "by_hand", "after_by_hand"]


def test_publish_names_the_models() -> None:
    weft.stream(name="orders")(lambda: None)
    assert weft.publish_sync("orders", {"id": 1})["triggered_models"] == []
    declare()
    assert weft.publish_sync("orders", {"id": 2})["triggered_models"] == ["orders_by_day"]
    weft.streams.close()


def test_fingerprint_changes_with_the_code_alone() -> None:
    def make(source: str) -> str:
        namespace: dict[str, Any] = {}
        import linecache

        name = f"<{source}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), namespace)
        with use(Project()):
            return weft.model(namespace["some"]).fingerprint

    plain = make("def some(orders):\n    return orders.limit(1)\n")
    assert make("def some(orders):\n    # one\n    return orders.limit( 1 )\n") == plain
    assert make("def some(orders):\n    return orders.limit(2)\n") != plain
