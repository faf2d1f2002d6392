"""Bodies that are nearly right: each gets an answer that says what is wrong, and nothing is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.streams.runtime import open_stream
from workers import declare

ON_ONE = pytest.mark.parametrize("system", ["sqlite"], indirect=True)
URL = "/api/v1/streams/orders"
JSON = {"content-type": "application/json"}
LINES = {"content-type": "application/x-ndjson"}


@pytest.fixture
def orders(streams: Project, http: Any) -> Any:
    declare("orders", fields={"n": "int64", "doc": "json"})
    return http


def stored() -> int:
    return open_stream("orders", to_read=True).log.count()


MANY = [{"n": n, "doc": {"at": "12:00", "said": 'a ":', "list": [{"x": 1}, {"x": 2}]}} for n in range(200)]
REPEATED = {
    "flat": ('{"n": 1, "n": 2}', JSON, 0, "n"),
    "in a list": ('[{"n": 1}, {"n": 2, "n": 2}]', JSON, 1, "n"),
    "nested": ('[{"n": 1}, {"n": 2, "doc": [{"a": {"b" : 1, "b": 2}}]}]', JSON, 1, "b"),
    "spaced": ('{"n" \n : 1, "n": 2}', JSON, 0, "n"),
    "of an object": ('{"n": 1, "doc": {"a": 1}, "doc": 5}', JSON, 0, "doc"),
    "behind an escape": ('{"n": 1, "doc": "\\u0022:", "n": 2}', JSON, 0, "n"),
    "behind an escaped colon": ('{"n": 1, "n": 2, "doc": 1, "doc": "x\\"\\u003A\\"\\u003a"}', JSON, 0, "n"),
    "among spaces": ('{"n": 1, "doc": {"a" : "b : c", "d\\" : e" \t: 1, "a" : 2}}', JSON, 0, "a"),
    "escaped": ('{"n": 1, "doc": "12:30", "\\u006e": 2}', JSON, 0, "n"),
    "of lines": ('{"n": 1}\n{"n": 1, "doc": "1:2", "n": 2}\n', LINES, 1, "n"),
    "of events on one line": ('{"n": 1} {"n": 1, "n": 2}\n', LINES, 1, "n"),
    "of an event on two lines": ('{"n": 1}\n{"n": 1,\n"n": 2}\n', LINES, 1, "n"),
    "among many": (json.dumps([*MANY, {"n": 1}])[:-2] + ', "n": 2}]', JSON, 200, "n"),
}


@ON_ONE
@pytest.mark.parametrize("body, headers, index, field", REPEATED.values(), ids=REPEATED)
def test_a_key_that_is_there_twice(orders: Any, body: str, headers: dict[str, str], index: int, field: str) -> None:
    answer = orders.post(URL, content=body.encode(), headers=headers)
    assert answer.status_code == 422
    assert answer.json()["detail"] == f"Event {index}, field {field!r}: the key is there twice in one object."
    assert stored() == 0


@ON_ONE
def test_keys_that_only_look_repeated(orders: Any) -> None:
    assert orders.post(URL, json=MANY).json()["rows_received"] == 200
    odd = '{"n" : 1, "doc": {"n": [{"n" :1}, {"n":2}], "text": "\\"n\\": 1, \\u0022n\\u0022: 2"}}'
    assert orders.post(URL, content=odd.encode(), headers=JSON).status_code == 202
    spaced = [{"n": n, "doc": {"price : 3": 'a " : b', "note": "x :"}} for n in range(100)]
    for separators in ((",", " : "), (", ", ":")):
        body = json.dumps(spaced, separators=separators)
        assert orders.post(URL, content=body.encode(), headers=JSON).json()["rows_received"] == 100
    assert orders.post(URL, content=odd.encode(), headers=JSON).status_code == 202
    (_, *_, event) = weft.consume_sync("orders", "c", 1000)
    assert event["doc"]["text"] == '"n": 1, "n": 2'


@ON_ONE
def test_members_of_other_bodies(orders: Any) -> None:
    unknown = orders.post(f"{URL}/consume", json={"consumer": "c", "batchsize": 5}).json()
    assert unknown["detail"].startswith("There is no member 'batchsize' here. Did you mean 'batch_size'? There are")
    assert unknown["field"] == "batchsize"
    twice = orders.post(f"{URL}/consume", content=b'{"consumer": "c", "consumer": "d"}', headers=JSON)
    assert (twice.status_code, twice.json()["detail"]) == (422, "The member 'consumer' is there twice.")


@ON_ONE
@pytest.mark.parametrize(
    "body, why, column",
    [
        (b'\xef\xbb\xbf{"n": 1}', "it begins with a byte order mark; send UTF-8 without one", 1),
        ('{"n": 1}'.encode("utf-16"), "it begins with a byte order mark; send UTF-8 without one", 1),
        (b'{"doc": "\\ud800"}', "the escape \\ud800 stands for half a character", 10),
        (b'{"doc": "\\ud83d\\ude00\\\\\\udc00 and more text"}', "the escape \\udc00 stands for half a character", 24),
    ],
)
def test_texts_that_are_none(orders: Any, body: bytes, why: str, column: int) -> None:
    answer = orders.post(URL, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["detail"] == f"The body is not JSON: {why}, at line 1, column {column}."


@ON_ONE
def test_every_method_of_a_path_is_named(orders: Any) -> None:
    answer = orders.request("PATCH", URL)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert orders.get(f"{URL}/ack").headers["allow"] == "POST"


@ON_ONE
def test_two_idempotency_keys(orders: Any) -> None:
    two = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = orders.post(URL, json={"n": 1}, headers=two)
    assert (answer.status_code, answer.json()["detail"]) == (400, "There are two different headers Idempotency-Key.")
    assert stored() == 0
    assert orders.post(URL, json={"n": 1}, headers=[("Idempotency-Key", "a")] * 2).status_code == 202


def test_no_events_take_their_key(orders: Any) -> None:
    key = {"Idempotency-Key": "a"}
    for _ in range(2):
        assert orders.post(URL, json=[], headers=key).json()["rows_received"] == 0
    assert orders.post(URL, json={"n": 1}, headers=key).status_code == 422
    assert stored() == 0


def test_an_ack_that_comes_again(orders: Any) -> None:
    """As from a client that did not get the answer."""
    orders.post(URL, json=[{"n": n} for n in range(3)])
    batch = orders.post(f"{URL}/consume", json={"consumer": "c"}).json()
    body = {"consumer": "c", "token": batch["token"], "events": batch["events"]}
    assert orders.post(f"{URL}/ack", json=body | {"events": batch["events"][:2]}).json()["acknowledged"] == 2
    assert orders.post(f"{URL}/ack", json=body).json()["acknowledged"] == 1
    assert orders.post(f"{URL}/ack", json=body).json()["acknowledged"] == 0
    assert orders.post(f"{URL}/nack", json=body).status_code == 409
