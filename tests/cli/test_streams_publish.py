"""`weft streams publish`: every form of input ends as the same events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import weft
from workers import declare, drain, plain

EVENTS = [{"n": 1, "s": "a, b"}, {"n": 2}, {"n": 3, "s": 'say "é"\nand more'}]

JSON_LIST = json.dumps(EVENTS)
PRETTY = json.dumps(EVENTS, indent=2, ensure_ascii=False)
NDJSON = "\n\n".join(map(json.dumps, EVENTS)) + "\n"
WINDOWS = "\ufeff" + NDJSON.replace("\n", "\r\n")
CONCATENATED = " ".join(json.dumps(event, indent=1) for event in EVENTS)
CSV = 'n,s\n1,"a, b"\n2,\n\n3,"say ""é""\nand more"\n'


def published() -> list[dict[str, object]]:
    return [plain(event) for event in drain("numbers")]


@pytest.fixture
def numbers(local) -> None:
    declare("numbers", fields={"n": "int64", "s": "string"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", JSON_LIST),
        ("a.json", PRETTY),
        ("a.json", NDJSON),
        ("a.JSON", CONCATENATED),
        ("a.ndjson", NDJSON),
        ("a.jsonl", WINDOWS),
        ("a.csv", CSV),
        ("a.csv", "\ufeff" + CSV.replace("\n2,", "\r\n2,")),
        ("a.txt", JSON_LIST),
        ("a.txt", "\n \n" + PRETTY),
        ("a.txt", CONCATENATED),
        ("a.txt", WINDOWS),
        ("a.txt", CSV),
    ],
)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
def test_file(numbers, call, name: str, text: str, compressed: bool) -> None:
    content = text.encode()
    file = Path(name + ".gz" * compressed)
    file.write_bytes(gzip.compress(content) if compressed else content)
    assert call("streams", "publish", "numbers", file).stdout == "published 3 events to numbers\n"
    assert published() == EVENTS


@pytest.mark.parametrize("text", [JSON_LIST, PRETTY, NDJSON, CONCATENATED, CSV])
@pytest.mark.parametrize("file", [["-"], []], ids=["dash", "none"])
def test_standard_input(run, shop, text: str, file: list[str]) -> None:
    done = run("streams", "publish", "numbers", *file, stdin=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "published 3 events to numbers\n", "")
    assert run("streams", "tail", "numbers", "--format", "json").stdout.count("\n") == 3


@pytest.mark.parametrize("text", [JSON_LIST, PRETTY, CONCATENATED])
def test_data(numbers, call, text: str) -> None:
    call("streams", "publish", "numbers", "--data", text)
    assert published() == EVENTS


@pytest.mark.parametrize("layout", ["json", "ndjson", "csv"])
def test_form_that_is_told(numbers, call, layout: str) -> None:
    Path("a.txt").write_text({"json": JSON_LIST, "ndjson": NDJSON, "csv": CSV}[layout])
    call("streams", "publish", "numbers", "a.txt", "--input", layout)
    assert published() == EVENTS


@pytest.mark.parametrize("text", ["", "\n\n", "[]", " [ ] "])
def test_nothing(numbers, call, text: str) -> None:
    Path("a").write_text(text)
    assert call("streams", "publish", "numbers", "a").stdout == "a holds no event: nothing was published\n"


def test_all_systems_and_the_report(streams, call) -> None:
    declare("numbers", fields={"n": "int64"}, idempotency_key="n", on_schema_drift="quarantine")
    weft.model(name="copies")(lambda numbers: numbers)
    lines = [{"n": n} for n in range(2500)] + [{"n": 1}, {"n": "x"}]
    Path("a.ndjson").write_text("\n".join(map(json.dumps, lines)))
    report = json.loads(call("streams", "publish", "numbers", "a.ndjson", "--format", "json").stdout)
    assert report.pop("seconds") > 0
    assert report.pop("events_per_second") > 0
    first, last = report.pop("first_rowid"), report.pop("last_rowid")
    assert first >= 1 and last >= 2500
    assert (report.pop("first_rowid_text"), report.pop("last_rowid_text")) == (str(first), str(last))
    assert report.pop("triggered_models") == ["copies"]
    assert report == {"stream": "numbers", "published": 2500, "deduplicated": 1, "quarantined": 1, "rejected": 0}
    assert [event["n"] for event in drain("numbers")] == list(range(2500))
    again = call("streams", "publish", "numbers", "a.ndjson").stdout
    assert again.startswith(
        "published 0 events to numbers, 2,501 deduplicated, 1 quarantined to numbers__quarantine in "
    )
    assert again.endswith(" a second)\n")


def test_another_connection(numbers, call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN_OTHER", "sqlite:///other.db")
    call("streams", "publish", "numbers", "--data", "{}", "--connection", "other")
    assert Path("other.db").exists()
    assert published() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["numbers", "missing.json"],
        ["numbers", "a", "--data", "{}"],
        ["numbers", "--data", " "],
        ["numbers", "a", "--rejects", "b"],
        ["numbers", "a", "--input", "xml"],
        ["numbers", "a", "--batch-size", "0"],
    ],
)
def test_wrong_usage_is_2(numbers, call, arguments: list[str]) -> None:
    Path("a").write_text("{}")
    call("streams", "publish", *arguments, code=2)
