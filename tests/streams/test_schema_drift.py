"""Without `fields` the schema is inferred, then evolves, rejects or quarantines; no key and no type stops a stream."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from weft import SchemaError
from weft.project import Project
from workers import declare, drain, log_of, plain, same, start, started


def columns(stream: str = "orders") -> dict[str, str]:
    return {name: str(kind) for name, kind in log_of(stream).fields(fresh=True).items()}


def test_inferred_types(streams: Project) -> None:
    declare()
    event = {
        "text": "x",
        "flag": True,
        "whole": 5,
        "real": 1.5,
        "price": Decimal("1.5"),
        "day": datetime(2026, 1, 31).date(),
        "at": datetime(2026, 1, 31, tzinfo=UTC),
        "doc": {"a": 1},
        "list": [1],
        "raw": b"x",
        "id": UUID(int=5),
    }
    weft.publish_sync("orders", event)
    assert columns() == {
        "text": "string",
        "flag": "bool",
        "whole": "int64",
        "real": "float64",
        "price": "decimal(38,18)",
        "day": "date",
        "at": "timestamp",
        "doc": "json",
        "list": "json",
        "raw": "bytes",
        "id": "uuid",
    }
    assert plain(drain("orders")[0]) == event


def test_a_key_is_inferred_from_its_first_value(streams: Project) -> None:
    declare()
    weft.publish_sync("orders", [{"a": None}, {"a": None, "b": 1}])
    assert columns() == {"b": "int64"}
    weft.publish_sync("orders", {"a": "now"})
    assert columns() == {"b": "int64", "a": "string"}
    weft.publish_sync("orders", [{"n": 1}, {"n": 1.5}])
    assert columns()["n"] == "float64"
    assert [plain(event) for event in drain("orders")] == [{}, {"b": 1}, {"a": "now"}, {"n": 1.0}, {"n": 1.5}]


def test_new_keys_become_columns(streams: Project) -> None:
    declare(fields={"id": "int64"})
    weft.publish_sync("orders", {"id": 1})
    weft.publish_sync("orders", {"id": 2, "a": "x"})
    weft.publish_sync("orders", [{"id": 3, "b": 1.5}, {"id": 4, "c": [1]}])
    assert columns() == {"id": "int64", "a": "string", "b": "float64", "c": "json"}
    events = drain("orders")
    assert [plain(event) for event in events] == [
        {"id": 1},
        {"id": 2, "a": "x"},
        {"id": 3, "b": 1.5},
        {"id": 4, "c": [1]},
    ]
    assert events[0].keys() == events[3].keys()


CONFLICTS: list[Any] = ["text", True, 1.5, 2**70, [1], {"a": 1}, "", 0.1, {"deep": [{"x": None}]}]


def test_conflicting_values_come_back_merged(streams: Project) -> None:
    declare(fields={"v": "int64", "n": "int64"})
    for n, value in enumerate(CONFLICTS):
        weft.publish_sync("orders", {"n": n, "v": value})
    weft.publish_sync("orders", [{"n": n, "v": value} for n, value in enumerate(CONFLICTS)])
    weft.publish_sync("orders", {"n": 99, "v": 7})
    assert columns() == {"v": "int64", "n": "int64"}
    *events, last = drain("orders")
    for event, (n, value) in zip(events, [*enumerate(CONFLICTS)] * 2, strict=True):
        assert event["n"] == n
        assert same(event["v"], value)
        assert event.keys() == last.keys()
    assert last["v"] == 7


HOSTILE_KEYS = [
    "",
    " ",
    " leading",
    "trailing ",
    "two  spaces",
    'quote"double',
    "quote'single",
    "back`tick",
    "back\\slash",
    "semi;colon",
    "-- comment",
    "/* comment */",
    "a.b.c",
    "a:b",
    "@at",
    "#hash",
    "$dollar",
    "per%cent",
    "%s",
    "%(x)s",
    "question?",
    "??",
    "{curly}",
    "[square]",
    "(round)",
    "new\nline",
    "tab\there",
    "nul\x00key",
    "1digit",
    "9",
    "-",
    "_",
    "__",
    "select",
    "SELECT",
    "from",
    "order",
    "group",
    "table",
    "null",
    "NULL",
    "true",
    "default",
    "user",
    "primary",
    "rowid",
    "ROWID",
    "_rowid_",
    "oid",
    "ctid",
    "xmin",
    "xmax",
    "cmin",
    "tableoid",
    "id",
    "Id",
    "ID",
    "iD",
    "name",
    "straße",
    "STRASSE",
    "strasse",
    "strase",
    "ß",
    "ẞ",
    "ǅ",
    "ﬁ",
    "fi",
    "ª",
    "é",
    "e",
    "E",
    "É",
    "e\u0301",
    "ø",
    "o",
    "ł",
    "l",
    "đ",
    "d",
    "ı",
    "i",
    "İ",
    "ſ",
    "s",
    "\u212a",  # the Kelvin sign
    "k",
    "名前",
    "имя",
    "اسم",
    "🦄",
    "a🦄",
    "𝔘",
    "x" * 63,
    "x" * 64,
    "x" * 65,
    "x" * 1000,
    "é" * 31,
    "é" * 32,
    "weft_rowid",
    "_wef",
    "stream",
    "consumer",
    "constructor",
    "__class__",
    "\u200bzero width",
    "\ufeffmark",
    "a\u202eb",
]


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_hostile_keys(streams: Project, together: bool) -> None:
    """Whatever a key looks like, its value comes back under it."""
    declare()
    events = [{key: n} for n, key in enumerate(HOSTILE_KEYS)]
    if together:
        events = [{key: value for event in events for key, value in event.items()}, *events]
    for event in events:
        weft.publish_sync("orders", event)
    weft.publish_sync("orders", events)
    for got, event in zip(drain("orders"), events * 2, strict=True):
        assert plain(got) == event


def test_hostile_keys_with_values_of_many_types(streams: Project) -> None:
    declare()
    for key in HOSTILE_KEYS:
        weft.publish_sync("orders", [{key: 1}, {key: "text"}, {key: None}, {key: [key]}])
    found = drain("orders")
    for n, key in enumerate(HOSTILE_KEYS):
        assert [plain(event) for event in found[4 * n : 4 * n + 4]] == [{key: 1}, {key: "text"}, {}, {key: [key]}]


def test_five_hundred_keys(streams: Project) -> None:
    declare()
    wide = {f"key_{n:03}": n for n in range(500)}
    texts = {f"key_{n:03}": f"text {n} " * 20 for n in range(500)}
    weft.publish_sync("orders", wide)
    weft.publish_sync("orders", [texts, wide])
    weft.publish_sync("orders", {f"other_{n}": n for n in range(500)})
    weft.publish_sync("orders", {"one_more": 1})
    first, second, third, fourth, fifth = drain("orders")
    assert plain(first) == wide
    assert plain(second) == texts
    assert plain(third) == wide
    assert plain(fourth) == {f"other_{n}": n for n in range(500)}
    assert plain(fifth) == {"one_more": 1}
    assert len(columns()) <= 100


def test_odd_keys_do_not_use_the_columns_up(streams: Project) -> None:
    declare(fields={"n": "int64"})
    odd = {f"odd_{n:03}": n for n in range(100)}
    weft.publish_sync("orders", odd)
    assert len(columns()) == 21
    weft.publish_sync("orders", {"n": 1, "useful": "x"})
    assert "useful" in columns()
    first, second = drain("orders")
    assert (plain(first), plain(second)) == (odd, {"n": 1, "useful": "x"})


def test_a_limit_of_new_columns(streams: Project) -> None:
    declare(fields={"n": "int64"}, max_new_columns=2)
    weft.publish_sync("orders", {"a": 1, "b": 1, "c": 1})
    weft.publish_sync("orders", {"d": 1})
    assert sorted(columns()) == ["a", "b", "n"]
    declare("closed", fields={"n": "int64"}, max_new_columns=0)
    weft.publish_sync("closed", {"n": 1, "a": {"b": 1}})
    assert list(log_of("closed").fields()) == ["n"]
    assert plain(drain("closed")[0]) == {"n": 1, "a": {"b": 1}}
    for wrong in (-1, 101, 1.0, True, "5", None):
        with pytest.raises(weft.DeclarationError, match="max_new_columns"):
            declare("wrong", max_new_columns=wrong)


@pytest.mark.parametrize("size", [30, 40, 41, 90, 800, 9000])
def test_many_columns_of_text(streams: Project, size: int) -> None:
    """A row of a hundred texts, of lengths that databases store in different places."""
    declare()
    event = {f"key_{n}": f"{n}" + "é" * size for n in range(100)}
    weft.publish_sync("orders", event)
    assert plain(drain("orders")[0]) == event


def test_reject(streams: Project) -> None:
    declare(fields={"id": "int64"}, on_schema_drift="reject")
    weft.publish_sync("orders", {"id": 1})
    weft.publish_sync("orders", [{}, {"id": None}])
    for bad, field in (({"id": "x"}, "id"), ({"id": 2, "new": 1}, "new"), ({"new": None}, "new"), ({"ID": 1}, "ID")):
        with pytest.raises(SchemaError) as caught:
            weft.publish_sync("orders", [{"id": 9}, bad])
        assert (caught.value.index, caught.value.field) == (1, field)
    assert [event["id"] for event in drain("orders")] == [1, None, None]
    assert columns() == {"id": "int64"}


@pytest.mark.parametrize("drift", ["reject", "quarantine"])
def test_the_first_events_give_the_schema(streams: Project, drift: str) -> None:
    declare(on_schema_drift=drift)
    weft.publish_sync("orders", [{"a": 1}, {"b": "x"}])
    assert columns() == {"a": "int64", "b": "string"}
    if drift == "reject":
        with pytest.raises(SchemaError):
            weft.publish_sync("orders", {"c": 1})
    else:
        assert weft.publish_sync("orders", {"c": 1})["rows_quarantined"] == 1
    assert columns() == {"a": "int64", "b": "string"}


def test_quarantine(streams: Project) -> None:
    declare(fields={"id": "int64", "at": "timestamp"}, on_schema_drift="quarantine")
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    result = weft.publish_sync(
        "orders", [{"id": 1}, {"id": "x", "at": moment}, {"id": 2}, {"id": 3, "new": [1]}, {"id": 2**70}]
    )
    assert (result["rows_received"], result["rows_quarantined"]) == (5, 3)
    events = drain("orders")
    assert [event["id"] for event in events] == [1, 2]
    assert (result["first_rowid"], result["last_rowid"]) == (events[0]["_weft_rowid"], events[1]["_weft_rowid"])
    held = drain("orders__quarantine")
    assert [event["event"] for event in held] == [
        {"id": "x", "at": moment.isoformat()},
        {"id": 3, "new": [1]},
        {"id": 2**70},
    ]
    assert [event["field"] for event in held] == ["id", "new", "id"]
    assert all(event["_weft_publish_id"] == result["publish_id"] for event in held)
    assert "'x'" in held[0]["reason"]
    assert "int64" in held[0]["reason"]


def test_all_quarantined(streams: Project) -> None:
    declare(fields={"id": "int64"}, on_schema_drift="quarantine")
    result = weft.publish_sync("orders", [{"id": "a"}, {"id": "b"}])
    assert (result["first_rowid"], result["rows_quarantined"]) == (None, 2)
    assert drain("orders") == []
    assert [event["event"]["id"] for event in drain("orders__quarantine")] == ["a", "b"]
    weft.publish_sync("orders", {"id": 1})
    assert [event["id"] for event in drain("orders")] == [1]


def test_quarantine_and_refusal(streams: Project) -> None:
    """What cannot even be held as JSON rejects the publish, whole, and does not get in the way of the next."""
    declare(fields={"id": "int64"}, on_schema_drift="quarantine")
    for bad in ("\ud800", float("nan"), object()):
        with pytest.raises(SchemaError) as caught:
            weft.publish_sync("orders", [{"id": 1}, {"id": "held"}, {"id": bad}])
        assert caught.value.index == 2
    weft.publish_sync("orders", [{"id": 1}, {"id": "held"}])
    assert [event["id"] for event in drain("orders")] == [1]
    assert [event["event"] for event in drain("orders__quarantine")] == [{"id": "held"}]


def test_quarantined_hostile_events(streams: Project) -> None:
    declare(fields={"id": "int64"}, on_schema_drift="quarantine")
    events = [{key: key} for key in HOSTILE_KEYS if key != "id"]
    assert weft.publish_sync("orders", events)["rows_quarantined"] == len(events)
    held = drain("orders__quarantine")
    assert [event["event"] for event in held] == events
    assert [event["field"] for event in held] == [next(iter(event)) for event in events]


@pytest.mark.timing
def test_two_processes_evolve_at_once(streams: Project) -> None:
    """Each adds columns of its own and columns that both add, with types that agree or do not."""
    declare()
    weft.publish_sync("orders", {"n": -1})
    code = """
        declare()
        number, rounds = args
        line()
        for k in range(rounds):
            weft.publish_sync("orders", {"by": number, "n": k, f"own_{number}_{k}": k, f"both_{k}": k})
            weft.publish_sync("orders", {"by": number, "n": k, f"clash_{k}": k if number % 2 else str(k)})
    """
    rounds = 8
    with started(3, code, rounds) as runs:
        for run in runs:
            run.ready()
        for run in runs:
            run.tell()
        for run in runs:
            run.answer()
    events = [plain(event) for event in drain("orders")][1:]
    for number in range(3):
        mine = [event for event in events if event["by"] == number]
        expected: list[dict[str, Any]] = []
        for k in range(rounds):
            expected.append({"by": number, "n": k, f"own_{number}_{k}": k, f"both_{k}": k})
            expected.append({"by": number, "n": k, f"clash_{k}": k if number % 2 else str(k)})
        assert mine == expected


def test_a_reader_sees_columns_that_another_process_adds(streams: Project) -> None:
    """Also one that has read the same way many times before."""
    declare()
    for n in range(12):
        weft.publish_sync("orders", {"n": n})
        assert [plain(event) for event in drain("orders")] == [{"n": n}]
    for n in range(3):
        start('declare(); weft.publish_sync("orders", {"n": args[0], f"new_{args[0]}": "x"})', n).answer()
        assert [plain(event) for event in drain("orders")] == [{"n": n, f"new_{n}": "x"}]
        weft.publish_sync("orders", {"n": n, f"new_{n}": "y"})
        assert [plain(event) for event in drain("orders")] == [{"n": n, f"new_{n}": "y"}]


keys = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(
    lambda key: not key.lower().startswith("_weft_")
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    events=st.lists(
        st.dictionaries(keys, st.integers(-5, 5) | st.text(max_size=3) | st.booleans(), max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_any_keys(streams: Project, events: list[dict[str, Any]]) -> None:
    declare()
    weft.publish_sync("orders", events)
    found = drain("orders")
    assert [plain(event) for event in found] == events
    assert all(same(plain(got), event) for got, event in zip(found, events, strict=True))
