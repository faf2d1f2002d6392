"""Connections to a bucket, and the settings of each client for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from weft.errors import DeclarationError
from weft.systems.aws import check_keys
from weft.systems.base import Connection, measured

_lock = Lock()
_ENDPOINT = re.compile(r"https?://[^/@]+/?$")


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
        check_keys(self)

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

    def hadoop(self) -> dict[str, str | None]:
        """Return the settings of Spark's s3a for this bucket alone, so that two buckets may have different servers and
        keys. `None` is a setting that is left out."""
        resolved = self.resolved()
        endpoint, token = resolved.endpoint, resolved.session_token
        key = resolved.access_key_id if resolved.secret_access_key else None
        provider = f"org.apache.hadoop.fs.s3a.{'Temporary' if token else 'Simple'}AWSCredentialsProvider"
        settings = {
            "endpoint": endpoint,
            "connection.ssl.enabled": endpoint and str(endpoint.startswith("https")).lower(),
            # Other servers have no host name for each bucket.
            "path.style.access": endpoint and str("amazonaws.com" not in endpoint).lower(),
            "endpoint.region": resolved.region or (endpoint and "us-east-1"),
            "aws.credentials.provider": key and provider,
            "access.key": key,
            "secret.key": key and resolved.secret_access_key,
            "session.token": key and token,
        }
        return {f"fs.s3a.bucket.{resolved.bucket}.{name}": value or None for name, value in settings.items()}

    def configure(self, spark: Any) -> None:
        wanted = self.hadoop()
        configuration = spark.sparkContext._jsc.hadoopConfiguration()
        with _lock:
            # Hadoop keeps one client a bucket: a second connection with other keys would silently use the first one's.
            present = {name: configuration.get(name) for name in wanted}
            if present == wanted:
                return
            if any(value is not None for value in present.values()):
                raise DeclarationError(
                    f"The bucket of {self.label} is in use by this process with another endpoint, region or key.",
                    hint="Use one connection a bucket in a process.",
                )
            for name, value in wanted.items():
                if value is not None:
                    configuration.set(name, value)

    @property
    def root(self) -> str:
        """The URL of the bucket and prefix, as Spark names it."""
        resolved = self.resolved()
        return "s3a://" + "/".join(part for part in (resolved.bucket, resolved.prefix.strip("/")) if part)
