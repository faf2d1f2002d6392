"""How to reach Kinesis, and what the records of its streams hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from dataclasses import field as option
from typing import Any, ClassVar

from weft.errors import DeclarationError
from weft.systems.aws import check_keys
from weft.systems.base import Connection, measured
from weft.systems.endpoint import BrokerEndpoint
from weft.systems.kinesis.shard_positions import SHARD_PLACES, TIME

FORMATS = ("json", "raw_bytes")
_ENDPOINT = re.compile(r"https?://[^/@]+/?")
MOST_KEY = 256
"""The characters of a partition key."""


@dataclass(frozen=True)
class KinesisConnection(Connection):
    """The streams of a region: `KinesisConnection(region="eu-west-1", name="events")`.

    Without keys, those of the environment, of `~/.aws` or of the machine's role are used. `endpoint` names a server
    other than Amazon's. `payload_format` says what records hold: `json` (an object each) or `raw_bytes`.
    """

    kind: ClassVar[str] = "kinesis"

    region: str | None = option(default=None, kw_only=True)
    stream: str | None = option(default=None, kw_only=True)
    endpoint: str | None = option(default=None, kw_only=True)
    access_key_id: str | None = option(default=None, kw_only=True)
    secret_access_key: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    session_token: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    payload_format: str = option(default="json", kw_only=True)
    metadata_columns: bool = option(default=False, kw_only=True)
    partition_key: str | None = option(default=None, kw_only=True)

    def validate(self) -> None:
        """Raise for fields that contradict each other."""
        super().validate()
        self.one_of("payload_format", FORMATS)
        if self.is_known("endpoint") and self.endpoint and not _ENDPOINT.fullmatch(self.endpoint):
            raise DeclarationError(
                f"The endpoint of {self.label} must be http://host:port or https://host.",
                hint="Keys have fields of their own: access_key_id and secret_access_key.",
            )
        check_keys(self)
        if self.partition_key is not None and not 0 < len(self.partition_key) <= MOST_KEY:
            raise DeclarationError(f"The partition_key of {self.label} has 1 to {MOST_KEY} characters.")
        if self.metadata_columns and self.payload_format == "raw_bytes":
            raise DeclarationError(
                f"{self.label} asks for metadata_columns, which rows of raw_bytes always have.", hint="Leave it out."
            )

    @property
    def target(self) -> str:
        parts = [f"in {self.region}" if self.region else "", f"at {self.endpoint}" if self.endpoint else ""]
        return " ".join(filter(None, ["Kinesis", self.stream, *parts]))

    def identity(self) -> object:
        """Return the region and the endpoint: the credentials do not decide which streams there are."""
        return self.region, self.endpoint

    def check(self) -> dict[str, Any]:
        """Describe the stream, or list the streams where the connection names none."""
        from weft.systems.kinesis.client import KinesisClient

        report: dict[str, Any] = {}
        resolved = self.resolved()
        client = KinesisClient(resolved, patience=0.0)
        with measured(report):
            if resolved.stream:
                held: dict[str, Any] = {"stream": resolved.stream, "shards": len(client.open_shards(resolved.stream))}
            else:
                held = {"streams": len(client.streams())}
        return {"server": "Kinesis", "database": client.region, **held, **report}


class KinesisEndpoint(BrokerEndpoint):
    """A stream of Kinesis. A source may start at a time, or at a sequence number of each shard."""

    start_forms: ClassVar = {
        **BrokerEndpoint.start_forms,
        TIME: "a time, which Kinesis takes",
        SHARD_PLACES: "sequence numbers of shards, which Kinesis has",
    }
    noun = "records"
