"""`weft consume-list`, as a person or a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import warm_python

PIPELINES = '''
import weft
from weft import ObjectStoreLocalConnection, PostgresConnection, RedisConnection, Target

secretive = PostgresConnection("postgres://me:hidden@host/wh")

@weft.stream
def orders(): ...

@weft.stream
def payments(): ...

@weft.streaming_pipeline(source=[orders, payments], target="warehouse", target_table="public.events")
def union():
    """All that is sold."""

@weft.streaming_pipeline(
    source=secretive,
    source_query="clicks",
    mode="merge",
    keys=["id"],
    targets=[
        Target(connection=secretive, table="public.clicks"),
        Target(connection=RedisConnection("redis://h", name="cache"), stream="clicks", mode="append"),
    ],
)
def fan_out(): ...
'''


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "consume-list", *arguments]
    return warm_python.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def shop(project: Path) -> None:
    (project / "shop.py").write_text(PIPELINES)


@pytest.mark.usefixtures("shop")
def test_for_people() -> None:
    done = weft("--module", "shop")
    assert done.returncode == 0, done.stderr
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "name sources targets mode delivery",
        "union orders, payments public.events append exactly_once",
        "fan_out clicks public.clicks, clicks merge, append exactly_once, at_least_once",
    ]


@pytest.mark.usefixtures("shop")
def test_for_scripts() -> None:
    done = weft("--module", "shop", "--format", "json")
    union, fan_out = json.loads(done.stdout)
    assert union == {
        "name": "union",
        "sources": [{"name": "orders", "connection": "default"}, {"name": "payments", "connection": "default"}],
        "targets": [
            {
                "name": "public.events",
                "connection": "warehouse",
                "mode": "append",
                "keys": [],
                "delivery": "exactly_once",
            }
        ],
        "declared": "shop.py, line 13",
        "description": "All that is sold.",
    }
    assert fan_out["sources"] == [{"name": "clicks", "connection": "postgres postgres://me:***@host/wh"}]
    assert [each["connection"] for each in fan_out["targets"]] == ["postgres postgres://me:***@host/wh", "cache"]
    assert fan_out["targets"][0]["keys"] == ["id"]


def test_none(project: Path) -> None:
    done = weft()
    assert (done.returncode, done.stdout) == (1, "")
    assert "No streaming pipeline is declared." in done.stderr
    assert "--module my_pipelines" in done.stderr
