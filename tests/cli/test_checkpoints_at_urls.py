"""`weft checkpoints` where they are at a URL: in a bucket, and on a disk that machines share."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from servers import wait_until
from weft.engine import session
from weft.engine.streaming.checkpoint import Checkpoint, prepared_session
from weft.engine.streaming.progress import SourceLag
from weft.spark_support.folder import BucketFolder, LocalFolder, Location
from workers import declare

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.usefixtures("local"), pytest.mark.spark]


def rows() -> list[int]:
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        return sorted(n for (n,) in database.execute("SELECT n FROM copies"))


@pytest.fixture
def lake(s3: Any) -> weft.ObjectStoreS3Connection:
    """A bucket with one file."""
    made = weft.ObjectStoreS3Connection(**s3.fields(), name="lake", format="json_lines")
    weft.register_connection(made)
    put(made, "a.json", 100)
    return made


def put(lake: weft.ObjectStoreS3Connection, name: str, n: int) -> None:
    with lake.filesystem().open_output_stream(f"{lake.bucket}/raw/{name}") as file:
        file.write(json.dumps({"n": n}).encode() + b"\n")


@pytest.fixture
def numbers() -> Any:
    """A stream with the events 1 to 4."""
    made = declare("numbers", fields={"n": "int64"})
    weft.publish_sync(made, [{"n": n} for n in range(1, 5)])
    return made


def copied(*sources: Any, checkpoint: str) -> None:
    weft.streaming_pipeline(
        name="copies", sources=list(sources), target="default", target_table="copies", checkpoint=checkpoint
    )(lambda: None)


@pytest.mark.full
def test_in_a_bucket(call: Any, checkpoints: Any, lake: weft.ObjectStoreS3Connection, numbers: Any) -> None:
    url = f"s3://{lake.bucket}/checkpoints/copies"
    copied(numbers, weft.Source(connection="lake", query="raw"), checkpoint=url)
    assert call("checkpoints", "list").stderr == "There are no checkpoints.\n"
    told = call("checkpoints", "reset", "copies", code=1).stderr
    assert f"There is no checkpoint of 'copies': s3a://{lake.bucket}/checkpoints/copies is not there." in told
    call("consume", "copies", "--once")
    weft.publish_sync(numbers, {"n": 5})
    put(lake, "b.json", 101)
    put(lake, "c.json", 102)
    shown = checkpoints("show", "copies")
    assert (shown["location"], shown["running"]) == (f"s3a://{lake.bucket}/checkpoints/copies", None)
    assert (shown["offsets"]["numbers"], shown["lag"]) == (4, {"numbers": 1, "raw": 2})
    assert "numbers 4; raw 1 file" in call("checkpoints", "show", "copies").stdout
    (listed,) = json.loads(call("checkpoints", "list", "--format", "json").stdout)
    assert listed == {name: value for name, value in shown.items() if name != "lag"}

    rewind = ("rewind", "copies", "--to-offset", 3, "--source", "numbers")
    would = call("checkpoints", *rewind, "--dry-run").stdout
    assert would == "copies would begin with event 3 of numbers; it was at 4.\nNothing was done.\n"
    assert checkpoints("show", "copies") == shown
    told = call("checkpoints", *rewind).stdout
    assert "The old checkpoint is s3a://" in told
    assert checkpoints("show", "copies")["lag"] == {"numbers": 3, "raw": 2}
    call("consume", "copies", "--once")
    wanted = [1, 2, 3, 3, 4, 4, 5, 100, 101, 102]
    assert rows() == wanted
    moved = checkpoints("rewind", "copies", "--to-time", "1h", "--source", "raw")
    assert moved["starts"] == {"numbers": 6, "raw": 3}
    call("consume", "copies", "--once")
    wanted = sorted([*wanted, 100, 101, 102])
    assert rows() == wanted

    # Anew; and the old one can be brought back.
    reset = checkpoints("reset", "copies")
    assert call("checkpoints", "list").stderr == "There are no checkpoints.\n"
    home = Checkpoint.of(weft.project.current().streaming_pipelines["copies"]).home
    Location(home.folder, reset["moved_to"]).move(home)
    call("consume", "copies", "--once")
    assert rows() == wanted
    checkpoints("reset", "copies")
    call("consume", "copies", "--once")
    assert rows() == sorted([*wanted, *range(1, 6), 100, 101, 102])


@pytest.mark.full
def test_a_crash_in_a_bucket(
    call: Any, lake: weft.ObjectStoreS3Connection, numbers: Any, monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    """Where no folder is moved at once: half of the old log is here still, or half of the new one already."""
    copied(numbers, weft.Source(connection="lake", query="raw"), checkpoint=f"s3://{lake.bucket}/checkpoints/copies")
    call("consume", "copies", "--once")
    wanted = [*rows()]
    move = BucketFolder.move
    for broken_off in range(count(1, 2), 3):  # the move aside, the move to its place
        moves: list[object] = []

        def half(folder: BucketFolder, files: dict[str, str], moves: Any = moves, broken_off: int = broken_off) -> None:
            moves.append(files)
            if len(moves) < broken_off:
                move(folder, files)
                return
            move(folder, dict(list(files.items())[: len(files) // 2]))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(BucketFolder, "move", half)
            rewind = ("checkpoints", "rewind", "copies", "--to-offset", 4, "--source", "numbers")
            call(*rewind, code=130)
        call("consume", "copies", "--once")
        wanted = sorted([*wanted, 4])
        assert rows() == wanted


@pytest.mark.full
def test_the_lag_after_a_restart(
    call: Any, lake: weft.ObjectStoreS3Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files it is read where the checkpoint is open now: what opened it before may be of a JVM that ended."""
    copied(weft.Source(connection="lake", query="raw"), checkpoint=f"s3://{lake.bucket}/checkpoints/copies")
    call("consume", "copies", "--once")
    pipeline = weft.project.current().streaming_pipelines["copies"]
    checkpoint = Checkpoint.of(pipeline)
    lag = SourceLag(pipeline.sources, checkpoint)
    assert lag.now(fresh=True) == {}  # nobody has opened it
    spark = prepared_session(session.spark(), pipeline)
    with checkpoint.locked():
        checkpoint.hold(spark, lambda: None)
        assert lag.now(fresh=True) == {"raw": 0}
        monkeypatch.setattr(checkpoint.home.folder, "files", None)  # which fails whoever still uses it
        put(lake, "b.json", 101)
        checkpoint.hold(spark, lambda: None)
        assert lag.now(fresh=True) == {"raw": 1}


@pytest.mark.timing
def test_on_a_disk_that_machines_share(call: Any, checkpoints: Any, numbers: Any, project: Path) -> None:
    place = project / "shared" / "copies"
    copied(numbers, checkpoint=f"file://{place}")
    call("consume", "copies", "--once")
    shown = checkpoints("show", "copies")
    assert (shown["offsets"], shown["lag"], shown["location"]) == ({"numbers": 4}, {"numbers": 0}, f"file://{place}")
    # As if another machine held it.
    claims = project / "shared" / "copies~lock"
    number = max(int(each.stem) for each in claims.glob("*.claim")) + 1
    owner = {"owner": ["elsewhere:7:1:other"]}
    LocalFolder().create(str(claims / f"{number:020}.claim"), json.dumps(owner).encode())
    with Beat(claims / f"{number:020}.beat"):
        for command in (["reset"], ["rewind", "--to-offset", "3"]):
            told = call("checkpoints", command[0], "copies", *command[1:], code=1).stderr
            assert "The pipeline 'copies' runs already, as process 7 on elsewhere." in told
    LocalFolder().create(str(claims / f"{number:020}.released"), b"")
    assert checkpoints("rewind", "copies", "--to-offset", 3)["starts"] == {"numbers": 3}
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 3, 3, 4, 4]
    assert "To bring the old checkpoint back: mv -T" in call("checkpoints", "reset", "copies").stdout
    assert not place.exists()


class Beat:
    """A process that writes to a file, more and more, as a holder does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        code = "import sys, time\nwhile True:\n    open(sys.argv[1], 'a').write('.'); time.sleep(0.1)"
        self._process = warm_python.Popen([sys.executable, "-c", code, str(self._path)])
        wait_until(self._path.exists, "a beat")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def test_a_bucket_that_is_not_there(call: Any, numbers: Any, s3: Any) -> None:
    """It is told, and those of others are listed."""
    fields = {**s3.fields(), "bucket": "nowhere"}
    weft.register_connection(weft.ObjectStoreS3Connection(name="away", **fields))
    weft.streaming_pipeline(
        name="others",
        source=weft.Source(connection="away", query="raw"),
        target="default",
        target_table="copies",
        checkpoint="s3://nowhere/checkpoints",
    )(lambda: None)
    copied(numbers, checkpoint="here")
    call("consume", "copies", "--once")
    told = call("checkpoints", "list", "--format", "json")
    assert [each["pipeline"] for each in json.loads(told.stdout)] == ["copies"]
    assert "note: Spark could not list s3a://nowhere/checkpoints: " in told.stderr
