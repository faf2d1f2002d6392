"""The client of boto3 for a connection: it waits where Kinesis asks it to, and its errors are ours."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from weft import settings
from weft.errors import ConnectionFailedError, StorageError, WeftError, unknown
from weft.systems.base import require
from weft.systems.requests import Retries, chunks

if TYPE_CHECKING:
    from weft.systems.kinesis.connection import KinesisConnection

PATIENCE = 60.0
"""How many seconds to go on while Kinesis says that there are too many requests."""
_NETWORK_PATIENCE = 5.0
_HINT = "Check region, endpoint and keys."
_THROTTLED = {
    "ProvisionedThroughputExceededException",
    "LimitExceededException",
    "KMSThrottlingException",
    "ThrottlingException",
    "Throttling",
    "InternalFailure",
    "InternalFailureException",
}
# Limits of one PutRecords.
_MOST_RECORDS, _MOST_BYTES, _LARGEST = 500, 4 << 20, 1 << 20


class KinesisClient:
    """Calls Kinesis for one resolved connection. Thread-safe."""

    def __init__(self, connection: KinesisConnection, patience: float = PATIENCE) -> None:
        boto3 = require("boto3", connection.kind)
        config = require("botocore.config", connection.kind)
        self.errors = require("botocore.exceptions", connection.kind)
        self.connection, self.patience = connection, patience
        session = boto3.session.Session()
        self.region = connection.region or session.region_name or ("us-east-1" if connection.endpoint else None)
        if self.region is None:
            raise ConnectionFailedError(
                f"{connection.label} names no region.", hint='region="eu-west-1", or the variable AWS_REGION.'
            )
        self.client = session.client(
            "kinesis",
            region_name=self.region,
            endpoint_url=connection.endpoint,
            aws_access_key_id=connection.access_key_id,
            aws_secret_access_key=connection.secret_access_key,
            aws_session_token=connection.session_token,
            # Tried again by `call`, which knows how long.
            config=config.Config(
                retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=5, read_timeout=30
            ),
        )

    def call(self, operation: str, **arguments: Any) -> Any:
        """Return what Kinesis answers. Wait and ask again where it is asked too often, or cannot be reached."""
        retries = Retries()
        while True:
            try:
                return getattr(self.client, operation)(**arguments)
            except self.errors.ClientError as error:
                code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
                patience = self.patience if code in _THROTTLED or status >= 500 else 0.0
                failure = self._refused(error, code, arguments)
            except (self.errors.ConnectionError, self.errors.HTTPClientError) as error:
                patience = min(self.patience, _NETWORK_PATIENCE)
                failure = self.connection.unreachable(error, answered=False)
            except self.errors.BotoCoreError as error:  # no credentials, an argument that cannot be
                raise self.connection.failed(error, hint=self.connection.checked(_HINT)) from None
            retries.pause(failure, patience)

    def _refused(self, error: Any, code: str, arguments: dict[str, Any]) -> WeftError:
        is_shard = arguments.get("ShardId", "…") in str(error)
        if code == "ResourceNotFoundException" and "StreamName" in arguments and not is_shard:
            return unknown(
                f"stream of {self.connection.label}",
                arguments["StreamName"],
                self._streams_or_none(),
                otherwise="Weft makes no streams: create it, or name another one.",
            )
        if code == "ExpiredIteratorException":
            return ExpiredIteratorError("The iterator of a shard is too old.")
        text = settings.redact(error.response["Error"].get("Message", code), self.connection.secrets())
        if code in ("InvalidArgumentException", "ResourceNotFoundException"):
            return StorageError(f"{self.connection.label} ({self.connection.target}): {code}: {text}")
        return self.connection.failed(ConnectionError(f"{code}: {text}"), hint=self.connection.checked(_HINT))

    def _streams_or_none(self) -> list[str]:
        try:
            return self.streams()
        except WeftError:  # who may read one stream need not be allowed to list them
            return []

    # ---------------------------------------------------------------------------------------------------------- reading

    def streams(self) -> list[str]:
        names: list[str] = []
        while True:
            more = {"ExclusiveStartStreamName": names[-1]} if names else {}
            page = self.call("list_streams", **more)
            names += page["StreamNames"]
            if not page["HasMoreStreams"] or not page["StreamNames"]:
                return names

    def shards(self, stream: str) -> dict[str, tuple[str, ...]]:
        """Return by shard its parents, in the order of ids: those of children are greater."""
        return {each["ShardId"]: _parents(each) for each in self._list_shards(stream)}

    def open_shards(self, stream: str) -> list[str]:
        """Return the shards that take records."""
        listed = self._list_shards(stream)
        return [each["ShardId"] for each in listed if "EndingSequenceNumber" not in each["SequenceNumberRange"]]

    def _list_shards(self, stream: str) -> list[dict[str, Any]]:
        page = self.call("list_shards", StreamName=stream)
        shards = page["Shards"]
        while page.get("NextToken"):
            page = self.call("list_shards", NextToken=page["NextToken"])
            shards += page["Shards"]
        return sorted(shards, key=lambda each: str(each["ShardId"]))

    def iterator(self, stream: str, shard: str, arguments: dict[str, Any]) -> str:
        answer = self.call("get_shard_iterator", StreamName=stream, ShardId=shard, **arguments)
        return str(answer["ShardIterator"])

    # ---------------------------------------------------------------------------------------------------------- writing

    def send(self, stream: str, records: Iterable[tuple[str, bytes]]) -> int:
        """Store records (partition key, data), and return their number once Kinesis has all of them."""
        count = 0
        for chunk in chunks(records, lambda record: _size(record, stream), _MOST_RECORDS, _MOST_BYTES):
            self._put(stream, [{"PartitionKey": key, "Data": data} for key, data in chunk])
            count += len(chunk)
        return count

    def _put(self, stream: str, records: list[dict[str, Any]]) -> None:
        """Put records. Those that were not taken are put again."""
        retries = Retries()
        while True:
            answers = self.call("put_records", StreamName=stream, Records=records)["Records"]
            failed = [number for number, each in enumerate(answers) if each.get("ErrorCode")]
            if not failed:
                return
            first = answers[failed[0]]
            error = StorageError(
                f"{len(failed)} of {len(answers)} records were not taken by the stream {stream!r} of "
                f"{self.connection.label}: {first['ErrorCode']}: {first.get('ErrorMessage', '')}",
                hint="Give the stream more shards. What is stored is there twice when the batch is tried again.",
            )
            retries.pause(error, self.patience)
            records = [records[number] for number in failed]


class ExpiredIteratorError(StorageError):
    """An iterator was not used for five minutes."""


@lru_cache(maxsize=32)
def _client(connection: KinesisConnection) -> KinesisClient:
    return KinesisClient(connection)


def client(connection: KinesisConnection) -> KinesisClient:
    """Return the process's client of a connection, as its variables are now."""
    return _client(connection.resolved())


def _parents(shard: dict[str, Any]) -> tuple[str, ...]:
    return tuple(shard[name] for name in ("ParentShardId", "AdjacentParentShardId") if shard.get(name))


def _size(record: tuple[str, bytes], stream: str) -> int:
    key, data = record
    size = len(key.encode()) + len(data)
    if size > _LARGEST:
        raise StorageError(
            f"A record for the stream {stream!r} has {size:,} bytes, and Kinesis takes {_LARGEST:,}.",
            hint="Leave columns out, or write such rows elsewhere.",
        )
    return size
