"""Connections to folders and buckets are values whose mistakes are said early, and whose secrets are not said."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import (
    ConnectionFailedError,
    DeclarationError,
    DeltaLocalConnection,
    DeltaS3Connection,
    ObjectStoreLocalConnection,
    ObjectStoreS3Connection,
)

KEYS = {"access_key_id": "me", "secret_access_key": "hunter2", "session_token": "hunter3"}
ONE_OF_EACH = [
    ObjectStoreLocalConnection("/data/lake", format="csv", csv_read_options={"delimiter": ";"}, name="a"),
    ObjectStoreS3Connection("lake", prefix="a/b", endpoint="http://localhost:9000", **KEYS, name="a"),
    DeltaLocalConnection("/data/delta", name="a"),
    DeltaS3Connection("lake", region="eu-west-1", **KEYS, name="a"),
]
each_kind = pytest.mark.parametrize("connection", ONE_OF_EACH, ids=repr)


@each_kind
def test_is_a_value(connection: Any) -> None:
    twin = copy.copy(connection)
    assert (twin, hash(twin)) == (connection, hash(connection))
    again = pickle.loads(pickle.dumps(connection))
    assert (again, hash(again)) == (connection, hash(connection))


@each_kind
def test_shows_no_secret(connection: Any) -> None:
    for text in (repr(connection), repr(connection.resolved()), connection.target, connection.label):
        assert "hunter" not in text


def test_options_are_the_connections_own() -> None:
    given = {"delimiter": ";"}
    connection = ObjectStoreLocalConnection("lake", format="csv", csv_read_options=given)
    given["delimiter"] = ","
    assert connection.options.read["delimiter"] == ";"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObjectStoreS3Connection("a/b"), "not the name of a bucket"),
        (lambda: ObjectStoreS3Connection("s3://lake"), "not the name of a bucket"),
        (lambda: DeltaS3Connection("lake", endpoint="localhost:9000"), "http://host:port"),
        (lambda: DeltaS3Connection("lake", endpoint="http://me:hunter2@localhost:9000"), "fields of their own"),
        (lambda: DeltaS3Connection("lake", access_key_id="me"), "both access_key_id and secret_access_key"),
        (lambda: DeltaS3Connection("lake", session_token="hunter2"), "session_token needs"),
        (lambda: DeltaS3Connection("lake", buket="x"), "Did you mean 'bucket'"),
        (lambda: DeltaLocalConnection("s3://lake"), r"folder of this machine[\s\S]*DeltaS3Connection"),
        (lambda: DeltaLocalConnection(""), "folder of this machine"),
        (lambda: DeltaLocalConnection("x", format="csv"), "no field 'format'"),
        (lambda: ObjectStoreLocalConnection("x", fromat="csv"), "Did you mean 'format'"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message) as caught:
        make()
    assert "hunter" not in str(caught.value)


def test_declared_in_a_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (project / "weft.toml").write_text(
        """
        [connections.lake]
        kind = "object_store_local"
        path = "lake"
        format = "csv"
        csv_delimiter = ";"
        csv_read_options = { delimiter = 59, null_regex = "^NA$" }

        [connections.archive]
        kind = "delta_s3"
        bucket = "ematix-archive"
        prefix = "events"
        access_key_id = "me"
        secret_access_key = "${SECRET}"
        """
    )
    lake, archive = weft.get_connection("lake"), weft.get_connection("archive")
    assert isinstance(lake, ObjectStoreLocalConnection)
    assert lake.root == str(project / "lake")
    assert lake.options.read["delimiter"] == ";"
    assert isinstance(archive, DeltaS3Connection)
    assert archive.target == "s3://ematix-archive/events"
    assert archive.root == "s3a://ematix-archive/events"
    assert archive.hadoop()["fs.s3a.bucket.ematix-archive.secret.key"] == "hunter2"
    assert "hunter2" not in repr(archive.resolved())


@pytest.mark.parametrize("kind", [ObjectStoreLocalConnection, DeltaLocalConnection])
def test_check_of_a_folder(kind: Any, tmp_path: Path) -> None:
    assert kind("lake").check()["note"] == "the folder is created at first use"
    assert not Path("lake").exists()
    Path("lake").mkdir()
    assert kind("lake").check()["latency_ms"] >= 0
    Path("file").touch()
    for path in ("file", "file/lake"):
        with pytest.raises(ConnectionFailedError, match="Cannot open"):
            kind(path).check()
    if os.geteuid():
        Path("lake").chmod(0)
        with pytest.raises(ConnectionFailedError, match="Permission denied"):
            kind("lake").check()


@pytest.mark.parametrize("kind", [ObjectStoreS3Connection, DeltaS3Connection])
def test_check_of_a_bucket(kind: Any, s3: Any) -> None:
    given = {"endpoint": s3.endpoint, "access_key_id": "me", "secret_access_key": "hunter2"}
    assert kind(s3.bucket(), prefix="not/there/yet", **given).check()["latency_ms"] >= 0
    with pytest.raises(ConnectionFailedError, match="no bucket nothing-here") as caught:
        kind("nothing-here", **given).check()
    assert "hunter" not in str(caught.value)


def test_check_where_no_server_is() -> None:
    connection = DeltaS3Connection(
        "lake", endpoint="http://127.0.0.1:9", access_key_id="me", secret_access_key="hunter2"
    )
    with pytest.raises(ConnectionFailedError, match="Cannot open a delta_s3 connection") as caught:
        connection.check()
    assert "hunter" not in str(caught.value)
