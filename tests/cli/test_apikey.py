"""`weft apikey create | list | revoke`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.server.keys import key_table, verified

TOKEN = re.compile(r"weft_([0-9a-f]{12})_[0-9a-f]{64}\n")


@pytest.fixture(autouse=True)
def declared(local: Project) -> None:
    @weft.stream
    def orders() -> None: ...


def test_create_shows_the_token_once(call: Callable[..., Any]) -> None:
    made = call("apikey", "create", "--scope", "write", "--scope", "read", "--stream", "orders", "--name", "a shop")
    # Alone on standard output, so that a script can take it.
    found = TOKEN.fullmatch(made.stdout)
    assert found
    assert f"The key {found[1]}, good for read and write of orders. It is not shown again." in made.stderr
    # People should know what they have done.
    assert "streams that were open need a key" in made.stderr
    assert "were open" not in call("apikey", "create", "--scope", "read").stderr
    with key_table() as table:
        assert verified(made.stdout.strip(), table.all())
    listed = call("apikey", "list")
    assert made.stdout.strip().rpartition("_")[2] not in listed.output
    titles, row, _ = listed.stdout.splitlines()
    assert titles.split() == ["id", "name", "scopes", "streams", "rate", "created", "expires", "state"]
    assert re.fullmatch(rf"{found[1]}  a shop  read, write  orders  +\d{{4}}-.* UTC +good", row)


def test_json(call: Callable[..., Any]) -> None:
    made = json.loads(
        call(
            *("apikey", "create", "--scope", "admin", "--rate", "2.5", "--burst", "7", "--expires", "2099-01-31"),
            *("--format", "json"),
        ).stdout
    )
    token = made.pop("key")
    assert TOKEN.fullmatch(token + "\n")
    assert made == {
        "id": token.split("_")[1],
        "name": None,
        "scopes": ["admin"],
        "streams": [],
        "requests_per_second": 2.5,
        "burst": 7,
        "created_at": made["created_at"],
        "expires_at": "2099-01-31T00:00:00+00:00",
        "revoked_at": None,
        "ended": None,
    }
    assert json.loads(call("apikey", "list", "--format", "json").stdout) == [made]
    revoked = json.loads(call("apikey", "revoke", made["id"], "--format", "json").stdout)
    assert revoked == made | {"ended": "revoked", "revoked_at": revoked["revoked_at"]}
    assert json.loads(call("apikey", "list", "--format", "json").stdout) == [revoked]


@pytest.mark.parametrize(("text", "ahead"), [("90d", timedelta(days=90)), ("12h", timedelta(hours=12))])
def test_expires_from_now(call: Callable[..., Any], text: str, ahead: timedelta) -> None:
    before = datetime.now(UTC)
    made = json.loads(call("apikey", "create", "--scope", "read", "--expires", text, "--format", "json").stdout)
    assert before + ahead <= datetime.fromisoformat(made["expires_at"]) <= datetime.now(UTC) + ahead


def test_revoke(call: Callable[..., Any]) -> None:
    token = call("apikey", "create", "--scope", "read").stdout.strip()
    # Who gives all of it meant its id, and gets no echo.
    done = call("apikey", "revoke", token)
    assert done.stdout.startswith(f"The key {token.split('_')[1]} was revoked at ")
    assert token.rpartition("_")[2] not in done.output
    assert call("apikey", "revoke", token).stdout == done.stdout
    assert call("apikey", "list").stdout.rstrip().endswith("revoked")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["create"], "Missing option '--scope'"),
        (["create", "--scope", "root"], "'root' is not one of"),
        (["create", "--scope", "read", "--stream", "order"], "Did you mean 'orders'?"),
        (["create", "--scope", "read", "--expires", "2001-01-01"], "is past"),
        (["create", "--scope", "read", "--expires", "soon"], "90d or 12h from now"),
        (["create", "--scope", "read", "--rate", "0"], "--rate"),
        (["create", "--scope", "read", "--burst", "2"], "--burst goes with --rate"),
        (["revoke", "nothing"], "There is no key 'nothing'"),
    ],
)
def test_what_is_wrong_is_said(call: Callable[..., Any], arguments: list[str], text: str) -> None:
    done = call("apikey", *arguments, code=1 if "Did" in text or "There" in text else 2)
    assert text in done.stderr
    assert "No key was created yet" in call("apikey", "list").stderr


def test_keys_that_no_service_could_share(call: Callable[..., Any], local: Project) -> None:
    def listed(keys: str) -> str:
        warehouse = '[connections.warehouse]\nkind = "duckdb"\npath = "warehouse.duckdb"\n'
        (local.root / "weft.toml").write_text(f"[server]\nkeys = {keys}\n{warehouse}")
        return str(call("apikey", "list", code=1).stderr)

    assert "Did you mean 'warehouse'?" in listed('"wherehouse"')
    assert "cannot be kept in a duckdb database" in listed('"warehouse"')
    assert "must be the name of a connection" in listed("5")
