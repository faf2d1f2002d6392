"""A connection refuses what cannot be, says what answered, and keeps its secrets. Rows get their partition keys."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import Row

import weft
from weft.cli import cli
from weft.systems.kinesis.target import KinesisTarget


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"payload_format": "jsn"}, r"Did you mean 'json'\?"),
        ({"endpoint": "localhost:4566"}, "http://host:port"),
        ({"endpoint": "http://me:secret@host"}, "fields of their own"),
        ({"access_key_id": "me"}, "both access_key_id and secret_access_key"),
        ({"session_token": "x"}, "needs access_key_id"),
        ({"partition_key": ""}, "1 to 256 characters"),
        ({"partition_key": "x" * 257}, "1 to 256 characters"),
        ({"payload_format": "raw_bytes", "metadata_columns": True}, "always have"),
        ({"regin": "eu-west-1"}, r"Did you mean 'region'\?"),
        ({"region": 1}, "region must be str"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(weft.DeclarationError, match=message):
        weft.KinesisConnection(**fields)


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hunter2")
    made = weft.KinesisConnection(
        region="eu-west-1", access_key_id="me", secret_access_key="${KEY}", session_token="hunter3"
    )
    assert made.secrets() == {"hunter2", "hunter3"}
    assert "hunter" not in repr(made) + repr(made.resolved()) + made.target


def test_one_place() -> None:
    one = weft.KinesisConnection(region="eu-west-1", name="one")
    assert one.is_same_place(weft.KinesisConnection(region="eu-west-1", partition_key="x", metadata_columns=True))
    assert not one.is_same_place(weft.KinesisConnection(region="eu-west-2"))


def test_check(kinesis: Any, connection: Any) -> None:
    stream = kinesis.create_stream(3)
    report = connection.check()
    assert (report["server"], report["database"]) == ("Kinesis", "eu-west-1")
    assert report["streams"] >= 1 and report["latency_ms"] > 0
    kinesis.split(stream)
    assert weft.KinesisConnection(**kinesis.fields(), stream=stream).check()["shards"] == 4
    with pytest.raises(weft.NotFoundError, match=r"no stream of a kinesis connection named 'nothing'"):
        weft.KinesisConnection(**kinesis.fields(), stream="nothing").check()


def test_check_by_a_command(kinesis: Any, project: Path) -> None:
    fields = "".join(f'{name} = "{value}"\n' for name, value in kinesis.fields().items())
    Path("weft.toml").write_text(f'[connections.events]\nkind = "kinesis"\n{fields}')
    done = CliRunner().invoke(cli, ["connections", "check", "events", "--format", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["server"] == "Kinesis"
    assert "hunter2" not in done.output


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, so that nobody else is there, and not listening
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        made = weft.KinesisConnection(endpoint=endpoint, access_key_id="me", secret_access_key="hunter2", name="events")
        with pytest.raises(weft.ConnectionFailedError, match=rf"'events' \(Kinesis at {endpoint}\)") as told:
            made.check()
        assert "weft connections check events" in str(told.value) and "hunter2" not in str(told.value)


def test_no_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(weft.ConnectionFailedError, match="names no region"):
        weft.KinesisConnection(name="events").check()


def test_records_of_rows(connection: Any) -> None:
    """What is sent for a row says of which batch it is, and names it by its content."""

    def sent(rows: list[tuple[str | None, str]], **fields: Any) -> list[tuple[str, dict[str, Any]]]:
        made = weft.KinesisConnection(region="eu-west-1", **fields)
        found = KinesisTarget(made)._records(iter([Row(key=key, value=value) for key, value in rows]), "q 7")
        return [(key, json.loads(value)) for key, value in found]

    rows = [("é", '{"n":1}'), (None, '{"n":1}'), ("", "{}"), ("x" * 300, '{"n":2}')]
    (one, two, empty, long) = sent(rows)
    assert one == ("é", {"n": 1, "_weft_batch_id": "q 7", "_weft_row": one[1]["_weft_row"]})
    # A row that is there twice has two names. One without a key is spread by its name.
    assert two[1]["_weft_row"] == f"{one[1]['_weft_row']}-2" == two[0]
    assert empty[0] == empty[1]["_weft_row"]
    assert 0 < len(long[0]) <= 256
    assert [key for key, _ in sent(rows[:2], partition_key="all")] == ["é", "all"]
    # In another order the rows have the same names.
    again = sent([rows[3], rows[1], rows[0], rows[2]])
    assert {each["_weft_row"] for _, each in again} == {each["_weft_row"] for _, each in (one, two, empty, long)}
