"""`weft streams consume`, `ack`, `nack` and `groups`: a consumer by hand."""

from __future__ import annotations

import json
import re

import pytest

import weft
from workers import declare


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def system(request, open_system):
    with open_system(request.param) as found:
        yield found


@pytest.fixture
def offsets(streams) -> list[int]:
    """The offsets of ten events."""
    declare("numbers", fields={"n": "int64"})
    weft.publish_sync("numbers", [{"n": n} for n in range(10)])
    found = [event["_weft_rowid"] for event in weft.consume_sync("numbers", "other", batch_size=10)]
    assert found[-1] - found[0] == 9
    return found


def consume(call, *arguments: object) -> list[dict[str, object]]:
    done = call("streams", "consume", "numbers", "mine", "--format", "json", *arguments)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def group(call) -> tuple[int, int]:
    groups = json.loads(call("streams", "groups", "numbers", "--format", "json").stdout)
    return next((each["lag"], each["pending"]) for each in groups if each["consumer"] == "mine")


def test_same_events_until_they_are_acknowledged(offsets, call) -> None:
    first = consume(call, "--batch-size", 4)
    assert [event["n"] for event in first] == [0, 1, 2, 3]
    assert [event["_weft_rowid"] for event in first] == offsets[:4]
    assert consume(call, "--batch-size", 4) == first
    assert call("streams", "ack", "numbers", "mine", f"{offsets[0]}-{offsets[3]}").stdout == "4 events acknowledged\n"
    assert [event["n"] for event in consume(call)] == [4, 5, 6, 7, 8, 9]


def test_ack_with_consume(offsets, call) -> None:
    assert len(consume(call, "--batch-size", 4, "--ack")) == 4
    assert group(call) == (6, 0)
    done = call("streams", "consume", "numbers", "mine", "--ack")
    assert done.stdout.count("\n") == 6
    assert done.stderr == "6 events acknowledged\n"


def test_hint_works_as_printed(offsets, call) -> None:
    done = call("streams", "consume", "numbers", "mine", "--member", "m1", "--batch-size", 3)
    command = re.fullmatch(r"To acknowledge: weft (.*)\n", done.stderr)[1]
    assert command == f"streams ack numbers mine {offsets[0]}-{offsets[2]} --member m1"
    call(*command.split())
    assert group(call) == (7, 0)
    consume(call, "--ack")
    assert call("streams", "consume", "numbers", "mine").stderr == "Nothing new for mine.\n"


def test_ack_of_some(offsets, call) -> None:
    consume(call)
    given = [f"{offsets[0]}-{offsets[2]}", offsets[5], offsets[5], f"{offsets[8]}-{offsets[8] + 1000}"]
    assert json.loads(call("streams", "ack", "numbers", "mine", *given, "--format", "json").stdout) == {
        "acknowledged": 6,
        "already_acknowledged": 0,
    }
    assert [event["n"] for event in consume(call)] == [3, 4, 6, 7]
    done = call("streams", "consume", "numbers", "mine")
    expected = f"{offsets[3]}-{offsets[4]} {offsets[6]}-{offsets[7]}"
    assert done.stderr == f"To acknowledge: weft streams ack numbers mine {expected}\n"


def test_ack_from_standard_input(offsets, call) -> None:
    lines = call("streams", "consume", "numbers", "mine", "--format", "json").stdout
    # As jq writes them: what is beyond 2^53 is rounded.
    lines = "\n".join(json.dumps(json.loads(line, parse_int=float)) for line in lines.splitlines())
    assert call("streams", "ack", "numbers", "mine", "-", stdin=lines + "\n").stdout == "10 events acknowledged\n"
    assert group(call) == (0, 0)
    for bad in ("5", "{}", "nonsense", '{"_weft_rowid": "x"}'):
        done = call("streams", "ack", "numbers", "mine", "-", stdin=f"{bad}\n", code=1)
        assert done.stderr.startswith("error: Standard input, line 1: it is not a consumed event")


def test_ack_of_what_another_member_holds(offsets, call) -> None:
    weft.consume_sync("numbers", "mine", batch_size=5, member="worker")
    done = call("streams", "ack", "numbers", "mine", offsets[0], code=1)
    assert "was refused" in done.stderr and "'worker'" in done.stderr
    assert call("streams", "ack", "numbers", "mine", offsets[0], "--any-member").stdout == "1 event acknowledged\n"
    assert call("streams", "ack", "numbers", "mine", offsets[1], "--member", "worker").stdout == (
        "1 event acknowledged\n"
    )
    assert group(call) == (5, 3)


def test_ack_of_what_was_not_delivered(offsets, call) -> None:
    consume(call, "--batch-size", 2)
    assert "not delivered" in call("streams", "ack", "numbers", "mine", offsets[5], code=1).stderr
    assert "holds no event at 999999" in call("streams", "ack", "numbers", "mine", 999999, code=1).stderr
    for bad in ("x", "5-", "-5", "1,2"):
        call("streams", "ack", "numbers", "mine", "--", bad, code=2)
    call("streams", "ack", "numbers", "mine", code=2)


def test_range_goes_up(offsets, call) -> None:
    consume(call)
    assert "a range goes up: 3-9" in call("streams", "ack", "numbers", "mine", "9-3", code=2).stderr


def test_ack_of_what_is_acknowledged(offsets, call) -> None:
    consume(call)
    ack = ["streams", "ack", "numbers", "mine"]
    assert call(*ack, offsets[0]).stdout == "1 event acknowledged\n"
    assert call(*ack, offsets[0]).stdout == "1 event already acknowledged\n"
    done = call(*ack, f"{offsets[0]}-{offsets[2]}")
    assert done.stdout == "2 events acknowledged, 1 event already acknowledged\n"
    assert json.loads(call(*ack, offsets[0], "--format", "json").stdout) == {
        "acknowledged": 0,
        "already_acknowledged": 1,
    }
    assert group(call) == (0, 7)


def test_nack_gives_back(offsets, call) -> None:
    consume(call)
    done = call("streams", "nack", "numbers", "mine", f"{offsets[0]}-{offsets[1]}", "--delay", 600, "--reason", "later")
    assert done.stdout == "2 events given back\n"
    assert [event["n"] for event in consume(call)] == list(range(2, 10))
    assert group(call) == (0, 10)


def test_groups(offsets, call) -> None:
    consume(call, "--batch-size", 3, "--member", "m1", "--lease", 900)
    shown = call("streams", "groups", "numbers").stdout.splitlines()
    assert shown[0].split() == ["consumer", "position", "lag", "pending", "lost", "members"]
    assert re.match(rf"mine +{offsets[2]} +7 +3 +0  m1 \(3, (900|8\d\d) s left\)$", shown[1])
    assert shown[2].split()[:5] == ["other", str(offsets[9]), "0", "10", "0"]


def test_forget(offsets, call) -> None:
    done = call("streams", "forget", "numbers", "other", code=2)
    assert "other of numbers has 0 events to read. Remove it? Nobody can answer" in done.stderr
    assert call("streams", "forget", "numbers", "other", "--yes").stdout == "removed other of numbers\n"
    consume(call, "--batch-size", 3)
    done = call("streams", "forget", "numbers", "mina", "--yes", code=1)
    assert "Did you mean 'mine'?" in done.stderr
    shown = json.loads(call("streams", "forget", "numbers", "mine", "--yes", "--format", "json").stdout)
    assert shown == {"consumer": "mine", "removed": True}
    assert json.loads(call("streams", "groups", "numbers", "--format", "json").stdout) == []
    assert [event["n"] for event in consume(call)] == list(range(10))  # it is a new one


def test_no_groups(streams, call) -> None:
    declare("numbers")
    done = call("streams", "groups", "numbers")
    assert (done.stdout, done.stderr) == ("", "No consumer has read numbers yet.\n")
    assert json.loads(call("streams", "groups", "numbers", "--format", "json").stdout) == []


def test_lost_events_are_told_once(offsets, call) -> None:
    consume(call, "--batch-size", 2, "--ack")
    weft.trim_sync("numbers", max_rows=3)
    done = call("streams", "consume", "numbers", "mine", code=1)
    assert "lost 5 events" in done.stderr
    assert [event["n"] for event in consume(call)] == [7, 8, 9]


def test_waiting_for_an_event(run, start, shop) -> None:
    process = start("streams", "consume", "numbers", "mine", "--wait", "60", "--format", "json")
    run("streams", "publish", "numbers", "--data", '{"n": 7}')
    shown, errors = process.communicate(timeout=60)
    assert (json.loads(shown)["n"], errors, process.returncode) == (7, "", 0)


def test_output_that_cannot_be_written_is_not_acknowledged(run, shop) -> None:
    import os
    import subprocess
    import sys

    run("streams", "publish", "numbers", "--data", '{"n": 7}')
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "weft", "streams", "consume", "numbers", "mine", "--ack"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
    assert run("streams", "consume", "numbers", "mine").stdout.count("\n") == 1
