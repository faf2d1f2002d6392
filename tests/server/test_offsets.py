"""Offsets for clients whose numbers are 64-bit floats: those of Redis are beyond 2^53."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import weft
from weft.cli.events_out import to_ndjson
from weft.project import Project
from weft.streams.runtime import open_stream
from workers import declare

URL = "/api/v1/streams/orders"


def as_floats(text: str) -> Any:
    """What JavaScript and jq make of JSON: every number is a float."""
    return json.loads(text, parse_int=float)


@pytest.fixture
def orders(streams: Project, http: Any) -> Any:
    declare("orders", fields={"n": "int64", "text": "string"})
    http.post(URL, json=[{"n": n, "text": "é" * 10} for n in range(3)])
    return http


@pytest.mark.parametrize("way", ["whole", "text", "number as text"])
def test_events_that_are_sent_back(orders: Any, way: str) -> None:
    def settle(action: str, **more: Any) -> Any:
        batch = as_floats(orders.post(f"{URL}/consume", json={"consumer": "c"}).text)
        events = batch["events"]
        if way == "text":
            events = [{"_weft_rowid_text": event["_weft_rowid_text"]} for event in events]
        elif way == "number as text":
            events = [{"_weft_rowid": event["_weft_rowid_text"]} for event in events]
        body = json.dumps({"consumer": "c", "token": batch["token"], "events": events, **more}, indent=2)
        return orders.post(f"{URL}/{action}", content=body, headers={"content-type": "application/json"})

    assert settle("nack").json()["returned"] == 3
    assert settle("ack").json()["acknowledged"] == 3
    assert orders.get(f"{URL}/groups").json()["groups"][0]["pending"] == 0


def test_every_offset_is_a_text_too(orders: Any) -> None:
    done = as_floats(orders.post(URL, json={"n": 4}).text)
    assert done["first_rowid_text"] == done["last_rowid_text"]
    page = as_floats(orders.get(f"{URL}/events", params={"limit": 2}).text)
    assert page["next_text"] == page["events"][-1]["_weft_rowid_text"]
    rest = as_floats(orders.get(f"{URL}/events", params={"after": page["next_text"]}).text)
    assert [event["n"] for event in rest["events"]] == [2, 4]
    details = as_floats(orders.get(URL).text)
    assert (details["head_text"], details["floor_text"]) == (done["last_rowid_text"], "0")
    to = {"consumer": "c", "to": page["next_text"]}
    position = orders.post(f"{URL}/reset", json=to).json()
    assert orders.post(f"{URL}/consume", json={"consumer": "c"}).json()["events"][0]["n"] == 1
    assert position["position_text"] == str(position["position"])
    (group,) = orders.get(f"{URL}/groups").json()["groups"]
    assert group["position_text"] == done["last_rowid_text"]
    (stream,) = as_floats(orders.get("/api/v1/overview").text)["streams"]
    assert stream["head_text"] == details["head_text"]
    refused = orders.post(f"{URL}/ack", json={"consumer": "c", "token": "x", "events": [{"_weft_rowid": 1}]}).json()
    assert (refused["rowids"], refused["rowids_text"]) == ([1], ["1"])


def test_a_page_ends_before_what_is_removed_while_it_is_read(
    streams: Project, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the gap its reader would go on, and never learn of it."""
    orders = declare("orders", fields={"n": "int64"})
    weft.publish_sync(orders, [{"n": n} for n in range(100)])
    log = open_stream(orders, to_read=True).log
    read = log.read

    def read_and_trim(*arguments: int) -> Any:
        page = read(*arguments)
        weft.trim_sync(orders, max_rows=50)
        return page

    monkeypatch.setattr(log, "read", read_and_trim)
    page = http.get(f"{URL}/events", params={"limit": 100}).json()
    numbers = [event["n"] for event in page["events"]]
    assert numbers == list(range(len(numbers)))
    told = http.get(f"{URL}/events", params={"after": page["next_text"]})
    assert (told.status_code, told.json()["lost"]) == (410, 50 - len(numbers))


def test_a_dead_letter_has_the_offset_of_its_event_as_a_text(orders: Any) -> None:
    orders_of = declare("orders", fields={"n": "int64", "text": "string"}, max_deliveries=1)
    (event, *rest) = weft.consume_sync(orders_of, "c", batch_size=1)
    weft.nack_sync(orders_of, "c", event)
    assert not rest and weft.consume_sync(orders_of, "c", batch_size=1)[0]["n"] == 1
    url = f"{URL}__dead_letter"
    page = as_floats(orders.get(f"{url}/events").text)["events"]
    batch = as_floats(orders.post(f"{url}/consume", json={"consumer": "x"}).text)["events"]
    (printed,) = weft.consume_sync("orders__dead_letter", "y")
    for letter in (page[0], batch[0], as_floats(to_ndjson(printed))):
        assert letter["rowid_text"] == str(event["_weft_rowid"])
        assert letter["_weft_rowid_text"] == str(printed["_weft_rowid"])
    assert "rowid_text" not in printed


def test_what_is_no_offset(orders: Any) -> None:
    for rowid in (1.5, "x", "1.0", "-1", "", None, 0):
        body = {"consumer": "c", "events": [{"_weft_rowid": 1}, {"_weft_rowid": rowid}]}
        refused = orders.post(f"{URL}/ack", json=body)
        assert (refused.status_code, refused.json()["index"], refused.json()["field"]) == (422, 1, "_weft_rowid")


@pytest.mark.parametrize("to", [2**63, str(2**63), str(2**64), "-1", -1])
def test_an_offset_beyond_all_is_refused_as_a_number_and_as_a_text(orders: Any, to: Any) -> None:
    refused = orders.post(f"{URL}/reset", json={"consumer": "c", "to": to})
    assert refused.status_code == 422 and re.search(r"\bto\b", refused.json()["detail"])
    assert orders.get(f"{URL}/groups").json()["groups"] == []


def test_texts_in_python(orders: Any) -> None:
    first, second, _ = weft.consume_sync("orders", "p")
    assert weft.ack_sync("orders", "p", [{"_weft_rowid": str(first["_weft_rowid"])}]) == 1
    weft.reset_sync("orders", "p", str(second["_weft_rowid"]))
    assert weft.consume_sync("orders", "p")[0]["n"] == 1
    assert weft.trim_sync("orders", before=str(second["_weft_rowid"])) == 1
