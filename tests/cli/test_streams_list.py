"""`weft streams list`: what is declared, and how much of it is stored."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

import weft
from weft.cli import streams as command
from weft.systems.received import SCHEMA, ReceivedOffsets
from workers import declare


def rows(shown: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_empty_project(local, call) -> None:
    done = call("streams", "list")
    assert (done.stdout, done.stderr) == (
        "",
        "No stream is declared here. Name the module that declares them with --module, list it in weft.toml, or start "
        "with: weft init\n",
    )
    assert json.loads(call("streams", "list", "--format", "json").stdout) == []


def test_streams_and_their_sizes(streams, call) -> None:
    declare("orders", schema="sales", fields={"id": "int64", "total": "decimal(10,2)"}, retention={"max_rows": 5000})
    declare("clicks")
    weft.publish_sync("clicks", [{"n": n} for n in range(3)])
    shown = rows(call("streams", "list").stdout)
    assert shown["name"] == ["schema", "connection", "fields", "events", "last published", "retention"]
    assert shown["orders"] == ["sales", "default", "2", "0", "5,000 events"]
    assert shown["clicks"][:4] == ["events", "default", "inferred", "3"]
    assert shown["clicks"][4].endswith(" ago")


def test_streams_with_tags(streams, call) -> None:
    declare("orders", tags=["sales", "pii"])
    declare("clicks", tags=["web"])
    declare("notes")
    weft.publish_sync("notes", {"n": 1})

    def found(*tags: str) -> list[str]:
        shown = call("streams", "list", "--format", "json", *(part for tag in tags for part in ("--tag", tag)))
        return [each["name"] for each in json.loads(shown.stdout)]

    assert found("sales") == found("pii", "sales") == ["orders"]
    assert found() == ["orders", "clicks", "notes"]
    assert call("streams", "list", "--tag", "web", "--tag", "sales").stderr == "No stream has the tags web, sales.\n"


def test_json(streams, call) -> None:
    declare("orders", fields={"id": "int64", "note": "string?"}, retention={"max_age_days": 1.5})
    weft.publish_sync("orders", {"id": 1})
    (found,) = json.loads(call("streams", "list", "--format", "json").stdout)
    assert re.match(r"\d{4}-\d\d-\d\dT", found.pop("last_published"))
    assert found == {
        "name": "orders",
        "schema": "events",
        "connection": "default",
        "tags": [],
        "fields": {"id": "int64", "note": "string?"},
        "events": 1,
        "counted": True,
        "retention": {"max_age_days": 1.5},
        "role": None,
        "of": None,
        "problem": None,
    }


def test_nothing_is_created(streams, system, call) -> None:
    declare("orders", fields={"id": "int64"})
    call("streams", "list")
    call("streams", "show", "orders")
    call("streams", "groups", "orders")
    call("streams", "tail", "orders")
    if system.kind == "sqlite":
        with sqlite3.connect(Path(system.url.removeprefix("sqlite:///"))) as database:
            assert database.execute("SELECT name FROM sqlite_master").fetchall() == []
        database.close()
    weft.publish_sync("orders", {"id": 1})
    declare("later")
    call("streams", "show", "later")
    from weft.streams.runtime import open_hub

    assert open_hub(streams.connection()).store.names() == [("events", "orders")]


def test_derived_streams_are_marked(local, call) -> None:
    declare("orders", fields={"id": "int64"}, on_schema_drift="quarantine", max_deliveries=3)
    weft.publish_sync("orders", [{"id": 1}, {"id": "x"}])
    shown = rows(call("streams", "list").stdout)
    assert shown["orders__quarantine"][-1] == "quarantine"
    assert shown["orders__quarantine"][3] == "1"
    assert shown["orders__dead_letter"][-1] == "dead letters"
    found = json.loads(call("streams", "list", "--format", "json").stdout)
    assert [(row["role"], row["of"]) for row in found] == [
        (None, None),
        ("quarantine", "orders"),
        ("dead letters", "orders"),
    ]


def test_many_events_are_not_counted(local, call, monkeypatch: pytest.MonkeyPatch) -> None:
    declare("orders")
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    weft.trim_sync("orders", before=4)
    monkeypatch.setattr(command, "_COUNTED_EVENTS", 5)
    assert rows(call("streams", "list").stdout)["orders"][3] == "~7"


def test_database_that_is_away_spoils_its_own_streams_only(local, call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_FAR", "postgres://me:hunter2@127.0.0.1:1/db")
    declare("near")
    declare("far", connection="far")
    weft.publish_sync("near", {"n": 1})
    done = call("streams", "list", code=1)
    assert rows(done.stdout)["near"][3] == "1"
    assert rows(done.stdout)["far"][3] == "?"
    assert done.stderr.startswith("warning: far: Cannot open the connection 'far' (postgres://me:***@127.0.0.1:1/db)")
    assert done.stderr.endswith("\n  Check that the server runs and takes connections: weft connections check far\n")
    assert "hunter2" not in done.output
    found = json.loads(call("streams", "list", "--format", "json", code=1).stdout)
    assert [bool(row["problem"]) for row in found] == [False, True]


def test_stored_but_not_declared(streams, call) -> None:
    declare("orders", schema="sales", fields={"id": "int64", "note": "string"})
    declare("clicks")
    weft.publish_sync("orders", {"id": 1})
    del streams.streams["orders"]
    shown = rows(call("streams", "list").stdout)
    assert shown["orders"][:4] == ["sales", "default", "2", "1"]
    assert shown["orders"][-1] == "not declared here"
    del streams.streams["clicks"]
    done = call("streams", "list")
    assert list(rows(done.stdout)) == ["name", "orders"]
    assert done.stderr.startswith("No stream is declared here. Name the module that declares them with --module,")
    (found,) = json.loads(call("streams", "list", "--format", "json").stdout)
    assert (found["role"], found["fields"]) == ("not declared here", {"id": "int64", "note": "string"})


def test_stored_in_other_case(streams, system, call) -> None:
    """Two streams, or a declaration that the database refuses: neither hides the other, nor the rest."""
    declare("orders", schema="sales", fields={"id": "int64"})
    weft.publish_sync("orders", {"id": 1})
    del streams.streams["orders"]
    declare("ORDERS", schema="sales")
    declare("zebras")
    weft.publish_sync("zebras", {"id": 1})
    done = call("streams", "list", "--format", "json")
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert {name: each["events"] for name, each in found.items() if name != "ORDERS"} == {"zebras": 1, "orders": 1}
    assert found["orders"]["role"] == "not declared here"
    if system.kind == "sqlite":
        assert found["ORDERS"]["events"] is None
        assert "would be one table" in found["ORDERS"]["problem"]
        assert "warning: default: The streams sales.ORDERS and sales.orders" in done.stderr
        assert found["zebras"]["problem"] is None


def test_stored_elsewhere_is_not_declared_there(local, call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_OTHER", "sqlite:///other.db")
    declare("orders")
    declare("clicks", connection="other")
    weft.publish_sync("orders", {"id": 1}, connection="other")
    found = json.loads(call("streams", "list", "--format", "json").stdout)
    assert [(row["name"], row["connection"], row["role"]) for row in found] == [
        ("orders", "default", None),
        ("clicks", "other", None),
        ("orders", "other", "not declared here"),
    ]


def test_logs_of_received_messages(local, call, project: Path) -> None:
    """They are found where pipelines keep them, and in `default`, whatever is declared there."""
    other = weft.connect(url=f"sqlite:///{project / 'other.db'}", name="other")
    declare("clicks", connection=weft.connect(url=f"sqlite:///{project / 'clicks.db'}", name="clicks"))
    assert json.loads(call("streams", "list", "--format", "json").stdout)[0]["name"] == "clicks"
    assert not (project / ".weft" / "weft.db").exists()
    for kept, name in ((None, "received_one"), (other, "received_two")):
        broker = weft.RabbitMQConnection("amqp://localhost", name=f"broker_{name}", received_log=kept)
        source = weft.Source(connection=broker, query="orders")
        weft.streaming_pipeline(name=name, source=source, target="default", target_table="copies")(lambda rows: rows)
        offsets = ReceivedOffsets(local.connection(kept).resolved(), SCHEMA, name)
        offsets.made().reset("old reader", 0)
        offsets.store.close()
    found = json.loads(call("streams", "list", "--format", "json").stdout)
    assert [(row["name"], row["connection"]) for row in found] == [
        ("clicks", "clicks"),
        ("received_one", "default"),
        ("received_two", "other"),
    ]
    for name in ("received_one", "received_two"):
        (group,) = json.loads(call("streams", "groups", name, "--format", "json").stdout)
        assert group["consumer"] == "old reader"
        call("streams", "forget", name, "old reader", "--yes")
        assert json.loads(call("streams", "groups", name, "--format", "json").stdout) == []


def test_nothing_declared_and_the_database_away(local, call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", "postgres://me@127.0.0.1:1/db")
    done = call("streams", "list", code=1)
    assert "No stream is declared here." in done.stderr
    assert "warning: default: Cannot open the connection 'default'" in done.stderr


def test_settings_in_a_folder_above(run, shop, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a/b").mkdir(parents=True)
    monkeypatch.chdir("a/b")
    assert run("streams", "list").stderr == "No stream is declared here. weft.toml is in ../..; run it there.\n"
    assert run("streams", "tail", "numbers").stderr == (
        "error: There is no stream named 'numbers'.\n  weft.toml is in ../..; run it there.\n"
    )
    Path("weft.toml").write_text("")
    assert "run it there" not in run("streams", "tail", "numbers").stderr


def test_another_connection(local, call, project: Path) -> None:
    declare("orders")
    other = weft.connect(url=f"sqlite:///{project / 'other.db'}", name="other")
    weft.publish_sync("orders", {"n": 1}, connection=other)
    assert rows(call("streams", "list").stdout)["orders"][3] == "0"
    assert rows(call("streams", "list", "--connection", "other").stdout)["orders"][1:4] == ["other", "inferred", "1"]


def test_module_option(run, shop) -> None:
    Path("more.py").write_text("import weft\n@weft.stream\ndef more(): ...\n")
    done = run("streams", "list", "--module", "more")
    assert list(rows(done.stdout)) == ["name", "numbers", "more"]


def test_events_on_redis_are_counted(local, call, open_system, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are moments there: they do not tell how many events there are."""
    with open_system("redis") as system:
        monkeypatch.setenv("WEFT_DSN_CACHE", system.url)
        declare("orders", connection="cache")
        weft.publish_sync("orders", [{"n": n} for n in range(10)])
        assert rows(call("streams", "list").stdout)["orders"][3] == "10"
