"""`weft connections`: list, check and set."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from weft.settings import user_file


def test_list_of_an_empty_project(run, project: Path) -> None:
    done = run("connections", "list")
    assert (done.returncode, done.stderr) == (0, "")
    header, line = done.stdout.splitlines()
    assert header.split() == ["name", "kind", "target", "source"]
    assert re.split(r"\s{2,}", line) == ["default", "sqlite", str(project / ".weft/weft.db"), "built in"]


def test_list_shows_sources_shadows_and_no_secret(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("weft.toml").write_text('modules = ["mine"]\n[connections.a]\nurl = "mysql://me:hunter2@h/db"\n')
    Path("mine.py").write_text("import weft\nweft.connect('sqlite:///a.db', name='a')\n")
    Path("more.py").write_text("import weft\nweft.connect('sqlite:///b.db', name='b')\n")
    monkeypatch.setenv("WEFT_DSN_A", "postgres://me:hunter2@h/db")
    done = run("connections", "list", "--module", "more")
    assert "hunter2" not in done.stdout + done.stderr
    assert re.search(r"^a +postgres +postgres://me:\*\*\*@h/db +env WEFT_DSN_A +weft\.toml, code$", done.stdout, re.M)
    assert re.search(r"^b +sqlite +sqlite:///b\.db +code$", done.stdout, re.M)


def test_list_as_json(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", "postgres://me:hunter2@h/db")
    done = run("connections", "list", "--format", "json")
    assert json.loads(done.stdout) == [
        {
            "name": "default",
            "kind": "postgres",
            "target": "postgres://me:***@h/db",
            "source": "env WEFT_DSN",
            "shadows": ["built in"],
            "problem": None,
        }
    ]


def test_list_goes_on_past_a_mistake(run) -> None:
    Path("weft.toml").write_text('[connections.bad]\nkind = "pulsar"\n')
    done = run("connections", "list")
    assert done.returncode == 0
    assert re.search(r"^bad +\? +weft\.toml$", done.stdout, re.M)
    assert "warning: bad: weft.toml, [connections.bad]: There is no kind of connection named 'pulsar'." in done.stderr


def test_check(run, system, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_IT", system.url)
    done = run("connections", "check", "it")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: it ")
    assert "source:   env WEFT_DSN_IT" in done.stdout
    report = json.loads(run("connections", "check", "it", "--format", "json").stdout)
    assert report.keys() >= {"name", "kind", "source", "server", "database", "latency_ms"}
    assert (report["name"], report["kind"]) == ("it", system.kind)


def test_check_that_fails(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_IT", "postgres://me:hunter2@127.0.0.1:1/db")
    done = run("connections", "check", "it")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Cannot open the connection 'it' (postgres://me:***@127.0.0.1:1/db)")
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr


def test_check_of_default(run, system, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", system.url)
    assert run("connections", "check").stdout.startswith("ok: default ")


def test_check_warns_that_streams_need_a_database(run, shared_server, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_server("mysql").database() as url:
        monkeypatch.setenv("WEFT_DSN", url.rpartition("/")[0])
        done = run("connections", "check")
        assert (done.returncode, done.stdout[:11]) == (0, "ok: default")
        assert "warning: Streams need a database. Name one in the URL: mysql://user@host/database" in done.stderr
        assert "database" not in done.stdout
        assert "warning" in json.loads(run("connections", "check", "--format", "json").stdout)
        monkeypatch.setenv("WEFT_DSN", url)
        assert run("connections", "check").stderr == ""


def test_check_of_an_unknown_name(run) -> None:
    done = run("connections", "check", "defualt")
    assert done.returncode == 1
    assert done.stderr == (
        "error: There is no connection named 'defualt'.\n"
        "  Did you mean 'default'? Define it with: weft connections set defualt=DSN, or in code: "
        "weft.register_connection(…)\n"
    )


def test_set_writes_the_user_file(run) -> None:
    done = run("connections", "set", "it=postgres://me:hunter2@h/db?sslmode=require")
    assert (done.returncode, done.stderr) == (0, "")
    assert "it = postgres://me:***@h/db?sslmode=require in ~/.weft/connections.toml" in done.stdout
    assert "weft connections check it" in done.stdout
    assert tomllib.loads(user_file().read_text()) == {
        "connections": {"it": {"url": "postgres://me:hunter2@h/db?sslmode=require"}}
    }
    assert not Path("weft.toml").exists()


def test_set_in_the_project_keeps_the_rest(run) -> None:
    Path("weft.toml").write_text("# mine\nmodules = []\n")
    done = run("connections", "set", "--project", "it=postgres://me:${PASSWORD}@h/db")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("weft.toml").read_text() == (
        '# mine\nmodules = []\n\n[connections.it]\nurl = "postgres://me:${PASSWORD}@h/db"\n'
    )


def test_set_warns_of_a_password_in_the_project(run) -> None:
    done = run("connections", "set", "--project", "my-db=mysql://me:hunter2@h/db")
    assert done.returncode == 0
    assert "${MY_DB_PASSWORD}" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_set_tells_what_wins_over_it(run) -> None:
    Path("weft.toml").write_text('[connections.it]\nurl = "sqlite:///a.db"\n')
    assert "also defined by weft.toml, which wins" in run("connections", "set", "it=sqlite:///b.db").stderr


def test_set_tells_what_it_replaces(run) -> None:
    assert run("connections", "set", "it=postgres://me:hunter2@h/db").stderr == ""
    assert run("connections", "set", "it=postgres://me:hunter2@h/db").stderr == ""
    done = run("connections", "set", "it=sqlite:///a.db")
    assert done.stderr == "note: it replaces postgres://me:***@h/db\n"


def test_remove(run) -> None:
    run("connections", "set", "it=sqlite:///a.db")
    run("connections", "set", "it=sqlite:///b.db", "--project")
    done = run("connections", "remove", "it")
    assert (done.returncode, done.stdout) == (0, "it is removed from ~/.weft/connections.toml\n")
    assert done.stderr == "note: it is still defined by weft.toml.\n"
    done = run("connections", "remove", "it")
    assert done.returncode == 1
    assert done.stderr == (
        "error: There is no connection named 'it' in ~/.weft/connections.toml.\n"
        "  It is defined by weft.toml. Try with --project.\n"
    )
    assert "Did you mean 'it'?" in run("connections", "remove", "itt", "--project").stderr
    done = run("connections", "remove", "it", "--project")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("weft.toml").read_text() == ""
    assert "There is no connection named 'it'." in run("connections", "remove", "it").stderr


def test_set_takes_a_reference_that_is_not_set_yet(run) -> None:
    assert run("connections", "set", "it=${LATER}").returncode == 0


@pytest.mark.parametrize(
    ("definition", "code", "message"),
    [
        ("postgres://me:hunter2@h", 2, "Give NAME=DSN"),
        ("it=", 2, "Give NAME=DSN"),
        ("it=hunter2", 1, "must begin with a scheme"),
        ("it=postgers://me:hunter2@h", 1, "Did you mean 'postgres'?"),
        ("it=mysql://me:hunter2@h?ssl_caa=1", 1, "Did you mean 'ssl_ca'?"),
        ("a b=sqlite:///a.db", 1, "cannot be the name of a connection"),
    ],
)
def test_set_refuses_what_cannot_be_right(run, definition: str, code: int, message: str) -> None:
    done = run("connections", "set", definition)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "hunter2" not in done.stderr
    assert not user_file().exists()
