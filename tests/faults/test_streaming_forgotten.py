"""The last entry of Spark's log of commits is gone, and the query is started again: Spark plans the batch anew, and the
target knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from engine.streaming.conftest import declare, here, run_once  # noqa: F401 - fixture
from faults.streaming_targets import KINDS, Place, place_of  # noqa: F401 - fixture
from weft.engine.streaming import transform

pytest.importorskip("pyspark")

BRIEF = [("postgres", "tasks"), ("files", "driver")]
FULL = [(kind, each) for kind in KINDS for each in ("driver", "tasks")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        cases = FULL if metafunc.config.getoption("--full") else BRIEF
        metafunc.parametrize(("kind", "where"), cases, ids=["-".join(each) for each in cases])


@pytest.mark.full
@pytest.mark.usefixtures("here", "spark")
def test_twenty_times(
    kind: str,
    where: str,
    place_of: Callable[[str], Place],  # noqa: F811
    count: Callable[[int], int],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "tasks":
        monkeypatch.setattr(transform, "SMALL", 0)
    events, place = declare(n="int64", name="string"), place_of(kind)
    pipeline = {
        "name": "copy",
        "source": weft.Source(query=events, max_rows=10),
        "targets": place.declare(),
        "transform_sql": "SELECT n, name FROM source" if where == "driver" else None,
    }
    published = 0
    for _ in range(count(20)):
        # Two batches, of which the last is forgotten.
        weft.publish_sync(events, [{"n": published + n, "name": "x"} for n in range(15)])
        published += 15
        run_once(**pipeline)
        forget_last_commit(project / ".weft/checkpoints/copy")
        run_once(**pipeline)
    place.check(published)


def forget_last_commit(checkpoint: Path) -> None:
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda each: int(each.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
