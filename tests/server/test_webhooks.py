"""Streams that take webhooks: signed as Standard Webhooks has it, each delivery stored once."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from weft.errors import SettingsError
from weft.server import webhooks

STREAMS = """
@weft.stream(auth={"type": "hmac", "secret": ["${NEW}", "${OLD}"]}, on_schema_drift="quarantine")
def hooks(): ...

@weft.stream(auth={"type": "hmac", "secret": "${BROKEN}"})
def broken(): ...
"""
KEY = bytes(range(32))
SECRETS = {"NEW": "whsec_" + base64.b64encode(KEY).decode(), "OLD": "a plain secret", "BROKEN": "whsec_n0t*base64"}
URL = "/api/v1/streams/hooks"


def signature(key: bytes, delivery: str, stamp: str, body: bytes) -> str:
    digest = hmac.digest(key, f"{delivery}.{stamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


def signed(body: bytes, delivery: str = "msg_1", key: bytes = KEY, stamp: int | None = None) -> dict[str, str]:
    at = str(int(time.time()) if stamp is None else stamp)
    return {
        "webhook-id": delivery,
        "webhook-timestamp": at,
        "webhook-signature": signature(key, delivery, at, body),
        "content-type": "application/json",
    }


@pytest.fixture
def served(server: Callable[..., Any]) -> Iterator[Any]:
    yield server(STREAMS, env=SECRETS)


def send(served: Any, body: bytes, headers: dict[str, str]) -> httpx.Response:
    return served.client.post(URL, content=body, headers=headers)


def test_the_example_of_the_specification() -> None:
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    secret = webhooks.secret_bytes("whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "a test")
    assert webhooks.is_signed(headers, b'{"test": 2432232314}', [secret])
    assert not webhooks.is_signed(headers, b'{"test": 2432232315}', [secret])


@pytest.mark.parametrize("secret", ["whsec_", "whsec_a", "whsec_****"])
def test_a_secret_that_is_no_base64(secret: str) -> None:
    with pytest.raises(SettingsError) as caught:
        webhooks.secret_bytes(secret, "a test")
    assert "****" not in str(caught.value)


def test_a_delivery_is_stored_once(served: Any) -> None:
    body = json.dumps([{"n": 1}, {"n": 2}]).encode()
    first = send(served, body, signed(body))
    assert (first.status_code, first.json()["rows_deduplicated"]) == (202, 0)
    # The sender tries again, with a new time: the same delivery.
    again = send(served, body, signed(body, stamp=int(time.time()) - 100))
    assert (again.status_code, again.json()["rows_deduplicated"]) == (202, 2)
    # The key is as much the delivery's as its id is: one that nobody signed cannot take its place.
    replayed = send(served, body, signed(body) | {"idempotency-key": "another"})
    assert replayed.status_code == 400
    assert send(served, body, signed(body) | {"idempotency-key": "msg_1"}).json()["rows_deduplicated"] == 2
    assert send(served, body, signed(body, "msg_2")).json()["rows_deduplicated"] == 0
    # Who reads signs an empty body.
    assert len(served.events("hooks", **signed(b""))) == 4


def test_secrets_are_rotated(served: Any) -> None:
    body = b'{"n": 1}'
    assert send(served, body, signed(body, "by the old one", SECRETS["OLD"].encode())).status_code == 202
    assert send(served, body, signed(body, "by the new one")).status_code == 202
    both = signed(body, "by both")
    both["webhook-signature"] = f"v1a,other v1,AAAA {both['webhook-signature']} v2,x nonsense"
    assert send(served, body, both).status_code == 202


def test_what_is_not_signed_right_is_refused(served: Any) -> None:
    body = b'{"n": 1}'
    right, now = signed(body), int(time.time())
    wrong: list[dict[str, str]] = [
        {name: value for name, value in right.items() if name != missing}
        for missing in ("webhook-id", "webhook-timestamp", "webhook-signature")
    ]
    wrong += [right | {"webhook-id": "msg_2"}, right | {"webhook-timestamp": str(now - 1)}]
    wrong += [right | {"webhook-signature": each} for each in ("", "v1,", "v1", right["webhook-signature"][3:])]
    wrong += [right | {"webhook-signature": right["webhook-signature"].replace("v1", "v2")}]
    wrong += [right | {"webhook-timestamp": each} for each in ("", "now", "-1", "1e9", "9" * 30, f"{now}.0")]
    wrong += [signed(body, key=b"another"), signed(body, key=SECRETS["NEW"].encode())]
    for number, headers in enumerate(wrong):
        answer = send(served, body, headers)
        # So many failures of one address are refused by themselves.
        assert answer.status_code == (401 if number < 15 else answer.status_code), headers
        assert answer.status_code in (401, 429), headers
    assert served.client.post(URL, json={"n": 1}, headers={"Authorization": f"Bearer {SECRETS['NEW']}"}).is_error
    # Nobody can guess a signature: who has the secret goes on.
    assert send(served, body, right).status_code == 202
    assert len(served.events("hooks", **signed(b""))) == 1


def test_old_and_early_deliveries_are_refused(served: Any) -> None:
    body, now = b'{"n": 1}', int(time.time())
    for stamp in (now - 400, now + 400):
        answer = send(served, body, signed(body, stamp=stamp))
        assert answer.status_code == 401
        assert "5 minutes" in answer.json()["detail"]
    for stamp in (now - 200, now + 200):
        assert send(served, body, signed(body, stamp=stamp)).status_code == 202


def test_every_byte_that_was_sent_is_signed(served: Any) -> None:
    import gzip

    body = gzip.compress(b'{"n": 1}')
    assert send(served, body, signed(body) | {"content-encoding": "gzip"}).status_code == 202
    assert send(served, body, signed(b'{"n": 1}', "2") | {"content-encoding": "gzip"}).status_code == 401
    assert send(served, body[:-1], signed(body, "3") | {"content-encoding": "gzip"}).status_code == 401


def test_a_secret_that_cannot_be_read_closes_the_stream(served: Any) -> None:
    answer = served.client.post("/api/v1/streams/broken", content=b"{}", headers=signed(b"{}"))
    assert answer.status_code == 503
    log = served.log_file.read_text()
    assert "broken" in log
    assert "base64" in log
    assert "n0t" not in log + answer.text


def test_a_body_for_the_signature_has_the_same_end_as_every_body(server: Callable[..., Any]) -> None:
    served = server(STREAMS, env=SECRETS, toml="[server]\nbody_bytes = 1000")
    body = b'"' + b"x" * 2000 + b'"'
    assert send(served, body, signed(body)).status_code == 413
