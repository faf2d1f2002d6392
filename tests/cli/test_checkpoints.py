"""`weft checkpoints`: how far a pipeline has come, and having it read again from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import warm_python
import weft
from servers import wait_until
from weft.engine.streaming.checkpoint import Checkpoint
from weft.project import Project
from weft.spark_support.folder import LocalFolder
from weft.systems.process import name_of
from workers import declare, drain, next_millisecond, rowids

pytestmark = pytest.mark.spark

pytest.importorskip("pyspark")


@pytest.fixture
def numbers(local: Project) -> Any:
    """A stream with the events 1 to 10, and pipelines that add them to a table and merge them into another."""

    @weft.stream(fields={"n": "int64"})
    def numbers() -> None:
        pass

    @weft.streaming_pipeline(source=numbers, target="default", target_table="copies")
    def copies() -> None:
        pass

    @weft.streaming_pipeline(source=numbers, target="default", target_table="merged", mode="merge", keys=["n"])
    def merged() -> None:
        pass

    weft.publish_sync(numbers, [{"n": n} for n in range(1, 11)])
    return numbers


def rows(table: str = "copies") -> list[int]:
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        return sorted(n for (n,) in database.execute(f"SELECT n FROM {table}"))


def test_a_look_makes_nothing(call: Any, local: Project) -> None:
    """Of a pipeline that never ran: neither the database nor the table of its stream."""
    for name in ("one", "other"):
        stream = weft.stream(name=name, fields={"n": "int64"})(lambda: None)
        weft.streaming_pipeline(name=f"{name}_copies", source=stream, target="default", target_table="copies")(
            lambda: None
        )

    def lag(name: str) -> object:
        return json.loads(call("checkpoints", "show", f"{name}_copies", "--format", "json").stdout)["lag"]

    assert lag("one") == {"one": 0}
    assert not Path(".weft").exists() or not list(Path(".weft").iterdir())
    weft.publish_sync("other", [{"n": 1}, {"n": 2}])
    assert (lag("one"), lag("other")) == ({"one": 0}, {"other": 2})
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        assert not database.execute("SELECT name FROM sqlite_master WHERE name LIKE '%one%'").fetchall()


@pytest.mark.full
@pytest.mark.parametrize("system", ["redis"], indirect=True)
def test_rows_of_a_large_batch(call: Any, streams: Project, system: Any) -> None:
    """They are counted to the end, also on Redis, where that takes reading them."""
    weft.register_connection(weft.SQLiteConnection("out.db", name="out"))
    stream = declare("many", fields={"n": "int64"})
    rows_published = 120_000
    weft.publish_sync(stream, [{"n": n} for n in range(rows_published)])
    sql = "SELECT count(*) AS n FROM source"
    weft.streaming_pipeline(name="counts", source=stream, target="out", target_table="counts", transform_sql=sql)(
        lambda: None
    )
    (line,) = call("consume", "counts", "--once", "--format", "json").stdout.splitlines()
    assert (json.loads(line)["consumed"], json.loads(line)["written"]) == (rows_published, {"counts": 1})


def test_rewind_and_reset(call: Any, checkpoints: Any, numbers: Any) -> None:
    assert call("checkpoints", "list").stderr == "There are no checkpoints.\n"
    call("consume", "copies", "--once")
    shown = checkpoints("show", "copies")
    assert (shown["committed"], shown["planned"], shown["running"]) == (0, 0, None)
    assert (shown["offsets"], shown["lag"]) == ({"numbers": 10}, {"numbers": 0})
    assert shown["location"] == str(Path(".weft/checkpoints/copies").absolute())
    (listed,) = json.loads(call("checkpoints", "list", "--format", "json").stdout)
    assert listed == {name: value for name, value in shown.items() if name != "lag"}
    assert call("checkpoints", "list").stdout.splitlines()[1].split()[0] == "copies"

    # Nothing is done by a dry run.
    would = call("checkpoints", "rewind", "copies", "--to-offset", "8", "--dry-run").stdout
    assert would == "copies would begin with event 8 of numbers; it was at 10.\nNothing was done.\n"
    told = "copies would begin again, as if it had never run.\nNothing was done.\n"
    assert call("checkpoints", "reset", "copies", "--dry-run").stdout == told
    assert checkpoints("show", "copies") == shown
    call("consume", "copies", "--once")
    assert rows() == list(range(1, 11))

    # To an offset: the event of that offset is the first to come again.
    done = call("checkpoints", "rewind", "copies", "--to-offset", "8")
    assert done.stdout.startswith("copies begins with event 8 of numbers; it was at 10.\nTo bring the old checkpoint ")
    assert done.stderr == "note: rows that are read again are added again to copies.\n"
    assert checkpoints("show", "copies")["lag"] == {"numbers": 3}
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(1, 11), 8, 9, 10])
    again = checkpoints("show", "copies")
    assert (again["offsets"], again["lag"]) == ({"numbers": 10}, {"numbers": 0})
    assert again["query_id"] != shown["query_id"]

    # To a time.
    next_millisecond()
    moment = time.time()
    weft.publish_sync(numbers, [{"n": 11}, {"n": 12}])
    call("consume", "copies", "--once")
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1e6):06}"
    moved = checkpoints("rewind", "copies", "--to-time", since)
    assert (moved["starts"], moved["offsets"], moved["dry_run"]) == ({"numbers": 11}, {"numbers": 12}, False)
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(1, 13), 8, 9, 10, 11, 12])

    # Anew; and the old checkpoint can be brought back.
    reset = checkpoints("reset", "copies")
    assert not Path(reset["location"]).exists()
    back = call("checkpoints", "list").stderr
    assert back == "There are no checkpoints.\n"
    Path(reset["moved_to"]).rename(reset["location"])
    call("consume", "copies", "--once")
    assert len(rows()) == 17
    call("checkpoints", "reset", "copies")
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(1, 13), 8, 9, 10, 11, 12, *range(1, 13)])


def test_merged_rows_stay_single(call: Any, numbers: Any) -> None:
    call("consume", "merged", "--once")
    assert call("checkpoints", "rewind", "merged", "--to-offset", "3").stderr == ""
    call("consume", "merged", "--once")
    assert rows("merged") == list(range(1, 11))


def test_refused(call: Any, numbers: Any) -> None:
    def said(*arguments: object, code: int = 1) -> str:
        return str(call("checkpoints", *arguments, code=code).stderr)

    for command in (["reset"], ["rewind", "--to-offset", "1"]):
        assert "There is no checkpoint of 'copies'" in said(command[0], "copies", *command[1:])
    Path(".weft/checkpoints/copies").mkdir(parents=True)
    Path(".weft/checkpoints/copies/metadata").write_text(json.dumps({"id": str(uuid4())}))  # Spark begins with it
    assert "has done no batch" in said("rewind", "copies", "--to-offset", 1)
    call("consume", "copies", "--once")
    before = json.loads(call("checkpoints", "show", "copies", "--format", "json").stdout)
    assert "numbers is at 10, and 11 comes after that." in said("rewind", "copies", "--to-offset", 11)
    assert "comes after that" in said("rewind", "copies", "--to-time", "2100-01-01")
    assert "Give one of --to-offset and --to-time." in said("rewind", "copies", code=2)
    assert "5 is no time" in said("rewind", "copies", "--to-time", 5, code=2)
    assert "Did you mean 'numbers'?" in said("rewind", "copies", "--to-offset", 1, "--source", "numbrs")
    assert "Did you mean 'copies'?" in said("show", "copis")
    running = Checkpoint("copies")
    with running.locked():
        # Before it looks how far that one has come: 11 would be refused.
        for command in (["reset"], ["rewind", "--to-offset", "11"], ["reset", "--dry-run"]):
            assert "The pipeline 'copies' runs already, as process" in said(command[0], "copies", *command[1:])
        shown = json.loads(call("checkpoints", "show", "copies", "--format", "json").stdout)
        assert shown["running"] == os.getpid()
    assert json.loads(call("checkpoints", "show", "copies", "--format", "json").stdout) == before


def test_one_that_cannot_be_read(call: Any, numbers: Any) -> None:
    """It is told and passed by, and can be moved aside."""
    call("consume", "copies", "--once")
    here = Path(".weft/checkpoints/copies")
    shutil.copytree(here, here.with_name("other"))
    (here / "offsets/0").write_text("v1\n")
    told = call("checkpoints", "list", "--format", "json")
    assert [each["pipeline"] for each in json.loads(told.stdout)] == ["other"]
    assert "note: Spark's log cannot be read at" in told.stderr
    assert "weft checkpoints reset" in call("consume", "copies", "--once", code=1).stderr
    call("checkpoints", "reset", "copies")
    assert not here.exists()


def test_offsets_are_texts_too(call: Any, local: Project) -> None:
    """jq rounds those of Redis, and `rewind --to-offset` takes what was shown."""
    folder = Path(".weft/checkpoints/copies")
    for name, text in (("offsets", '{"batchTimestampMs":0}\n1879048192000000001'), ("commits", "{}")):
        (folder / name).mkdir(parents=True)
        (folder / name / "0").write_text(f"v1\n{text}")
    (folder / "metadata").write_text('{"id":"1"}')
    shown = json.loads(call("checkpoints", "show", "copies", "--format", "json").stdout)
    (listed,) = json.loads(call("checkpoints", "list", "--format", "json").stdout)
    assert shown["offsets_text"] == listed["offsets_text"] == {"1": "1879048192000000001"}


def test_one_whose_place_is_not_known(call: Any, numbers: Any) -> None:
    @weft.streaming_pipeline(source=numbers, target="default", target_table="others", checkpoint="${NOT_SET}/others")
    def others() -> None:
        pass

    call("consume", "copies", "--once")
    told = call("checkpoints", "list", "--format", "json")
    assert [each["pipeline"] for each in json.loads(told.stdout)] == ["copies"]
    assert "NOT_SET is not set, and the checkpoint of others needs it" in told.stderr


def test_pipelines_that_are_declared_nowhere(call: Any, numbers: Any) -> None:
    """What ran here once is known by its folder."""
    call("consume", "copies", "--once")
    weft.project.current().streaming_pipelines.clear()
    shown = json.loads(call("checkpoints", "show", "copies", "--format", "json").stdout)
    assert shown["offsets"] == {"1": 10}
    call("checkpoints", "reset", "copies")
    assert not Path(".weft/checkpoints/copies").exists()


@pytest.mark.parametrize("name", ["a b", "äöü", "a~b", "50%", "a.lock"])
def test_names(local: Project, name: str) -> None:
    """Each name has a folder of its own, from which it is read back."""
    from weft.engine.streaming.checkpoint import stored

    made = Checkpoint(name)
    made.lock.take()
    made.lock.release()
    made.path.mkdir()
    assert [each.name for each in stored()] == [name]


@pytest.mark.timing
def test_a_lock_ends_with_its_process(local: Project) -> None:
    code = """
from weft.engine.streaming.checkpoint import Checkpoint
held = Checkpoint("copies")
held.lock.take()
print("locked", flush=True)
input()
"""
    process = warm_python.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(weft.BusyError, match=f"runs already, as process {process.pid}"):
        Checkpoint("copies").lock.take()
    assert Checkpoint("copies").lock.holder() == process.pid
    process.kill()
    process.communicate()
    assert Checkpoint("copies").lock.holder() is None
    with Checkpoint("copies").locked():
        pass


@pytest.mark.brief("redis")
@pytest.mark.parametrize("system", ["postgres", "redis"], indirect=True)
def test_elsewhere(call: Any, streams: Project, system: Any) -> None:
    """Two streams, on servers whose offsets are no small numbers; one is rewound, the other goes on where it is."""
    weft.register_connection(weft.SQLiteConnection("out.db", name="out"))
    made = [declare(name, fields={"n": "int64"}) for name in ("left", "right")]

    @weft.streaming_pipeline(
        sources=made, target="out", target_table="copies", transform_sql="SELECT n FROM source WHERE n > 0"
    )
    def both() -> None:
        pass

    weft.publish_sync(made[0], [{"n": n} for n in (0, 1, 2, 3)])
    weft.publish_sync(made[1], [{"n": n} for n in (10, 11)])
    lines = call("consume", "both", "--once", "--format", "json").stdout.splitlines()
    assert [sum(json.loads(each)[key] for each in lines) for key in ("consumed",)] == [6]
    assert sum(json.loads(each)["written"]["copies"] for each in lines) == 5
    weft.publish_sync(made[1], {"n": 12})
    shown = json.loads(call("checkpoints", "show", "both", "--format", "json").stdout)
    assert shown["lag"] == {"left": 0, "right": 1}
    left = rowids(drain(made[0]))
    assert shown["offsets"]["left"] == left[-1]
    assert (
        "Whose offset? Name one: --source left or right."
        in call("checkpoints", "rewind", "both", "--to-offset", left[2], code=2).stderr
    )
    call("checkpoints", "rewind", "both", "--to-offset", left[2], "--source", "left")
    call("consume", "both", "--once")
    with closing(sqlite3.connect("out.db")) as database:
        found = sorted(n for (n,) in database.execute("SELECT n FROM copies"))
    assert found == [1, 2, 2, 3, 3, 10, 11, 12]


def test_a_source_that_stays_after_a_crash(call: Any, local: Project) -> None:
    """The target has a batch that Spark's log does not: its rows of the source that stays would come again."""
    left, right = (declare(name, fields={"n": "int64"}) for name in ("left", "right"))
    weft.streaming_pipeline(name="both", sources=[left, right], target="default", target_table="copies")(lambda: None)
    for number in (1, 2):
        weft.publish_sync(left, {"n": number})
        weft.publish_sync(right, {"n": 10 + number})
        call("consume", "both", "--once")
    log = Path(".weft/checkpoints/both/commits")
    last = max(int(each.name) for each in log.iterdir() if each.name.isdecimal())
    for name in (f"{last}", f".{last}.crc"):
        (log / name).unlink(missing_ok=True)
    rewind = ("checkpoints", "rewind", "both", "--to-offset", 1, "--source", "left")
    told = call(*rewind, code=1).stderr
    assert f"both has begun batch {last} and not finished it" in told
    assert "weft consume both --once" in told
    call("consume", "both", "--once")
    call(*rewind)
    call("consume", "both", "--once")
    assert rows() == [1, 1, 2, 2, 11, 12]


# Files of the new log, the note on the move, the move aside, the note on that, the move to its place, no more note.
STEPS = ["write 1", "write 4", "write 7", "move_tree 1", "write 8", "move_tree 2", "remove_tree 1"]


@pytest.fixture
def crash(call: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`crash(step, *command)` runs a command that does not come past a step."""

    def run(step: str, *command: object) -> None:
        name, left = step.split()[0], [int(step.split()[1])]
        real = getattr(LocalFolder, name)

        def reached(folder: LocalFolder, *arguments: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            real(folder, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(LocalFolder, name, reached)
            call(*command, code=130)

    return run


@pytest.mark.brief("move_tree 1", "remove_tree 1")
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_during_a_rewind(call: Any, numbers: Any, crash: Any, step: str) -> None:
    """Before it is noted that the old checkpoint is moved aside the rewind is forgotten; after that the next start
    finishes it."""
    call("consume", "copies", "--once")
    crash(step, "checkpoints", "rewind", "copies", "--to-offset", 9)
    weft.publish_sync(numbers, {"n": 11})
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(1, 12), *([] if STEPS.index(step) < 3 else [9, 10])])
    left = {each.name.partition("~")[2] for each in Path(".weft/checkpoints").iterdir()}
    assert not left & {"rewound", "moving"}


@pytest.mark.parametrize("step", STEPS[3::2])
def test_a_rewind_after_one_that_a_crash_cut_off(call: Any, numbers: Any, crash: Any, step: str) -> None:
    call("consume", "copies", "--once")
    crash(step, "checkpoints", "rewind", "copies", "--to-offset", 9)
    call("checkpoints", "rewind", "copies", "--to-offset", 8)
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(1, 11), 8, 9, 10])


def test_a_rewind_that_was_begun_is_not_finished_after_a_reset(call: Any, numbers: Any) -> None:
    call("consume", "copies", "--once")
    Path(".weft/checkpoints/copies~rewound/offsets").mkdir(parents=True)
    call("checkpoints", "reset", "copies")
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(1, 11), *range(1, 11)])


@pytest.mark.timing
def test_a_jvm_that_does_not_end(local: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, and not for ever; one that ended and that nobody asked for is gone."""
    checkpoint = Checkpoint("copies")
    jvm = subprocess.Popen(["sleep", "600"])
    try:
        Path(".weft/checkpoints").mkdir(parents=True)
        noted = {"process": "x:1:1:other", "jvm": name_of(jvm.pid)}
        Path(".weft/checkpoints/copies~lock").write_text(json.dumps(noted))
        monkeypatch.setattr("weft.engine.streaming.lock._JVM_SECONDS", 0.1)
        with pytest.raises(weft.BusyError, match=f"still runs.*\n.*kill {jvm.pid}"):
            checkpoint.lock.take()
        jvm.kill()
        wait_until(lambda: process_state(jvm.pid) == "Z", "it to end")
        with checkpoint.locked():
            pass
    finally:
        jvm.kill()
        jvm.wait()


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
