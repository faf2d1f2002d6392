"""`@stream`: every option is checked where it is declared, and an error names the option and the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft import DeclarationError
from weft.project import Project, use
from weft.streams import Stream
from weft.types import BASES
from workers import declare


@pytest.fixture(autouse=True)
def fresh() -> Iterator[Project]:
    with use(Project()) as fresh:
        yield fresh


def refused(**options: Any) -> DeclarationError:
    with pytest.raises(DeclarationError) as caught:
        declare(**options)
    assert isinstance(caught.value, ValueError)
    return caught.value


def test_every_option(fresh: Project) -> None:
    connection = weft.SQLiteConnection("a.db")
    made = declare(
        "user_events",
        schema="web",
        connection=connection,
        cursor="rowid",
        fields={"id": "int64", "at": "timestamp?", "price": "decimal(10,2)"},
        description="What users do",
        tags=["web", "pii"],
        owner="team-a",
        auth={"type": "bearer", "token": "t"},
        rate_limit={"requests_per_second": 100, "burst": 20},
        validate_schema=True,
        retention={"max_age_days": 30, "max_rows": 1_000},
        idempotency_key={"fields": ["id"], "horizon_days": 7},
        on_schema_drift="quarantine",
        max_deliveries=5,
        dead_letter="failed_events",
    )
    assert fresh.streams == {"user_events": made}
    assert (made.name, made.schema, made.connection, made.cursor) == ("user_events", "web", connection, "rowid")
    assert {name: str(kind) for name, kind in made.fields.items()} == {
        "id": "int64",
        "at": "timestamp?",
        "price": "decimal(10,2)",
    }
    assert (made.description, made.tags, made.owner) == ("What users do", ("web", "pii"), "team-a")
    assert made.auth == {"type": "bearer", "token": "t"}
    assert made.rate_limit == {"requests_per_second": 100, "burst": 20}
    assert made.validate_schema is True
    assert made.retention == {"max_age_days": 30, "max_rows": 1_000}
    assert (made.key_fields, made.key_horizon_days) == (("id",), 7)
    assert (made.on_schema_drift, made.max_deliveries, made.dead_letter) == ("quarantine", 5, "failed_events")
    assert made.quarantine.name == "user_events__quarantine"
    assert made.dead_letters.name == "failed_events"


def test_defaults() -> None:
    @weft.stream
    def clicks() -> None:
        """What was clicked."""

    @weft.stream()
    def views() -> None: ...

    @weft.stream("taps", max_deliveries=2)
    def something_else() -> None: ...

    assert isinstance(clicks, Stream)
    assert (clicks.name, views.name, something_else.name) == ("clicks", "views", "taps")
    assert clicks.__doc__ == "What was clicked."
    assert clicks.__name__ == "clicks"
    assert (clicks.schema, clicks.cursor, clicks.fields, clicks.retention) == ("events", "rowid", {}, {})
    assert (clicks.on_schema_drift, clicks.validate_schema, clicks.max_deliveries) == ("evolve", False, None)
    assert something_else.dead_letters.name == "taps__dead_letter"


@pytest.mark.parametrize("base", BASES)
def test_every_field_type(base: str) -> None:
    made = declare(fields={"a": base, "b": f"{base}?", "c": f" {base.upper()} "})
    assert [kind.base for kind in made.fields.values()] == [base] * 3
    assert [kind.nullable for kind in made.fields.values()] == [False, True, False]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("retenton", "retention"),
        ("field", "fields"),
        ("tag", "tags"),
        ("max_delivery", "max_deliveries"),
        ("idempotency_keys", "idempotency_key"),
        ("on_drift", "on_schema_drift"),
        ("ratelimit", "rate_limit"),
        ("validate", "validate_schema"),
    ],
)
def test_unknown_option_names_the_nearest(option: str, meant: str) -> None:
    error = refused(**{option: 1})
    assert option in str(error)
    assert f"{meant!r}" in str(error)


def test_unlike_any_option_lists_all() -> None:
    error = refused(zzz=1)
    for option in ("schema", "connection", "fields", "retention", "dead_letter", "on_schema_drift"):
        assert option in str(error)


MALFORMED: list[tuple[str, Any]] = [
    ("schema", ""),
    ("schema", "a.b"),
    ("schema", 'x"; DROP TABLE y; --'),
    ("schema", None),
    ("schema", "weft"),
    ("connection", 5),
    ("cursor", "no_such_field"),
    ("cursor", "id"),
    ("cursor", "_weft_published_at"),
    ("cursor", 5),
    ("cursor", ["rowid"]),
    ("fields", ["id"]),
    ("fields", {"id": int}),
    ("fields", {"id": "strng"}),
    ("fields", {"id": "string(5)"}),
    ("fields", {"id": "decimal(39,2)"}),
    ("fields", {"id": "decimal(5,6)"}),
    ("fields", {"id": "decimal(0,0)"}),
    ("fields", {"": "string"}),
    ("fields", {5: "string"}),
    ("fields", {"_weft_rowid": "int64"}),
    ("fields", {"_WEFT_x": "int64"}),
    ("fields", {"a" * 64: "int64"}),
    ("fields", {'a"b': "int64"}),
    ("fields", {"a\x00b": "int64"}),
    ("fields", {"ctid": "int64"}),
    ("fields", {"id": "int64", "ID": "int64"}),
    ("fields", {"é": "int64", "e": "int64"}),
    ("description", 5),
    ("owner", ["me"]),
    ("tags", "web"),
    ("tags", [1]),
    ("tags", 5),
    ("auth", "bearer"),
    ("auth", {}),
    ("auth", {"type": "basic", "user": "u"}),
    ("auth", {"type": []}),
    ("auth", {"type": "bearer"}),
    ("auth", {"type": "bearer", "token": ""}),
    ("auth", {"type": "bearer", "token": "t", "key": "k"}),
    ("auth", {"type": "api_key", "header": "X-Key"}),
    ("auth", {"type": "api_key", "header": "X Key:", "key": "k"}),
    ("auth", {"type": "hmac"}),
    ("auth", {"type": "hmac", "secret": []}),
    ("auth", {"type": "hmac", "secret": ["a", ""]}),
    ("auth", {"type": "hmac", "secret": ["a", 5]}),
    ("auth", {"type": "bearer", "token": ["a", "b"]}),
    ("rate_limit", 5),
    ("rate_limit", {}),
    ("rate_limit", {"burst": 5}),
    ("rate_limit", {"requests_per_second": 0}),
    ("rate_limit", {"requests_per_second": 1e-9}),
    ("rate_limit", {"requests_per_second": 5, "burst": 0}),
    ("rate_limit", {"requests_per_second": 5, "burst": 2.5}),
    ("rate_limit", {"requests_per_second": "5"}),
    ("rate_limit", {"requests_per_minute": 5}),
    ("validate_schema", "yes"),
    ("validate_schema", 1),
    ("validate_schema", True),  # without fields
    ("retention", 5),
    ("retention", {}),
    ("retention", {"max_age": 5}),
    ("retention", {"max_age_days": 0}),
    ("retention", {"max_age_days": -1}),
    ("retention", {"max_age_days": float("nan")}),
    ("retention", {"max_age_days": float("inf")}),
    ("retention", {"max_age_days": 100_001}),
    ("retention", {"max_rows": 1.5}),
    ("retention", {"max_rows": True}),
    ("idempotency_key", ""),
    ("idempotency_key", []),
    ("idempotency_key", [1]),
    ("idempotency_key", {}),
    ("idempotency_key", {"fields": ["a"], "horizon": 5}),
    ("idempotency_key", {"fields": ["a"], "horizon_days": 0}),
    ("idempotency_key", {"fields": ["a"], "horizon_days": 1e9}),
    ("on_schema_drift", "ignore"),
    ("on_schema_drift", None),
    ("on_schema_drift", ["evolve"]),
    ("max_deliveries", 0),
    ("max_deliveries", -1),
    ("max_deliveries", 1.5),
    ("max_deliveries", True),
    ("max_deliveries", "5"),
    ("dead_letter", "failed"),  # without max_deliveries
    ("dead_letter", True),
]


@pytest.mark.parametrize(("option", "value"), MALFORMED, ids=[f"{o}={v!r:.40}" for o, v in MALFORMED])
def test_malformed(fresh: Project, option: str, value: Any) -> None:
    error = refused(**{option: value})
    words = {"fields": ("field", "fields"), "validate_schema": ("validate_schema",)}.get(option, (option,))
    assert any(word in str(error) for word in words), str(error)
    assert fresh.streams == {}


@pytest.mark.parametrize("dead_letter", [False, 0, 1, "", "a b", "orders", 5, ["x"]])
def test_malformed_dead_letter(dead_letter: Any) -> None:
    assert "dead_letter" in str(refused(max_deliveries=3, dead_letter=dead_letter))


@pytest.mark.parametrize("name", ["", "1st", "a b", "a.b", 'a"b', "a`b", "a" * 48, "né", "a\n", "-a", 5, b"a", "a\x00"])
def test_malformed_name(name: Any) -> None:
    with pytest.raises(DeclarationError, match="name"):
        weft.stream(name=name)(lambda: None)


@pytest.mark.parametrize("name", ["a", "_", "A-b_9", "a" * 47, "select", "order"])
def test_good_name(name: str) -> None:
    assert declare(name).name == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [("strng", "string"), ("int46", "int64"), ("timestmp", "timestamp"), ("boolean", "bool"), ("uid", "uuid")],
)
def test_unknown_type_names_the_nearest(given: str, meant: str) -> None:
    error = refused(fields={"price": given})
    assert "price" in str(error)
    assert f"Did you mean {meant!r}" in str(error)


def test_nested_options_name_the_nearest() -> None:
    assert "'max_age_days'" in str(refused(retention={"max_age_day": 5}))
    assert "'requests_per_second'" in str(refused(rate_limit={"request_per_second": 5}))
    assert "'user_id'" in str(refused(fields={"user_id": "string"}, idempotency_key="userid"))


def test_positional_options_are_refused() -> None:
    with pytest.raises(TypeError):
        weft.stream("orders", "web")  # type: ignore[misc]


def test_the_decorator_needs_a_function() -> None:
    with pytest.raises(DeclarationError, match="function"):
        weft.stream(name="orders")(5)


def test_another_function_may_not_take_the_name() -> None:
    @weft.stream(name="orders")
    def one() -> None: ...

    with pytest.raises(DeclarationError) as caught:

        @weft.stream(name="orders")
        def two() -> None: ...

    assert "'orders'" in str(caught.value)
    assert "one" in str(caught.value)
    assert "two" in str(caught.value)


def test_names_that_differ_in_case_only_are_one_table_to_some_databases() -> None:
    declare("orders")
    with pytest.raises(DeclarationError, match="orders"):
        declare("Orders")
    declare("Orders", schema="other")


def test_the_same_function_may_declare_again(fresh: Project) -> None:
    """As a reloaded module or a notebook's cell does."""
    first = declare("orders")
    second = declare("orders", fields={"id": "int64"})
    assert fresh.streams == {"orders": second}
    assert first is not second


def test_a_stream_is_frozen() -> None:
    made = declare()
    with pytest.raises(AttributeError):
        made.name = "other"
    with pytest.raises((TypeError, AttributeError)):
        made.fields["x"] = 1


def test_options_are_copied() -> None:
    fields, tags = {"id": "int64"}, ["a"]
    made = declare(fields=fields, tags=tags)
    fields["b"] = "string"
    tags.append("b")
    assert list(made.fields) == ["id"]
    assert made.tags == ("a",)


def test_a_url_in_place_of_a_connections_name() -> None:
    """Refused at once, and without the password, which the stream's repr would show."""
    error = refused(connection="postgresql://someone:hunter2@host/database")
    assert "weft.connect" in str(error)
    assert "hunter2" not in str(error)


def test_an_unknown_type_is_refused_with_its_stream() -> None:
    error = str(refused(name="orders", fields={"id": "int"}))
    assert error.startswith("Stream 'orders': The type of field 'id' is 'int', ") and "'int64'" in error
