"""The commands for pipelines, as a person or a cron job runs them."""

from __future__ import annotations

import json
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from servers import wait_until
from weft.operate.runlog import open_run_log
from weft.operate.scheduler import LEADER

PIPELINES = '''
import logging
import weft
from weft.expectations import range

@weft.pipeline(target="analytics.events", schedule="*/5 * * * *", incremental_column="id", retry={"max_attempts": 2})
def ingest(conn):
    """Copies events."""
    logging.getLogger("mine").info("hello from the function")
    return "SELECT id, name FROM raw_events"

@weft.pipeline(target="analytics.counts", mode="merge", keys=["name"], schedule="@daily", depends_on=["ingest"])
def counts():
    return 'SELECT name, count(*) AS n FROM "analytics.events" GROUP BY name'

EXPECTED = [range("id", max=1, on_failure="warn")]

@weft.pipeline(target="analytics.picky", expectations=EXPECTED, transforms_post=["SELECT 1"])
def picky():
    return "SELECT id, name FROM raw_events"
'''


@pytest.fixture
def shop(project: Path) -> sqlite3.Connection:
    """A project with three pipelines and two rows."""
    Path("shop_pipelines.py").write_text(PIPELINES)
    Path("weft.toml").write_text('modules = ["shop_pipelines"]\n')
    Path(".weft").mkdir()
    client = sqlite3.connect(".weft/weft.db", isolation_level=None)
    client.execute("CREATE TABLE raw_events (id INTEGER, name TEXT)")
    client.execute("INSERT INTO raw_events VALUES (1, 'a'), (2, 'b')")
    return client


def test_list(run: Any, shop: sqlite3.Connection) -> None:
    done = run("list")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["ingest", "counts", "picky"]
    found = json.loads(run("list", "--format", "json").stdout)
    assert found[1]["depends_on"] == ["ingest"]
    assert found[0]["description"] == "Copies events."
    assert found[0]["declared"] == "shop_pipelines.py, line 6"


def test_run(run: Any, shop: sqlite3.Connection) -> None:
    done = run("run", "ingest")
    assert done.returncode == 0, done.stderr
    assert "succeeded ingest" in done.stdout
    assert "analytics.events: 2 read, 2 inserted (pushdown)" in done.stdout
    assert done.stderr == ""
    (found,) = json.loads(run("run", "ingest", "--format", "json").stdout)
    assert (found["status"], found["targets"][0]["rows_read"], found["error"]) == ("succeeded", 0, None)
    assert shop.execute('SELECT count(*) FROM "analytics.events"').fetchone() == (2,)


def test_run_all_in_their_order(run: Any, shop: sqlite3.Connection) -> None:
    done = run("run", "--all")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        "ingest",
        "counts",
        "picky",
    ]
    assert "warning: range(id, max=1): 1 of 2 rows" in done.stdout
    assert "then SELECT 1" in done.stdout


def test_run_what_waits_for_a_failure(run: Any, shop: sqlite3.Connection) -> None:
    shop.execute("DROP TABLE raw_events")
    done = run("run", "ingest", "counts")
    assert done.returncode == 1
    assert "failed ingest" in done.stdout and "skipped counts" in done.stdout
    assert "waiting on upstream: ingest" in done.stdout
    assert "no such table: raw_events" in done.stderr


def test_run_due_and_status(run: Any, shop: sqlite3.Connection) -> None:
    before = run("status")
    assert "never run" in before.stdout
    # Nothing was made for that.
    assert not Path(".weft/runs.db").exists()
    done = run("run-due")
    assert done.returncode == 0, done.stderr
    assert "succeeded ingest" in done.stdout and "succeeded counts" in done.stdout
    assert run("run-due", "counts").stdout == "Nothing is due.\n"
    found = {row["pipeline"]: row for row in json.loads(run("status", "--format", "json").stdout)}
    assert (found["counts"]["status"], found["counts"]["now"]) == ("succeeded", "done")
    assert (found["picky"]["status"], found["picky"]["now"]) == ("never run", "no schedule")


def test_status_shows_what_is_stale(run: Any, project: Path) -> None:
    Path("watched.py").write_text(
        "import weft\n"
        "weft.pipeline(name='daily', target='t', expect_within='2h')(lambda: [])\n"
        "weft.streaming_pipeline(name='clicks', source='here', source_query='a', target='here', target_table='c', "
        "expect_within='1h')(lambda: None)\n"
    )
    Path("weft.toml").write_text('modules = ["watched"]\n')

    def stands() -> dict[str, tuple[str, str]]:
        found = json.loads(run("status", "--format", "json").stdout)
        return {row["pipeline"]: (row["status"], row["now"]) for row in found}

    assert stands() == {"daily": ("never run", "no schedule"), "clicks": ("streaming", "no rows yet")}
    with open_run_log() as log:
        log.watch("daily")
        log.note_rows("streaming:clicks")
        assert stands()["clicks"] == ("streaming", "fresh")
        for name in ("daily", "streaming:clicks"):
            log._book.locked(
                name,
                lambda each: each.change(
                    dict.fromkeys(("watched_at", "succeeded_at"), each.claim.now - timedelta(hours=3))
                ),
            )
    assert stands() == {"daily": ("never run", "no schedule, stale"), "clicks": ("streaming", "stale")}
    assert [line.split()[0] for line in run("status", "clicks").stdout.splitlines()[1:]] == ["clicks"]


def test_streaming_pipelines_alone(run: Any, start: Any, project: Path) -> None:
    clicks = (
        "import weft\n"
        "weft.streaming_pipeline(name='clicks', source='here', source_query='a', target='here', target_table='c', "
        "expect_within='1h')(lambda: None)\n"
    )
    Path("watched.py").write_text(clicks)
    Path("weft.toml").write_text('modules = ["watched"]\nalerters = ["stdout://"]\n')
    done = run("status", "clicsk")
    assert done.returncode == 1 and "Did you mean 'clicks'?" in done.stderr
    with open_run_log() as log:
        log.note_rows("streaming:clicks")
        log._book.locked(
            "streaming:clicks", lambda each: each.change({"succeeded_at": each.claim.now - timedelta(hours=3)})
        )
    done = run("run-due")
    assert done.returncode == 0, done.stderr
    assert "Nothing is due." in done.stdout and "clicks had no row for 3:0" in done.stdout + done.stderr
    assert run("run-due", "clicks").returncode == 1
    scheduler = start("scheduler")
    with open_run_log() as log:
        wait_until(
            lambda: scheduler.poll() is not None or log.latest([LEADER])[LEADER].is_live, "the scheduler to lead", 120
        )
    scheduler.terminate()
    assert scheduler.wait(120) == 0
    # A pipeline may have the same name.
    Path("watched.py").write_text(f"{clicks}weft.pipeline(name='clicks', target='t')(lambda: [])\n")
    found = json.loads(run("status", "clicks", "--format", "json").stdout)
    assert [(row["pipeline"], row["status"]) for row in found] == [("clicks", "never run"), ("clicks", "streaming")]


def test_a_run_log_needs_no_module(run: Any, shop: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("run", "ingest").returncode == run("run", "counts").returncode == 0
    log = f"sqlite:///{Path('.weft/runs.db').absolute()}"
    with open_run_log(log) as opened:
        opened.attend("process:worker:1")  # is no pipeline
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    found = json.loads(run("status", "--run-log", log, "--format", "json").stdout)
    assert [(row["pipeline"], row["status"], row["now"]) for row in found] == [
        ("counts", "succeeded", "not declared here"),
        ("ingest", "succeeded", "not declared here"),
    ]
    assert [line.split()[0] for line in run("status", "counts", "--run-log", log).stdout.splitlines()[1:]] == ["counts"]
    assert "Did you mean 'counts'?" in run("status", "count", "--run-log", log).stderr
    listed = json.loads(run("runs", "list", "--run-log", log, "--format", "json").stdout)
    assert [row["pipeline"] for row in listed] == ["counts", "ingest"]
    # Without the log there is nothing to show.
    assert "No pipeline is declared." in run("status").stderr


def test_a_failure_is_tried_again_later(run: Any, shop: sqlite3.Connection) -> None:
    shop.execute("ALTER TABLE raw_events RENAME TO away")
    done = run("run-due", "--alerter", "stdout://")
    assert done.returncode == 1
    assert "failed ingest" in done.stdout and "It is tried again after" in done.stdout
    assert "✗ ingest failed (attempt 1 of 2" in done.stderr
    assert "skipped counts" in done.stdout
    found = {row["pipeline"]: row for row in json.loads(run("status", "--format", "json").stdout)}
    assert found["counts"]["now"] == "waiting on upstream: ingest"
    assert found["ingest"]["now"].startswith("retry at")
    assert "no such table" in found["ingest"]["error"]


def test_runs_and_logs(run: Any, shop: sqlite3.Connection) -> None:
    run("run", "ingest")
    shop.execute("DROP TABLE raw_events")
    run("run", "picky")
    found = json.loads(run("runs", "list", "--format", "json").stdout)
    assert [(row["pipeline"], row["status"]) for row in found] == [("picky", "failed"), ("ingest", "succeeded")]
    shown = run("runs", "show", found[1]["run_id"]).stdout
    assert "ingest, attempt 1: succeeded" in shown and "analytics.events: 2 read, 2 inserted" in shown
    assert "no such table" in run("runs", "show", found[0]["run_id"]).stdout
    assert [
        row["pipeline"] for row in json.loads(run("runs", "list", "--status", "failed", "--format", "json").stdout)
    ] == ["picky"]
    assert "hello from the function" in run("logs", "ingest").stdout
    unknown = run("runs", "show", "nope")
    assert (unknown.returncode, found[0]["run_id"] in unknown.stderr) == (1, True)
    assert "hello from the function" in run("logs", "ingest", "--run", found[1]["run_id"]).stdout
    mistaken = run("logs", "ingest", "--run", found[0]["run_id"])
    assert (mistaken.returncode, mistaken.stdout) == (1, "")
    assert f"is one of 'picky', not of 'ingest'.\n  weft logs picky --run {found[0]['run_id']}" in mistaken.stderr
    assert "Did you mean 'ingest'?" in run("logs", "ingst").stderr


def test_a_skip_is_shown_as_one(run: Any, shop: sqlite3.Connection) -> None:
    run("run-due", "counts")
    (skip,) = json.loads(run("runs", "list", "--format", "json").stdout)
    shown = run("runs", "show", skip["run_id"]).stdout
    assert shown.startswith("counts: skipped\n") and "waiting on upstream: ingest" in shown
    assert "None" not in shown and "attempt" not in shown
    assert run("logs", "counts").stdout == "skipped: waiting on upstream: ingest\n"
    # What was attempted is what has a log, also where it was skipped since.
    run("run", "counts")
    run("run-due", "counts")
    assert "no such table" in run("logs", "counts").stdout


def test_quarantined_rows_are_counted(run: Any, shop: sqlite3.Connection) -> None:
    Path("strict.py").write_text(
        "import weft\nfrom weft.expectations import range\n\n"
        "@weft.pipeline(target='kept', expectations=[range('id', max=1, on_failure='quarantine')])\n"
        "def strict():\n    return 'SELECT id, name FROM raw_events'\n"
    )
    assert "2 read, 1 inserted, 1 quarantined" in run("run", "strict", "--module", "strict").stdout
    run("run", "ingest")
    (found,) = json.loads(run("status", "strict", "--module", "strict", "--format", "json").stdout)
    assert found["quarantined"] == 1
    heading, *lines = run("status", "strict", "--module", "strict").stdout.splitlines()
    assert heading.split()[-1] == "quarantined" and lines[0].split()[-1] == "1"
    heading, _, first = run("runs", "list").stdout.splitlines()
    assert heading.split()[-1] == "quarantined" and first.split()[-1] == "1"
    # Nothing is said of it where there is nothing.
    assert "quarantined" not in run("runs", "list", "--pipeline", "ingest").stdout


def test_preview_changes_nothing(run: Any, shop: sqlite3.Connection) -> None:
    done = run("preview", "ingest")
    assert done.returncode == 0, done.stderr
    assert "ingest → analytics.events (append, pushdown: inside the database, no Spark)" in done.stdout
    assert "the table is created: CREATE TABLE" in done.stdout and "2 read, 2 inserted" in done.stdout
    assert "The first 2 rows, as the source has them\nid  name\n 1  a\n" in done.stdout
    assert shop.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    run("run", "ingest")
    tables = sorted(shop.execute("SELECT name FROM sqlite_master").fetchall())
    shop.execute("INSERT INTO raw_events VALUES (3, 'c')")
    (found,) = json.loads(run("preview", "ingest", "--format", "json", "--rows", "1").stdout)
    assert (found["engine"], found["changes"]["inserted"], len(found["sample"])) == ("pushdown", 1, 1)
    assert found["plan"] and "raw_events" in found["sql"]
    assert sorted(shop.execute("SELECT name FROM sqlite_master").fetchall()) == tables
    assert shop.execute('SELECT count(*) FROM "analytics.events"').fetchone() == (2,)
    assert shop.execute('SELECT value FROM "weft.watermarks"').fetchone() == ("2",)


def test_preview_of_what_would_be_refused(run: Any, shop: sqlite3.Connection) -> None:
    run("run", "counts")
    shop.execute('CREATE TABLE "analytics.counts" (name TEXT PRIMARY KEY, n INTEGER)')
    shop.execute('CREATE TABLE "analytics.events" (id INTEGER, name TEXT)')
    shop.execute("""INSERT INTO "analytics.events" VALUES (1, NULL)""")
    done = run("preview", "counts")
    assert done.returncode == 1
    assert "refused:" in done.stdout


def test_validate(run: Any, shop: sqlite3.Connection) -> None:
    done = run("validate", "ingest", "picky")
    assert done.returncode == 0, done.stderr
    assert "append by pushdown; creates the table; exactly once" in done.stdout
    shop.execute("DROP TABLE raw_events")
    done = run("validate", "--format", "json")
    assert done.returncode == 1
    problems = {row["pipeline"]: row["problem"] for row in json.loads(done.stdout) if row["problem"]}
    assert "no such table: raw_events" in problems["ingest"]


def test_dry_run(run: Any, shop: sqlite3.Connection) -> None:
    found = {row["pipeline"]: row for row in json.loads(run("dry-run", "--format", "json").stdout)}
    assert {name: (row["would"], row["why"]) for name, row in found.items()} == {
        "ingest": ("run", "due"),
        "counts": ("run", "once ingest succeeded"),
        "picky": ("not run", "no schedule"),
    }
    (alone,) = json.loads(run("dry-run", "counts", "--format", "json").stdout)
    assert (alone["would"], alone["why"]) == ("wait", "waiting on upstream: ingest")
    assert "analytics.events: new table, 2 read, 2 inserted" in run("dry-run", "ingest").stdout
    assert not Path(".weft/runs.db").exists()


def test_doctor(run: Any, shop: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "streams: 0, pipelines: 3, streaming pipelines: 0" in done.stdout
    monkeypatch.setenv("WEFT_DSN_LAKE", "postgres://me:hunter2@127.0.0.1:1/nowhere")
    done = run("doctor", "--format", "json")
    assert done.returncode == 1
    (problem,) = [row for row in json.loads(done.stdout) if row["result"] == "problem"]
    assert problem["what"] == "connection lake"
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "ingst"), "Did you mean 'ingest'?"),
        (("run",), "Name one of: ingest, counts, picky. Or --all."),
        (("preview", "ingst"), "Did you mean 'ingest'?"),
        (("validate", "ingst"), "Did you mean 'ingest'?"),
        (("run", "ingest", "--run-log", "sqlit://x"), "Did you mean sqlite://?"),
        (("run", "ingest", "--alerter", "slak://x"), "Did you mean slack://?"),
    ],
)
def test_wrong_names(run: Any, shop: sqlite3.Connection, arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert said in done.stderr


def test_run_log_and_alerters_of_the_project(run: Any, shop: sqlite3.Connection) -> None:
    Path("weft.toml").write_text(
        'modules = ["shop_pipelines"]\nrun_log = "sqlite://mine.db"\nalerters = ["stdout://"]\n'
    )
    shop.execute("DROP TABLE raw_events")
    assert "✗ ingest failed" in run("run", "ingest").stderr
    assert Path("mine.db").exists() and not Path(".weft/runs.db").exists()
    assert "failed" in run("status", "ingest").stdout
    Path("weft.toml").write_text("run_log = 5\n")
    assert "run_log must be a URL" in run("list").stderr


def test_what_pipelines_print_does_not_spoil_json(run: Any, shop: sqlite3.Connection) -> None:
    Path("loud.py").write_text(
        "import weft\n\n@weft.pipeline(target='loud')\ndef loud():\n    print('printed')\n    return [{'a': 1}]\n"
    )
    done = run("run", "loud", "--module", "loud", "--format", "json")
    assert json.loads(done.stdout)[0]["status"] == "succeeded"
    assert "printed" in done.stderr


def test_two_of_one_name_in_a_module(run: Any, shop: sqlite3.Connection) -> None:
    text = "@weft.pipeline(target='t')\ndef same():\n    return 'SELECT 1 AS id'\n\n"
    Path("twice.py").write_text(f"import weft\n\n{text}{text}")
    done = run("list", "--module", "twice")
    assert done.returncode == 1
    assert "'same' is declared twice: twice.py, line 3 and twice.py, line 7" in done.stderr


def test_no_secret_of_a_function_is_shown(run: Any, shop: sqlite3.Connection) -> None:
    Path("leaky.py").write_text(
        "import weft\n\n@weft.pipeline(target='t')\ndef leaky():\n"
        "    raise RuntimeError('cannot reach postgres://me:hunter2@db/x')\n"
    )
    for command in (("run", "leaky"), ("preview", "leaky"), ("validate", "leaky"), ("dry-run", "leaky")):
        done = run(*command, "--module", "leaky")
        assert "hunter2" not in done.stdout + done.stderr, command
        assert "cannot reach" in done.stdout + done.stderr, command
        assert "Traceback" not in done.stderr, command


def test_nothing_declared(run: Any, project: Path) -> None:
    done = run("list")
    assert done.returncode == 1
    assert "No pipeline is declared." in done.stderr and "--module my_pipelines" in done.stderr


def test_streaming_pipelines_are_told_apart(run: Any, project: Path) -> None:
    """Who takes the command of the other kind is told which one it is."""
    Path("flows.py").write_text(
        "import weft\n\nweft.stream('clicks')(lambda: None)\n"
        "weft.streaming_pipeline(name='copies', source=weft.Source(query='clicks'), target='default',"
        " target_table='t')(lambda: None)\n"
    )
    Path("tables.py").write_text(
        "import weft\n\n@weft.pipeline(target='t')\ndef ones():\n    return 'SELECT 1 AS id'\n"
    )
    assert "weft consume-list lists them" in run("list", "--module", "flows").stderr
    assert "weft list lists them" in run("consume-list", "--module", "tables").stderr
    both = ("--module", "flows", "--module", "tables")
    assert "Run it with: weft consume copies" in run("run", "copies", *both).stderr
    assert "Run it with: weft run ones" in run("consume", "ones", *both).stderr


def test_on_a_terminal(on_a_terminal: Any, shop: sqlite3.Connection) -> None:
    code, shown = on_a_terminal("run", "--all")
    assert code == 0
    assert "succeeded ingest" in shown
    code, shown = on_a_terminal("status")
    assert "ingest" in shown and "succeeded" in shown


@pytest.mark.parametrize("columns", [60, 80])
def test_errors_on_a_narrow_terminal(on_a_terminal: Any, run: Any, shop: sqlite3.Connection, columns: int) -> None:
    shop.execute("DROP TABLE raw_events")
    run("run-due")
    (failed,) = json.loads(run("runs", "list", "--status", "failed", "--format", "json").stdout)
    for command in (("status",), ("runs", "list")):
        code, shown = on_a_terminal(*command, columns=columns)
        assert code == 0
        assert "no such table: raw_events" in " ".join(shown.split())
        assert [line for line in shown.splitlines() if len(line.rstrip()) > columns] == []
    assert failed["run_id"] in shown


def test_pause_and_cancel(run: Any, shop: sqlite3.Connection) -> None:
    done = run("pause", "ingest")
    assert done.stdout == "ingest is paused. To go on: weft resume ingest\n"
    assert run("pause", "ingest").stdout.startswith("ingest is paused already.")
    assert "ingest" not in run("run-due").stdout.replace("waiting on upstream: ingest", "")
    (state,) = json.loads(run("status", "ingest", "--format", "json").stdout)
    assert state["now"] == "paused"
    assert run("resume", "ingest").stdout == "ingest goes on.\n"
    assert run("resume", "ingest").stdout == "ingest was not paused.\n"
    done = run("pause", "injest")
    assert done.returncode == 1 and "Did you mean 'ingest'?" in done.stderr

    shop.execute("DROP TABLE raw_events")
    assert run("run-due", "ingest").returncode == 1
    (attempt,) = json.loads(run("runs", "list", "--pipeline", "ingest", "--format", "json").stdout)
    assert attempt["retry_at"] is not None
    assert run("runs", "cancel", attempt["run_id"]).stdout == "ingest is not tried again for this run.\n"
    done = run("runs", "cancel", attempt["run_id"])
    assert done.returncode == 1 and "has ended: cancelled" in done.stderr
    assert "There is no run 'x'" in run("runs", "cancel", "x").stderr
    assert json.loads(run("status", "ingest", "--format", "json").stdout)[0]["now"] == "cancelled"
