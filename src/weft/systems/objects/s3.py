"""Connections to a bucket, and the settings of each client for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from weft.errors import DeclarationError
from weft.systems.base import Connection, measured

_lock = Lock()
_ENDPOINT = re.compile(r"https?://[^/@]+/?$")
_HADOOP_NAMES = (
    "endpoint",
    "connection.ssl.enabled",
    "path.style.access",
    "endpoint.region",
    "aws.credentials.provider",
    "access.key",
    "secret.key",
    "session.token",
)


@dataclass(frozen=True)
class S3Connection(Connection):
    """A bucket of S3, or of a server that speaks its protocol at `endpoint`.

    Without keys, those of the environment, of `~/.aws` or of the machine's role are used.
    """

    bucket: str
    prefix: str = field(default="", kw_only=True)
    endpoint: str | None = field(default=None, kw_only=True)
    region: str | None = field(default=None, kw_only=True)
    access_key_id: str | None = field(default=None, kw_only=True)
    secret_access_key: str | None = field(default=None, kw_only=True, metadata={"secret": True})
    session_token: str | None = field(default=None, kw_only=True, metadata={"secret": True})

    def validate(self) -> None:
        """A bucket's name, an endpoint that is a URL, and both halves of a key or none."""
        super().validate()
        if "${" not in self.bucket and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}", self.bucket):
            raise DeclarationError(
                f"The bucket of {self.label} is not the name of a bucket.",
                hint='Its name alone, of at least three letters: bucket = "my-lake". The folder in it is prefix.',
            )
        if self.endpoint is not None and "${" not in self.endpoint and not _ENDPOINT.match(self.endpoint):
            raise DeclarationError(
                f"The endpoint of {self.label} must be http://host:port or https://host.",
                hint="Keys have fields of their own: access_key_id and secret_access_key.",
            )
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise DeclarationError(
                f"{self.label} needs both access_key_id and secret_access_key.",
                hint="Or neither: then those of the environment are used.",
            )
        if self.session_token is not None and self.access_key_id is None:
            raise DeclarationError(f"A session_token needs access_key_id and secret_access_key ({self.label}).")

    @property
    def target(self) -> str:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{'/'.join(part for part in (self.bucket, self.prefix.strip('/')) if part)}{at}"

    def check(self) -> dict[str, Any]:
        """List what is directly under the prefix."""
        # Not through Spark: to learn that a password is wrong must not take its start.
        from pyarrow import fs

        resolved = self.resolved()
        report: dict[str, Any] = {"server": resolved.endpoint or "S3", "database": resolved.bucket}
        patience: dict[str, Any] = {"connect_timeout": 10, "request_timeout": 20}
        patience["retry_strategy"] = fs.AwsStandardS3RetryStrategy(max_attempts=2)
        try:
            with measured(report):
                selector = fs.FileSelector(f"{resolved.bucket}/{resolved.prefix}".rstrip("/"), allow_not_found=True)
                store = self.filesystem(**patience)
                if store.get_file_info(resolved.bucket).type != fs.FileType.Directory:
                    raise OSError(f"there is no bucket {resolved.bucket}")
                store.get_file_info(selector)
        except OSError as error:
            raise self.failed(error, hint="Check endpoint, region, bucket and keys.") from None
        return report

    def filesystem(self, **options: Any) -> Any:
        """Arrow's client of this bucket's server, with options of its own."""
        from pyarrow import fs

        resolved = self.resolved()
        if resolved.endpoint:
            scheme, _, host = resolved.endpoint.partition("://")
            options |= {"scheme": scheme, "endpoint_override": host.rstrip("/"), "region": "us-east-1"}
        if resolved.region:
            options["region"] = resolved.region
        if resolved.access_key_id:
            options |= {"access_key": resolved.access_key_id, "secret_key": resolved.secret_access_key}
        if resolved.session_token:
            options["session_token"] = resolved.session_token
        return fs.S3FileSystem(**options)

    def hadoop(self) -> dict[str, str]:
        """Settings of Spark's s3a for this bucket alone, so that two buckets may have different servers and keys."""
        resolved = self.resolved()
        start = f"fs.s3a.bucket.{resolved.bucket}."
        settings: dict[str, str] = {}
        if resolved.endpoint:
            settings["endpoint"] = resolved.endpoint
            settings["connection.ssl.enabled"] = str(resolved.endpoint.startswith("https")).lower()
            # Other servers have no host name for each bucket.
            settings["path.style.access"] = str("amazonaws.com" not in resolved.endpoint).lower()
            settings["endpoint.region"] = resolved.region or "us-east-1"
        elif resolved.region:
            settings["endpoint.region"] = resolved.region
        if resolved.access_key_id and resolved.secret_access_key:
            kind = "Temporary" if resolved.session_token else "Simple"
            settings["aws.credentials.provider"] = f"org.apache.hadoop.fs.s3a.{kind}AWSCredentialsProvider"
            settings["access.key"] = resolved.access_key_id
            settings["secret.key"] = resolved.secret_access_key
            if resolved.session_token:
                settings["session.token"] = resolved.session_token
        return {start + name: value for name, value in settings.items()}

    def configure(self, spark: Any) -> None:
        """Set the bucket's endpoint, region and keys in the session's Hadoop configuration."""
        wanted = self.hadoop()
        configuration = spark.sparkContext._jsc.hadoopConfiguration()
        names = [f"fs.s3a.bucket.{self.resolved().bucket}.{name}" for name in _HADOOP_NAMES]
        with _lock:
            # Hadoop keeps one client a bucket: a second connection with other keys would silently use the first one's.
            present = {name: value for name in names if (value := configuration.get(name)) is not None}
            if present == wanted:
                return
            if present:
                raise DeclarationError(
                    f"The bucket of {self.label} is in use by this process with another endpoint, region or key.",
                    hint="Use one connection a bucket in a process.",
                )
            for name, value in wanted.items():
                configuration.set(name, value)

    @property
    def root(self) -> str:
        """The URL of the bucket and prefix, as Spark names it."""
        resolved = self.resolved()
        return "s3a://" + "/".join(part for part in (resolved.bucket, resolved.prefix.strip("/")) if part)
