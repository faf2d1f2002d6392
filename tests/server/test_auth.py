"""A stream's own credential: on every endpoint, whatever else is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import warm_python
from servers import wait_until
from weft.server import access

# One of twenty guesses comes back every five seconds: a mistyped key locks nobody out for long.
assert (access._FAILURES.burst, access._FAILURES.per_second) == (20, 0.2)
# Who guessed too often is not let in again while a test runs.
STREAMS = """
import weft.server.access
weft.server.access._FAILURES = weft.server.access.Rate(0.001, 20)

@weft.stream(
    fields={"n": "int64"},
    auth={"type": "bearer", "token": "${TOKEN}"},
    on_schema_drift="quarantine",
    max_deliveries=3,
)
def tokens(): ...

@weft.stream(
    auth={"type": "api_key", "header": "X-Partner", "key": "${PARTNER_KEY}"}, max_deliveries=3, dead_letter="dead"
)
def partners(): ...

@weft.stream
def dead(): ...

@weft.stream(auth={"type": "bearer", "token": "${MISSING}"})
def unset(): ...

@weft.stream(auth={"type": "api_key", "key": "${EMPTY}"})
def empty(): ...

@weft.stream
def open_to_all(): ...
"""
SECRETS = {"TOKEN": "a token that is so secret", "PARTNER_KEY": "schlüssel", "EMPTY": ""}
TOKEN = {"Authorization": f"Bearer {SECRETS['TOKEN']}"}
PARTNER = {"X-Partner": SECRETS["PARTNER_KEY"].encode()}

ENDPOINTS: list[tuple[str, str, Any]] = [
    ("POST", "", {"n": 1}),
    ("GET", "", None),
    ("POST", "/consume", {"consumer": "c"}),
    ("POST", "/ack", {"consumer": "c", "events": []}),
    ("POST", "/nack", {"consumer": "c", "events": []}),
    ("POST", "/reset", {"consumer": "c"}),
    ("GET", "/groups", None),
    ("GET", "/events", None),
    ("GET", "/rejected", None),
    ("GET", "/history", None),
    ("POST", "/ticket", None),
    ("GET", "/subscribe", None),
]


def ask(client: httpx.Client, stream: str, endpoint: tuple[str, str, Any], headers: Any = None) -> int:
    method, path, body = endpoint
    with client.stream(method, f"/api/v1/streams/{stream}{path}", json=body, headers=headers) as answer:
        return answer.status_code


@pytest.fixture
def served(server: Callable[..., Any]) -> Iterator[Any]:
    yield server(STREAMS, env=SECRETS)


@pytest.mark.parametrize(("stream", "right"), [("tokens", TOKEN), ("partners", PARTNER)])
def test_every_endpoint_needs_it(served: Any, stream: str, right: Any) -> None:
    other = PARTNER if right is TOKEN else TOKEN
    for endpoint in ENDPOINTS:
        assert ask(served.client, stream, endpoint) == 401, endpoint
        assert ask(served.client, stream, endpoint, other) == 401, endpoint
        assert ask(served.client, stream, endpoint, right) in (200, 201, 202), endpoint
    # No route was forgotten: what is served under a stream's name is listed above.
    from weft.server import app

    routes = {
        (method, route.path.partition("{name}")[2])
        for route in app().routes
        if "{name}" in getattr(route, "path", "")
        for method in route.methods - {"HEAD"}
    }
    # Actions, for keys of the scope admin alone: test_dead_letters.py.
    routes -= {("POST", "/replay"), ("POST", "/purge")}
    assert routes == {(method, path) for method, path, _ in ENDPOINTS}


WRONG: list[Any] = [
    "",
    "Bearer",
    "Basic YTpi",
    "Bearer a token that is so secre",
    "Bearer a token that is so secret!",
    "a token that is so secret",
    "Bearer A TOKEN THAT IS SO SECRET",
    "Bearer weft_0123456789ab_" + "0" * 64,
    "Bearer weft_",
    b"Bearer \xff\xfe",
]


def test_a_wrong_one_is_told_how_and_nothing_else(served: Any) -> None:
    for header in WRONG:
        answer = served.client.get("/api/v1/streams/tokens", headers={"Authorization": header})
        assert answer.status_code == 401, header
        assert answer.headers["www-authenticate"] == "Bearer"
        body = answer.json()
        del body["request_id"]
        assert body == {
            "type": "urn:weft:problem:unauthorized",
            "title": "Unauthorized",
            "status": 401,
            "detail": "The stream 'tokens' needs its token in the header Authorization: Bearer ….",
        }


def test_what_a_stream_rejected_is_as_closed_as_the_stream(served: Any) -> None:
    served.publish("tokens", {"n": "not a number"}, **TOKEN)
    for stream in ("tokens__quarantine", "tokens__dead_letter"):
        for endpoint in ENDPOINTS:
            assert ask(served.client, stream, endpoint) == 401, (stream, endpoint)
            assert ask(served.client, stream, endpoint, PARTNER) == 401, (stream, endpoint)
        assert ask(served.client, stream, ("GET", "/events", None), TOKEN) == 200
    assert len(served.events("tokens__quarantine", **TOKEN)) == 1
    # Also where it is declared apart, without a credential of its own.
    assert ask(served.client, "dead", ("GET", "/events", None)) == 401
    assert ask(served.client, "dead", ("GET", "/events", None), PARTNER) == 200


def test_a_secret_that_is_not_set_closes_the_stream(served: Any) -> None:
    given = [{}, TOKEN, {"Authorization": "Bearer"}, {"X-API-Key": ""}, {"Authorization": "Bearer ${MISSING}"}]
    for stream, variable in (("unset", "MISSING"), ("empty", "EMPTY")):
        for headers in given:
            for endpoint in ENDPOINTS:
                assert ask(served.client, stream, endpoint, headers) == 503, (stream, endpoint, headers)
        answer = served.client.get(f"/api/v1/streams/{stream}")
        assert variable not in answer.text
        assert variable in served.log_file.read_text()
    served.publish("open_to_all", {"n": 1})


def test_the_list_shows_what_a_caller_may_read(served: Any) -> None:
    def listed(headers: Any = None) -> list[str]:
        answer = served.client.get("/api/v1/streams", headers=headers)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["count"] == len(found["streams"])
        return [each["name"] for each in found["streams"]]

    assert listed() == ["open_to_all"]
    assert listed(TOKEN) == ["open_to_all", "tokens"]
    assert listed(PARTNER) == ["dead", "open_to_all", "partners"]
    assert listed({**TOKEN, **PARTNER}) == ["dead", "open_to_all", "partners", "tokens"]
    # A guess that rides along with a right credential is still a wrong guess.
    assert served.client.get("/api/v1/streams", headers={**TOKEN, "X-Partner": "guess"}).status_code == 401
    # Names that a caller may not know are not suggested.
    hint = served.client.get("/api/v1/streams/token").json()["hint"]
    assert "tokens" not in hint
    assert "tokens" in served.client.get("/api/v1/streams/token", headers=TOKEN).json()["hint"]


def test_guesses_of_one_address_come_to_an_end(served: Any) -> None:
    def guess(number: int, path: str = "/tokens") -> int:
        headers = {"Authorization": f"Bearer {number}"}
        return int(served.client.get(f"/api/v1/streams{path}", headers=headers).status_code)

    codes = [guess(number) for number in range(40)]
    assert codes[:20] == [401] * 20
    assert codes[20:] == [429] * 20
    # The right one among the guesses is not told from the others.
    answer = served.client.get("/api/v1/streams/tokens", headers=TOKEN)
    assert answer.status_code == 429
    assert 0 < answer.json()["retry_after"] <= 1000
    assert int(answer.headers["retry-after"]) >= 1
    # It is about that stream, and about credentials: who brings none is told what is needed.
    assert ask(served.client, "tokens", ("GET", "", None)) == 401
    assert ask(served.client, "partners", ("GET", "", None), PARTNER) == 200
    served.publish("open_to_all", {"n": 1}, **TOKEN)
    # The list is no way around it.
    assert 429 in [guess(number, "") for number in range(60)]


def test_there_is_no_second_place_to_guess(served: Any) -> None:
    def guess(stream: str, headers: dict[str, str]) -> int:
        return int(served.client.get(f"/api/v1/streams/{stream}/events", headers=headers).status_code)

    codes = [guess("tokens__quarantine", {"Authorization": f"Bearer {number}"}) for number in range(40)]
    assert codes == [401] * 20 + [429] * 20
    assert guess("tokens__dead_letter", {"Authorization": "Bearer x"}) == 429
    assert guess("tokens", dict(TOKEN)) == 429
    # A key that is good for something else is no cover.
    made = warm_python.run(
        [sys.executable, "-m", "weft", "apikey", "create", "--scope", "write"],
        cwd=served.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    key = {"Authorization": f"Bearer {made.stdout.strip()}"}
    wait_until(lambda: guess("open_to_all", key) == 403, "the service to know the key")
    codes = [guess("partners", key | {"X-Partner": str(number)}) for number in range(40)]
    assert codes == [403] * 20 + [429] * 20
    assert ask(served.client, "partners", ("GET", "", None), PARTNER) == 429
    codes = [served.client.get("/api/v1/streams", headers=key | {"X-Partner": "x"}).status_code for _ in range(40)]
    assert set(codes) == {401, 429}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("testclient", "other", False),
    ],
)
def test_whose_an_address_is(one: str, other: str, same: bool) -> None:
    assert (access._network(one) == access._network(other)) == same


def test_no_secret_is_logged_or_shown(served: Any) -> None:
    served.publish("tokens", {"n": 1}, **TOKEN)
    assert ask(served.client, "tokens", ("GET", "", None), {"Authorization": "Bearer my wrong guess"}) == 401
    details = served.client.get("/api/v1/streams/tokens", headers=TOKEN)
    assert details.json()["auth"] == "bearer"
    log = served.log_file.read_text()
    for secret in (*filter(None, SECRETS.values()), "my wrong guess", "${TOKEN}"):
        assert secret not in log
        assert secret not in details.text
