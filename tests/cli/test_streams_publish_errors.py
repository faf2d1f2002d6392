"""`weft streams publish` at an event that cannot be: where it is, what is stored already, and how to go on."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

import weft
from weft.cli import events_in, streams_publish
from workers import declare, drain


@pytest.fixture
def numbers(local) -> None:
    declare("numbers", fields={"n": "int64", "s": "string?"}, on_schema_drift="reject")


def stored() -> list[int]:
    return [event["n"] for event in drain("numbers")]


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.ndjson", '{"n": 0}\n\n{"n": "x"}\n', "line 3, field 'n' = 'x': it must be int64, but it is of type str."),
        ("a.ndjson", '{"n": 0}\n{"n": 1,}\n', "line 2, column 9: Expecting property name enclosed in double quotes."),
        ("a.ndjson", '{"n": 0}\n{"n": 1} 2\n', "line 2, column 10: Extra data."),
        ("a.ndjson", '{"n": 0}\n{"n": NaN}\n', "line 2: NaN is not JSON."),
        ("a.ndjson", '{"n": 0}\n{"n": 1, "n": 2}\n', "line 2: the key 'n' is there twice"),
        ("a.ndjson", '{"n": 0}\n{"n": 1, "j": {"a": 1, "a": 2}}\n', "line 2: the key 'a' is there twice"),
        ("a.ndjson", '{"n": 0}\n[{"n": 1}]\n', "line 2: an event must be a JSON object, not a list."),
        ("a.ndjson", '{"n": 0}\n{"n": 1, "_weft_rowid": 7}\n', "line 2, field '_weft_rowid' = 7: keys that begin with"),
        ("a.ndjson", '{"n": 0}\n{"a": ' + "[" * 100_000 + "\n", "line 2: it is nested too deeply."),
        ("a.ndjson", b'{"n": 0}\n{"s": "\xff"}\n', "line 2, column 8: it is not UTF-8: byte 0xff."),
        ("a.json", '[\n {"n": 0},\n {"n": 1,\n  "z": 2}\n]', "line 3, field 'z' = 2: the stream has no such field."),
        ("a.json", '[\n {"n": 0},\n 5]', "line 3: an event must be a JSON object, not a number."),
        ("a.csv", "n,s\n0,a\nx,b\n", "line 3, field 'n' = 'x': it must be int64, but it is not a whole number."),
        ("a.csv", 'n,s\n0,"a\nb"\n1\n', "line 4: 1 value for the header's 2 fields."),
        ("a.csv", "n,s\n0,a\n1,b,c\n", "line 3: 3 values for the header's 2 fields."),
        ("a.csv", 'n,s\n0,a\n1,"b"c\n', "line 3: ',' expected after '\"'."),
        ("a.csv", b"n,s\n0,a\n1,\xff\n", "line 3, field 's' = '\\udcff': it is not UTF-8."),
    ],
)
def test_stops_there_and_goes_on_from_there(numbers, call, name: str, text: str | bytes, where: str) -> None:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    done = call("streams", "publish", "numbers", name, code=1)
    what, hint = done.stderr.splitlines()
    assert what.startswith(f"error: {name}, {where}")
    assert hint.replace("Leave it out. ", "") == (
        "  Stored before it: 1 event. Correct it and go on with --skip 1, or leave out all that do not fit with "
        "--on-error skip."
    )
    assert done.stdout == ""
    assert stored() == [0]
    again = call("streams", "publish", "numbers", name, "--skip", 1, code=1)
    assert again.stderr.startswith(what)
    assert "Nothing was stored." in again.stderr
    assert stored() == []


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.json", '[\n  {"n": 1},\n  {"n": 2},\n', "line 4: the list has no end."),
        ("a.json", '[\n  {"n": 1}\n  {"n": 2}]', "line 3, column 3: Expecting ',' or ']' after an event."),
        ("a.json", '[{"n": 1},\n  {"n": }]', "line 2, column 9: Expecting value."),
        ("a.json", b'[{"n": 1},\n\xff]', "line 2: it is not UTF-8: byte 0xff."),
        ("a.csv", "n,,s\n1,2,3\n", "line 1: column 2 has no name."),
        ("a.csv", "n,s,n\n1,2,3\n", "line 1: two columns are named 'n'."),
    ],
)
def test_input_that_cannot_be_read_on(numbers, call, name: str, text: str | bytes, where: str) -> None:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for on_error in ("stop", "skip"):
        done = call("streams", "publish", "numbers", name, "--on-error", on_error, code=1)
        assert done.stderr.startswith(f"error: {name}, {where}\n")


def test_batches_before_it_are_stored(numbers, call) -> None:
    lines = [json.dumps({"n": n}) for n in range(2500)]
    lines[2300] = '{"n": "x"}'
    lines[2400] = '{"n": 1, "_weft_x": 1}'  # found before the other, but behind it
    Path("a.ndjson").write_text("\n".join(lines))
    done = call("streams", "publish", "numbers", "a.ndjson", code=1)
    assert done.stderr.startswith("error: a.ndjson, line 2,301, field 'n' = 'x'")
    assert "Stored before it: 2,300 events. Correct it and go on with --skip 2300," in done.stderr
    assert stored() == list(range(2300))
    lines[2300], lines[2400] = '{"n": 2300}', '{"n": 2400}'
    Path("a.ndjson").write_text("\n".join(lines))
    call("streams", "publish", "numbers", "a.ndjson", "--skip", 2300)
    assert stored() == list(range(2300, 2500))


@pytest.mark.parametrize("name", ["a.ndjson", "a.json"])
def test_names_the_nearest_field(local, call, name: str) -> None:
    declare("orders", fields={"order_id": "int64", "total": "float64"}, on_schema_drift="reject")
    Path(name).write_text('{"order_id": 1}\n{"oder_id": 2}\n')
    done = call("streams", "publish", "orders", name, code=1)
    what, hint = done.stderr.splitlines()
    assert what == f"error: {name}, line 2, field 'oder_id' = 2: the stream has no such field."
    assert hint.startswith("  Did you mean 'order_id'? Stored before it: 1 event. Correct it and go on with --skip 1,")
    done = call("streams", "publish", "orders", name, "--on-error", "skip")
    assert done.stderr.splitlines()[0] == f"rejected: {what.removeprefix('error: ')} Did you mean 'order_id'?"


BAD = '{"n": 1}\n{"n": "x"}\n{"n": 2\n{"n": 3}\n{"z": 4}\n{"n": 5}\n'


@pytest.mark.parametrize(("name", "text"), [("a.ndjson", '{"n": 0}\n'), ("a.csv", "n\n0\n"), ("a.json", '[{"n": 0}]')])
def test_stream_that_cannot_be_opened_is_no_fault_of_an_event(local, call, name: str, text: str) -> None:
    weft.load([{"n": 1}], target="events.numbers")
    declare("numbers", fields={"n": "int64"})
    Path(name).write_text(text)
    failed = call("streams", "publish", "numbers", name, "--on-error", "skip", code=1)
    assert "events.numbers is a table in this database, but not a stream" in failed.stderr
    assert "rejected" not in failed.stderr and "line 1" not in failed.stderr


def test_skip_prints_what_is_left_out(numbers, call) -> None:
    done = call("streams", "publish", "numbers", "-", "--on-error", "skip", stdin=BAD)
    assert done.stdout == "published 3 events to numbers, 3 rejected\n"
    assert done.stderr == (
        "rejected: standard input, line 2, field 'n' = 'x': it must be int64, but it is of type str.\n"
        '  {"n": "x"}\n'
        "rejected: standard input, line 3, column 8: Expecting ',' delimiter.\n"
        '  {"n": 2\n'
        "rejected: standard input, line 5, field 'z' = 4: the stream has no such field.\n"
        '  {"z": 4}\n'
    )
    assert stored() == [1, 3, 5]


def test_skip_writes_what_is_left_out(numbers, call) -> None:
    arguments = ["--on-error", "skip", "--rejects", "rejects", "--batch-size", 2, "--format", "json"]
    done = call("streams", "publish", "numbers", "-", *arguments, stdin=BAD)
    assert json.loads(done.stdout)["rejected"] == 3
    assert Path("rejects").read_text() == '{"n": "x"}\n{"n": 2\n{"z": 4}\n'
    assert stored() == [1, 3, 5]


def test_rejects_of_csv_can_be_published_again(numbers, call) -> None:
    Path("a.csv").write_text('n,s\n1,a\nx,"b\nc"\n3,d\ny,e')
    call("streams", "publish", "numbers", "a.csv", "--on-error", "skip", "--rejects", "rejects.csv")
    assert Path("rejects.csv").read_text() == 'n,s\nx,"b\nc"\ny,e\n'
    Path("rejects.csv").write_text(Path("rejects.csv").read_text().replace("x,", "2,").replace("y,", "4,"))
    call("streams", "publish", "numbers", "rejects.csv")
    assert stored() == [1, 3, 2, 4]


def test_terminal_cannot_be_driven_by_what_is_left_out(numbers, call) -> None:
    done = call("streams", "publish", "numbers", "-", "--on-error", "skip", stdin='{"n": 0}\n{"\x1b[31m\x9b\n')
    assert re.findall(r"[^\x20-\x7e\n]", done.stderr) == []


def test_broken_archive(numbers, call) -> None:
    whole = gzip.compress("\n".join(json.dumps({"n": n}) for n in range(100_000)).encode())
    Path("a.ndjson.gz").write_bytes(whole[: len(whole) // 2])
    done = call("streams", "publish", "numbers", "a.ndjson.gz", code=1)
    found = re.search(r"Published before that: ([\d,]+) events\. Go on with --skip (\d+)\.", done.stderr)
    assert found and int(found[1].replace(",", "")) == int(found[2]) > 1000
    assert stored() == list(range(int(found[2])))
    Path("a.ndjson.gz").write_bytes(b"not an archive")
    assert "cannot be read after line 0" in call("streams", "publish", "numbers", "a.ndjson.gz", code=1).stderr


@pytest.mark.parametrize(("name", "bound"), [("a.json", "MAX_JSON_BYTES"), ("a.ndjson", "MAX_LINE_BYTES")])
def test_too_much_for_memory(numbers, call, monkeypatch: pytest.MonkeyPatch, name: str, bound: str) -> None:
    monkeypatch.setattr(events_in, bound, 1 << 20)
    Path(name).write_text('[{"n":\n' * (name == "a.json") + " " * (1 << 20) + "1}]")
    assert "is longer than 1 MiB" in call("streams", "publish", "numbers", name, code=1).stderr


def test_database_that_goes_away(local, call, monkeypatch: pytest.MonkeyPatch) -> None:
    declare("numbers")
    publish, batches = streams_publish.publish_sync, []

    def fail_third(*arguments: object, **options: object) -> object:
        batches.append(arguments)
        if len(batches) == 3:
            raise weft.ConnectionFailedError("The server went away.", hint="Start it.")
        return publish(*arguments, **options)

    monkeypatch.setattr(streams_publish, "publish_sync", fail_third)
    Path("a.ndjson").write_text("\n".join(json.dumps({"n": n}) for n in range(50)))
    done = call("streams", "publish", "numbers", "a.ndjson", "--batch-size", 10, code=1)
    assert done.stderr == (
        "error: The server went away.\n  Start it. Published before that: 20 events. Go on with --skip 20.\n"
    )
    call("streams", "publish", "numbers", "a.ndjson", "--skip", 20)
    assert stored() == list(range(50))


@pytest.mark.parametrize("name", ["semi.csv", "semi.csv.gz"])
def test_csv_with_another_delimiter(numbers, call, name: str) -> None:
    content = b"n;s\n1;a\n"
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for on_error in ("stop", "skip"):
        done = call("streams", "publish", "numbers", name, "--on-error", on_error, code=1)
        assert done.stderr.startswith(
            f"error: {name}: none of its columns is a field of numbers (n, s). Is the delimiter a comma?\n"
        )
    assert stored() == []


@pytest.mark.parametrize("drift", ["evolve", "reject"])
@pytest.mark.parametrize("text", ["hello world\n", "x,y\n1,2\n", "'n': 1\n", "n;s\n1;a\n", '"open\n', "<html>\n"])
def test_text_is_no_data(local, call, text: str, drift: str) -> None:
    declare("numbers", fields={"n": "int64", "s": "string?"}, on_schema_drift=drift)
    done = call("streams", "publish", "numbers", "-", stdin=f"\n{text}", code=1)
    assert done.stderr == (
        "error: standard input, line 2: it is no JSON, nor does it name a field of numbers (n, s) as CSV would.\n"
        "  If it is CSV, say so with --input csv. Nothing was published before that.\n"
    )


def test_csv_of_a_stream_without_fields(local, call) -> None:
    declare("numbers")
    done = call("streams", "publish", "numbers", "-", stdin="n\n1\n", code=1)
    assert done.stderr.startswith("error: standard input, line 1: it is no JSON.\n")
    call("streams", "publish", "numbers", "-", "--input", "csv", stdin="n\n1\n")
    assert stored() == ["1"]


def test_unknown_column_gets_the_nearest_field(local, call) -> None:
    declare("users", fields={"id": "int64", "Email": "string"})
    Path("a.csv").write_text("id,emial,other\n1,a,b\n")
    done = call("streams", "publish", "users", "a.csv")
    assert done.stderr == "note: a.csv: the column 'emial' is no field of users. Did you mean 'Email'?\n"
    assert done.stdout == "published 1 event to users\n"


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", "n,s\n"), ("a.csv", ""), ("a.ndjson", "\n"), ("a.json", "[]"), ("a.txt", "")]
)
def test_empty_input_is_said(numbers, call, name: str, text: str) -> None:
    Path(name).write_text(text)
    assert call("streams", "publish", "numbers", name).stdout == f"{name} holds no event: nothing was published\n"


def test_nothing_after_what_is_skipped(numbers, call) -> None:
    done = call("streams", "publish", "numbers", "--data", '{"n": 1}', "--skip", 1)
    assert done.stdout == "--data holds no event after the first 1: nothing was published\n"
