"""Objects in Google Cloud Storage, by Google's own client."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import Any

from google.api_core.exceptions import Forbidden, NotFound, PreconditionFailed, Unauthorized
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from weft.systems.object_stores.objects import TIMEOUT_SECONDS, ListedObject, Objects, StoredObject

# Google's own two minutes would hold up each command that finds the store away.
_RETRY = DEFAULT_RETRY.with_delay(initial=0.1, maximum=2.0).with_timeout(5.0)
_LIMITS: dict[str, Any] = {"timeout": TIMEOUT_SECONDS, "retry": _RETRY}


class GoogleObjects(Objects):
    """Objects of a bucket; a version is Google's generation. A server at an `endpoint` is asked without credentials."""

    _refusals = (NotFound, Forbidden, Unauthorized, DefaultCredentialsError)

    def __init__(self, shown: str, prefix: str, bucket: str, endpoint: str | None) -> None:
        super().__init__(shown, prefix)
        self._name, self._endpoint = bucket, endpoint

    @cached_property
    def _bucket(self) -> storage.Bucket:
        """Opened at its first use: a client whose credentials are missing is an error, as of a store that is away."""
        own: dict[str, Any] = {}
        if self._endpoint is not None:
            own = {"credentials": AnonymousCredentials(), "project": "none"}  # type: ignore[no-untyped-call]
            own["client_options"] = {"api_endpoint": self._endpoint}
        with self._explained():
            return storage.Client(**own).bucket(self._name)

    def get(self, key: str) -> StoredObject | None:
        blob = self._bucket.blob(self._prefix + key)
        with self._explained():
            try:
                data = blob.download_as_bytes(**_LIMITS)
            except NotFound:
                return None
            return StoredObject(data, str(blob.generation))

    def put(self, key: str, data: bytes, over: str | None) -> str | None:
        blob = self._bucket.blob(self._prefix + key)
        with self._explained():
            try:
                blob.upload_from_string(data, if_generation_match=int(over or 0), **_LIMITS)
            except (NotFound, PreconditionFailed):
                return None
            return str(blob.generation)

    def overwrite(self, key: str, data: bytes) -> None:
        blob = self._bucket.blob(self._prefix + key)
        with self._explained():
            blob.upload_from_string(data, **_LIMITS)

    def delete(self, key: str) -> None:
        blob = self._bucket.blob(self._prefix + key)
        with self._explained():
            try:
                blob.delete(**_LIMITS)
            except NotFound:
                return

    def listing(self, prefix: str) -> list[ListedObject]:
        bucket = self._bucket
        with self._explained():
            blobs = list(bucket.list_blobs(prefix=self._prefix + prefix, **_LIMITS))
        start = len(self._prefix)
        return [ListedObject(each.name[start:], str(each.generation), each.updated) for each in blobs]

    def _modified(self, key: str) -> datetime:
        blob = self._bucket.blob(self._prefix + key)
        with self._explained():
            blob.reload(**_LIMITS)
            modified: datetime = blob.updated
            return modified
