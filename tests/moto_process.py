"""Moto's server, with Kinesis nearer to Amazon's, and with the faults that a test asks for.

    python moto_process.py FOLDER -H 127.0.0.1 -p 5000

Moto moves the records of a shard that is split or merged to its children, and puts new ones into it. Amazon leaves
what is there, and ends the shard; and it refuses sequence numbers that are not its own.

A test that writes `FOLDER/faults.json`, `{"stream": "orders", "GetRecords": 2}`, has the next two such requests of that
stream refused because there are too many. Of a PutRecords every other record is refused. `Expired` is a GetRecords by
an iterator that is too old, `Denied` one by keys that were revoked.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.kinesis import models
from moto.kinesis.responses import KinesisResponse
from moto.kinesis.utils import decompose_shard_iterator
from moto.s3.responses import S3Response

FAULTS = Path(sys.argv.pop(1)) / "faults.json"
_lock, _putting = threading.Lock(), threading.Lock()


def main() -> None:
    from moto.server import main as serve

    models.Stream.split_shard = _keeping_records(models.Stream.split_shard)
    models.Stream.merge_shards = _keeping_records(models.Stream.merge_shards)
    models.Stream.get_shard_for_key = _open_shard_for_key
    S3Response.put_object = _one_at_a_time(S3Response.put_object)
    KinesisResponse.get_shard_iterator = _get_shard_iterator
    KinesisResponse.get_records = _get_records
    KinesisResponse.put_records = _put_records
    serve(sys.argv[1:])


def _one_at_a_time(put: Any) -> Any:
    """Moto looks at the condition of a put, and stores it later: of two puts at once both would succeed."""

    def alone(self: Any, *arguments: Any) -> Any:
        with _putting:
            return put(self, *arguments)

    return alone


def _keeping_records(reshard: Any) -> Any:
    def kept(self: Any, *shards: str) -> None:
        before = {name: dict(shard.records) for name, shard in self.shards.items()}
        reshard(self, *shards)
        for name, shard in self.shards.items():
            shard.records = type(shard.records)(before.get(name, {}))

    return kept


_real_shard = models.Stream.get_shard_for_key


def _open_shard_for_key(self: Any, *key: Any) -> Any:
    with _lock:
        shards = self.shards
        self.shards = {name: shard for name, shard in shards.items() if shard.is_open}
        try:
            return _real_shard(self, *key)
        finally:
            self.shards = shards


_real_iterator = KinesisResponse.get_shard_iterator


def _get_shard_iterator(self: Any) -> Any:
    stream = self.kinesis_backend.streams.get(self._get_param("StreamName"))
    shard = stream.shards.get(self._get_param("ShardId")) if stream is not None else None
    number = self._get_param("StartingSequenceNumber")
    if shard is not None and number is not None and int(number) > shard.get_max_sequence_number():
        raise JsonRESTError(
            "InvalidArgumentException",
            f"StartingSequenceNumber {number} used in GetShardIterator on shard {shard.shard_id} is invalid because it "
            "did not come from this stream.",
        )
    return _real_iterator(self)


_real_get, _real_put = KinesisResponse.get_records, KinesisResponse.put_records


def _get_records(self: Any) -> Any:
    name, shard, _ = decompose_shard_iterator(self._get_param("ShardIterator"))
    if _is_asked(name, "GetRecords"):
        raise JsonRESTError("ProvisionedThroughputExceededException", f"Rate exceeded for shard {shard}")
    if _is_asked(name, "Expired"):
        raise JsonRESTError("ExpiredIteratorException", "Iterator expired.")
    if _is_asked(name, "Denied"):
        raise JsonRESTError("UnrecognizedClientException", "The security token included in the request is invalid.")
    told = _real_get(self)
    found = self.kinesis_backend.streams[name].shards[shard]
    reached = int(decompose_shard_iterator(told.result["NextShardIterator"])[2])
    if not found.is_open and reached >= found.get_max_sequence_number():
        told.result["NextShardIterator"] = None
    return told


def _put_records(self: Any) -> Any:
    if not _is_asked(self._get_param("StreamName"), "PutRecords"):
        return _real_put(self)
    records = self._get_param("Records")
    self._get_param = {
        "StreamName": self._get_param("StreamName"),
        "Records": records[::2],
    }.get  # type: ignore[method-assign]
    told = _real_put(self)
    refused = {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "Rate exceeded"}
    taken = iter(told.result["Records"])
    told.result["Records"] = [refused if number % 2 else next(taken) for number in range(len(records))]
    told.result["FailedRecordCount"] = len(records) // 2
    return told


def _is_asked(stream: str, operation: str) -> bool:
    """Whether a test asks for a fault here: one less is left."""
    with _lock:
        faults = json.loads(FAULTS.read_text()) if FAULTS.exists() else {}
        if faults.get("stream") != stream or not faults.get(operation):
            return False
        FAULTS.write_text(json.dumps({**faults, operation: faults[operation] - 1}))
        return True


if __name__ == "__main__":
    main()
