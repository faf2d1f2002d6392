"""`weft shell`: queries at a prompt."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from lent_session import lent_session
from servers import wait_until
from weft.cli.shell import Shell
from weft.engine import queries, relations
from weft.project import Project

Call = Callable[..., Any]


@pytest.fixture
def shop(local: Project) -> None:
    weft.register_connection(weft.SQLiteConnection("shop.db", name="shop"))
    with sqlite3.connect("shop.db") as database:
        database.execute("CREATE TABLE cities (id INTEGER, name TEXT)")
        database.execute('CREATE TABLE "sales.orders" (id INTEGER, "odd name" TEXT)')
        database.execute("INSERT INTO cities VALUES (1, 'Oslo')")
    database.close()

    @weft.stream(name="clicks", fields={"page": "string"}, connection="shop")
    def clicks() -> None:
        pass

    weft.publish_sync(clicks, [{"page": "a"}])


def test_statements() -> None:
    assert queries.statements("SELECT 1; SELECT ';' -- ;\n; SELECT") == (["SELECT 1;", "SELECT ';' -- ;\n;"], "SELECT")
    assert queries.statements("SELECT 'a;") == ([], "SELECT 'a;")
    assert queries.statements("SELECT 1; -- done") == (["SELECT 1;"], "")
    assert queries.statements(" -- nothing\n") == ([], "")


def test_lines(call: Call, shop: None, plain_spark: Any) -> None:
    typed = """
        SELECT id,   -- one line of two
          name FROM shop.cities;
        \\d shop.cities
        SELECT nam FROM shop.cities;
        DROP TABLE shop.cities; SELECT 1 AS "after;";
        SELECT count(*) AS n FROM clicks
    """
    done = call("shell", stdin=typed, code=1)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["id", "name"],
        ["1", "Oslo"],
        ["column", "type"],
        ["id", "int64"],
        ["name", "string"],
        ["after;"],
        ["1"],
        ["n"],
        ["1"],
    ]
    assert "Did you mean 'name'?" in done.stderr
    assert "Only queries are run here" in done.stderr
    assert call("shell", stdin="SELECT 1 AS a;\n\\q\nSELECT 2;").stdout.split() == ["a", "1"]


def test_list_of_tables(call: Call, shop: None) -> None:
    weft.connect(url="postgres://nobody@localhost:1/none", name="dead")
    weft.register_connection(weft.ObjectStoreLocalConnection("lake", name="lake"))
    shown = {tuple(line.split(maxsplit=1)) for line in call("shell", stdin="\\d\n").stdout.splitlines()}
    assert shown == {
        ("name", "kind"),
        ("events.clicks", "stream"),
        ("shop.cities", "sqlite table"),
        ("shop.sales.orders", "sqlite table"),
        ("dead.…", "postgres"),
        ("default.…", "sqlite"),
        ("lake.…", "object_store_local"),
    }
    assert "list the columns" in call("shell", stdin="\\?\n").stdout
    assert "Did you mean 'shop'" in call("shell", "--connection", "shpo", code=1).stderr


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql", "duckdb"])
def test_names_of_a_database(
    kind: str, local: Project, open_system: Callable[[str], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    def check(url: str) -> None:
        connection = weft.connect(url=url, name="warehouse")
        weft.load([{"id": 1}], target="plain", connection="warehouse")
        weft.load([{"id": 1}], target=(f"sales_{os.getpid()}", "odd name"), connection="warehouse")
        names = relations.names_on(connection)
        assert {"plain", f'sales_{os.getpid()}."odd name"'} <= {*names}
        assert not [each for each in names if each.startswith(("weft", "information_schema", "pg_"))]

    if kind == "duckdb":
        check(f"duckdb:///{tmp_path / 'd.db'}")
    else:
        with open_system(kind) as system:
            check(system.url)


@pytest.mark.parametrize("kind", ["delta_local", "object_store_local"])
def test_names_in_a_lake(kind: str, local: Project, tmp_path: Path) -> None:
    """What loads leave there, as far as names go: without Spark."""
    log = "{}/_delta_log" if kind == "delta_local" else "_weft/{}/log"
    for parent, table in (("", "plain"), ("sales/", "odd%3Aname"), ("sales/", "orders"), ("_hidden/", "no")):
        (tmp_path / "lake" / parent / log.format(table)).mkdir(parents=True)
        (tmp_path / "lake" / parent / table).mkdir(exist_ok=True)
    (tmp_path / "lake" / "sales" / "no_table").mkdir()
    lake = weft.connect(kind=kind, path=str(tmp_path / "lake"), name="lake")
    assert relations.names_on(lake) == ["plain", 'sales."odd:name"', "sales.orders"]
    assert Shell(None).completions("lake.s", "") == ['lake.sales."odd:name"', "lake.sales.orders"]
    missing = weft.connect(kind=kind, path=str(tmp_path / "nowhere"), name="missing")
    assert relations.names_on(missing) == []


def test_completion(shop: None) -> None:
    complete = Shell(None).completions
    assert complete("sh", "") == ["shop."]
    assert complete("shop.", "") == ["shop.cities", "shop.sales.orders"]
    assert complete("shop.sales", "") == ["shop.sales.orders"]
    assert complete("cli", "") == ["clicks"]
    assert complete("events.c", "") == ["events.clicks"]
    assert complete("SEL", "") == ["SELECT"]
    assert complete("na", "SELECT na FROM shop.cities") == ["name"]
    assert complete("c.n", "SELECT c.n FROM shop.cities c") == ["c.name"]
    assert complete("o", "FROM shop.sales.orders SELECT o") == ["on", "or", "order"]
    assert complete('"o', "FROM shop.sales.orders SELECT o") == ['"odd name"']
    assert complete("pa", "SELECT pa FROM clicks JOIN nothing.at.all") == ["page"]
    assert Shell("shop").completions("ci", "") == ["cities"]


@pytest.fixture
def terminal(project: Path, plain_spark: Any) -> Iterator[Callable[[], Terminal]]:
    opened: list[Terminal] = []
    with lent_session() as variables:

        def start() -> Terminal:
            opened.append(Terminal({**os.environ, **variables}))
            return opened[-1]

        yield start
        for each in opened:
            each.close()


class Terminal:
    """A shell at a terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.leader, follower = pty.openpty()
        command = [sys.executable, "-m", "weft", "shell"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
        self.process: subprocess.Popen[bytes] = warm_python.Popen(command, env=environment, **streams)
        os.close(follower)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def wait_for(self, text: str, seconds: float = 120, *, between: Callable[[], None] = lambda: None) -> str:
        """Wait until this is shown; return what was shown up to it, and forget that. `between` is called meanwhile."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-500:]
            if select.select([self.leader], [], [], 1)[0]:
                part = os.read(self.leader, 65536).decode(errors="replace")
                self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part)
            else:
                between()
        before, _, self.shown = self.shown.partition(text)
        return before

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read until it ends: it waits until what it wrote is read."""
        with suppress(OSError):  # how Linux ends a terminal
            while os.read(self.leader, 65536):
                pass
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leader)


@pytest.mark.timing
def test_at_a_terminal(terminal: Callable[[], Terminal], plain_spark: Any) -> None:
    """Ctrl-C stops a query and keeps the shell; lines are completed, and kept for the next time."""
    Path("weft.toml").write_text('[connections.shop]\nurl = "sqlite:///shop.db"\n')
    with sqlite3.connect("shop.db") as database:
        database.execute("CREATE TABLE cities (id INTEGER, name TEXT)")
        database.execute("INSERT INTO cities VALUES (1, 'Oslo')")
    database.close()
    shell = terminal()
    shell.wait_for("weft> ")
    shell.type("SELECT name FROM shop.ci\t;\n")
    assert "Oslo" in shell.wait_for("1 row")
    shell.wait_for("weft> ")
    shell.type("SELECT count(*) FROM range(0, 400000000, 1, 40000);\n")
    tracker = plain_spark.sparkContext.statusTracker()  # of the JVM that the shell uses too
    wait_until(lambda: bool(tracker.getActiveJobsIds()), "the query", 120)
    shell.interrupt()
    shell.wait_for("stopped")
    shell.wait_for("weft> ")
    shell.type("SELECT 'half\n")
    shell.wait_for("....> ")
    shell.interrupt()
    # It hung here once in a run. Perhaps Ctrl-C came after the prompt, and before Python waited for a key.
    shell.wait_for("weft> ", between=shell.interrupt)
    shell.type("SELECT 40 + 2 AS answer;\n")
    assert "42" in shell.wait_for("1 row")
    shell.type("\\q\n")
    assert shell.end() == 0
    history = Path(".weft/shell_history")
    assert "SELECT name FROM shop.cities" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    again = terminal()
    again.wait_for("weft> ")
    again.type("\x1b[A\x1b[A\n")  # two lines up
    assert "42" in again.wait_for("1 row")
    again.wait_for("weft> ")  # before it, the terminal takes the end for that of a line
    again.type("\x04")
    assert again.end() == 0


def test_ctrl_c_stops_what_runs(shop: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    prompt, cancelled, ended = Shell(None), threading.Event(), threading.Event()
    # Tests that were started in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def query(text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled.wait(60)
        ended.set()
        raise weft.WeftError("cancelled")

    monkeypatch.setattr(prompt, "_query", query)
    monkeypatch.setattr("weft.cli.shell._cancel_jobs", cancelled.set)
    try:
        assert prompt.take("SELECT 1;")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\nstopped\n"
    assert ended.is_set() and not prompt.failed
