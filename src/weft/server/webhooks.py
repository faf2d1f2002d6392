"""Signatures of webhooks, as Standard Webhooks has them: HMAC-SHA256 of id, time and body."""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Iterable, Mapping

from weft.errors import SettingsError

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TOLERANCE_SECONDS = 300
_PREFIX = "whsec_"


def secret_bytes(secret: str, where: str) -> bytes:
    """Decode a secret: `whsec_` and base64, or any other text as it is."""
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        decoded = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:
        decoded = b""
    if not decoded:
        raise SettingsError(f"What follows {_PREFIX} in {where} is not base64.")
    return decoded


def problem(headers: Mapping[str, str]) -> str | None:
    """Return what is wrong with the headers, before the body is read."""
    if not all(headers.get(name) for name in (ID, TIMESTAMP, SIGNATURE)):
        return f"needs the headers {ID}, {TIMESTAMP} and {SIGNATURE}"
    stamp = headers[TIMESTAMP]
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        return f"needs the seconds since 1970 in the header {TIMESTAMP}"
    if abs(time.time() - int(stamp)) > TOLERANCE_SECONDS:
        return f"needs a {TIMESTAMP} that is at most {TOLERANCE_SECONDS // 60} minutes off"
    return None


def is_signed(headers: Mapping[str, str], body: bytes, secrets: Iterable[bytes]) -> bool:
    """Return whether one of the signatures is by one of the secrets. Always compares all of them."""
    signed = b".".join([headers[ID].encode("latin-1"), headers[TIMESTAMP].encode(), body])
    signatures = [
        signature.encode("latin-1")
        for version, _, signature in (each.partition(",") for each in headers[SIGNATURE].split(" "))
        if version == "v1"
    ]
    matches = False
    for secret in secrets:
        wanted = base64.b64encode(hmac.digest(secret, signed, "sha256"))
        for signature in signatures:
            matches |= hmac.compare_digest(signature, wanted)
    return matches
