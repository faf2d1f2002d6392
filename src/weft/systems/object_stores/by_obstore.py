"""Objects in S3 and Azure Blob Storage, by obstore."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Any

from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import AzureStore, S3Store

from weft.systems.object_stores.objects import TIMEOUT_SECONDS, ListedObject, Objects, StoredObject


def open_s3(shown: str, prefix: str, bucket: str, options: dict[str, str]) -> Objects:
    """Open a bucket of S3, or of a server that speaks its protocol."""
    own: dict[str, Any] = dict(options)
    if "endpoint" in options:
        own["virtual_hosted_style_request"] = False
    return ObstoreObjects(shown, prefix, S3Store(bucket, **own, **_limits(options)))


def open_azure(shown: str, prefix: str, account: str, container: str, options: dict[str, str]) -> Objects:
    own: dict[str, Any] = {"account_name": account, **options}
    return ObstoreObjects(shown, prefix, AzureStore(container, **own, **_limits(options)))


def _limits(options: dict[str, str]) -> dict[str, Any]:
    client = {"timeout": f"{TIMEOUT_SECONDS}s", "connect_timeout": "5s"}
    allowed = {"allow_http": True} if options.get("endpoint", "").startswith("http://") else {}
    retries = {"max_retries": 3, "retry_timeout": timedelta(seconds=2 * TIMEOUT_SECONDS)}
    return {"client_options": {**client, **allowed}, "retry_config": retries}


class ObstoreObjects(Objects):
    """Objects in S3 and Azure Blob Storage."""

    _refusals = (FileNotFoundError, PermissionDeniedError, UnauthenticatedError)

    def __init__(self, shown: str, prefix: str, store: Any) -> None:
        super().__init__(shown, prefix)
        self._store = store

    def get(self, key: str) -> StoredObject | None:
        with self._explained():
            try:
                stored = self._store.get(self._prefix + key)
            except FileNotFoundError:
                return None
            return StoredObject(bytes(stored.bytes()), str(stored.meta["e_tag"]))

    def put(self, key: str, data: bytes, over: str | None) -> str | None:
        with self._explained():
            try:
                mode: Any = "create" if over is None else {"e_tag": over}
                return str(self._store.put(self._prefix + key, data, mode=mode)["e_tag"])
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return None

    def overwrite(self, key: str, data: bytes) -> None:
        with self._explained():
            self._store.put(self._prefix + key, data)

    def delete(self, key: str) -> None:
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._store.delete(self._prefix + key)

    def listing(self, prefix: str) -> list[ListedObject]:
        with self._explained():
            objects = self._store.list(self._prefix + prefix).collect()
        start = len(self._prefix)
        return sorted(
            (ListedObject(each["path"][start:], str(each["e_tag"]), each["last_modified"]) for each in objects),
            key=lambda each: each.key,
        )

    def _modified(self, key: str) -> datetime:
        with self._explained():
            modified: datetime = self._store.head(self._prefix + key)["last_modified"]
            return modified
