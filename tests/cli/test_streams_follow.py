"""`weft streams tail -f`: new events of others as they come, until Ctrl-C or until nobody reads any more."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest


@pytest.fixture
def following(system, monkeypatch: pytest.MonkeyPatch, run, start, shop):
    """A `tail -f` that has shown the first event; and how to publish another."""
    monkeypatch.setenv("WEFT_DSN", system.url)

    def publish(n: int) -> None:
        done = run("streams", "publish", "numbers", "--data", json.dumps({"n": n}))
        assert done.returncode == 0, done.stderr

    publish(1)
    process = start("streams", "tail", "numbers", "-f", "--format", "json")
    assert json.loads(process.stdout.readline())["n"] == 1
    return process, publish


@pytest.mark.timing
def test_new_events_then_interrupt(following) -> None:
    process, publish = following
    for n in (2, 3):
        publish(n)
        assert json.loads(process.stdout.readline())["n"] == n
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=20)
    assert (process.returncode, shown, errors.strip()) == (130, "", "")


@pytest.mark.timing
def test_reader_that_went_away_ends_it_at_once(following) -> None:
    process, _ = following
    process.stdout.close()
    assert process.wait(timeout=20) == 1  # with no event to write
    assert process.stderr.read() == ""


def test_head(run, shop) -> None:
    run("streams", "publish", "numbers", "--input", "csv", "-", stdin="n\n" + "1\n" * 20_000)
    command = f"{sys.executable} -m weft streams tail numbers --since start | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_filter_applies_to_new_events(run, start, shop) -> None:
    run("streams", "publish", "numbers", "--data", '{"n": 1, "s": "a"}')
    process = start("streams", "tail", "numbers", "-f", "--filter", "s=a", "--format", "json")
    assert json.loads(process.stdout.readline())["n"] == 1
    run("streams", "publish", "numbers", "--data", '[{"n": 2, "s": "b"}, {"n": 3, "s": "a"}]')
    assert json.loads(process.stdout.readline())["n"] == 3


@pytest.mark.parametrize("system", ["redis"], indirect=True)
def test_a_stream_that_others_made_again(following, system) -> None:
    """It ends before what was shown: that is said, and new events are shown."""
    import redis

    process, _ = following
    with redis.Redis.from_url(system.url) as client:
        client.delete("numbers")
        client.xadd("numbers", {"n": 5}, id="5-1")
        assert any("the stream was created again" in line for line in process.stderr)
        client.xadd("numbers", {"n": 6}, id="6-1")
        assert json.loads(process.stdout.readline())["n"] == 6
