"""Streams of Kinesis on moto's server, or on a second one that `make faults` installs, seen by boto3 itself.

def test_something(kinesis):
    stream = kinesis.create_stream(shards=2)
    kinesis.put(stream, [b'{"n": 1}'], key="a")
    connection = weft.KinesisConnection(**kinesis.fields())
"""

from __future__ import annotations

import functools
import json
import socket
from typing import Any

from object_servers import CACHE
from servers import KINDS, Server, free_port, wait_until


class Kinesis:
    """A server that speaks Kinesis."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def fields(self) -> dict[str, str]:
        """What a connection needs."""
        return {
            "endpoint": str(self.server.url()),
            "region": "eu-west-1",
            "access_key_id": "me",
            "secret_access_key": "hunter2",
        }

    @functools.cached_property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "kinesis",
            endpoint_url=self.server.url(),
            region_name="eu-west-1",
            aws_access_key_id="other",
            aws_secret_access_key="other",
        )

    def create_stream(self, shards: int = 1) -> str:
        """Make an empty stream and give its name."""
        name = f"stream_{next(self.server.numbers)}"
        self.client.create_stream(StreamName=name, ShardCount=shards)
        self._wait_for(name)
        return name

    def _wait_for(self, stream: str) -> None:
        """Wait until a stream takes requests again. Moto's always does."""
        if isinstance(self.server, KinesisLocalServer):
            waits = lambda: self.client.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]  # noqa: E731
            wait_until(lambda: waits()["StreamStatus"] == "ACTIVE", f"{stream} to be active")

    def put(self, stream: str, values: list[bytes], key: str = "key") -> None:
        """Add records, one after the other, all with one key."""
        for first in range(0, len(values), 500):
            records = [{"Data": value, "PartitionKey": key} for value in values[first : first + 500]]
            assert not self.client.put_records(StreamName=stream, Records=records)["FailedRecordCount"]

    def records(self, stream: str) -> list[dict[str, Any]]:
        """Every record, shard by shard."""
        found: list[dict[str, Any]] = []
        for shard in self.client.list_shards(StreamName=stream)["Shards"]:
            where = {"StreamName": stream, "ShardId": shard["ShardId"], "ShardIteratorType": "TRIM_HORIZON"}
            iterator = self.client.get_shard_iterator(**where)["ShardIterator"]
            found += self.client.get_records(ShardIterator=iterator)["Records"]
        return found

    def split(self, stream: str, shard: str = "shardId-000000000000") -> None:
        """Split a shard in two halves."""
        shards = {each["ShardId"]: each["HashKeyRange"] for each in self._list(stream)}
        middle = (int(shards[shard]["StartingHashKey"]) + int(shards[shard]["EndingHashKey"])) // 2
        self.client.split_shard(StreamName=stream, ShardToSplit=shard, NewStartingHashKey=str(middle))
        self._wait_for(stream)

    def merge(self, stream: str, shard: str, adjacent: str) -> None:
        """Merge two shards."""
        self.client.merge_shards(StreamName=stream, ShardToMerge=shard, AdjacentShardToMerge=adjacent)
        self._wait_for(stream)

    def _list(self, stream: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.list_shards(StreamName=stream)["Shards"]
        return found

    def refuse(self, stream: str, **requests: int) -> None:
        """Have the next so many requests refused, as if there were too many: `GetRecords=2`."""
        (self.server.folder / "faults.json").write_text(json.dumps({"stream": stream, **requests}))

    def left_to_refuse(self) -> dict[str, Any]:
        """What of it is left."""
        left: dict[str, Any] = json.loads((self.server.folder / "faults.json").read_text())
        return left


class KinesisLocalServer(Server):
    """Another server that speaks Kinesis. Its sequence numbers have 56 digits, as Amazon's; moto's are 1, 2, 3."""

    name = "kinesis-local"
    package = "nodejs npm"
    user = "root"

    @classmethod
    def programs(cls) -> list[str]:
        return ["kinesis-local"]

    @classmethod
    def search_path(cls) -> list[str]:
        return [str(CACHE / "node_modules" / ".bin")]

    def initialise(self) -> None:
        self.tls_port = free_port()

    def command(self) -> list[str]:
        certificate = CACHE / "node_modules/kinesis-local/server.json"
        settings = {
            "KINESIS_MOCK_PLAIN_PORT": self.port,
            "KINESIS_MOCK_TLS_PORT": self.tls_port,
            "KINESIS_MOCK_CERT_PATH": certificate,
            **{f"{each}_DURATION": "1ms" for each in ("CREATE_STREAM", "SPLIT_SHARD", "MERGE_SHARDS")},
        }
        return ["env", *(f"{name}={value}" for name, value in settings.items()), self.program]

    def connect(self, database: str | None = None) -> Any:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def url(self, database: str | None = None) -> str:
        return f"http://127.0.0.1:{self.port}"


KINDS["kinesis"] = KinesisLocalServer
