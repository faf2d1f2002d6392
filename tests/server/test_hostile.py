"""Whatever a client sends: an answer that says what is wrong, never a 500, and the service goes on."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import subprocess

import pyarrow as pa
import pytest

from served import read_all

STREAMS = """
    @weft.stream(fields={"n": "int64"})
    def orders(): ...

    @weft.stream(fields={"x": "float64", "s": "string", "n": "int64?"}, validate_schema=True)
    def strict(): ...

    @weft.stream(fields={"b": "bytes", "o": "bytes?"}, validate_schema=True)
    def blobs(): ...
"""
ORDERS = "/api/v1/streams/orders"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def goes_on(service):
    """Whatever a test did, the next publish is answered, and nothing failed inside."""
    yield
    service.publish("orders", {"n": 1})
    assert not [line for line in service.log if "traceback" in line or "Traceback" in line["message"]]


@pytest.mark.parametrize(
    "name",
    [
        "orders'; DROP TABLE orders; --",
        'orders"',
        "..",
        "../../etc/passwd",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "orders%00",
        "%ff%fe",
        "orders%0d%0aX-Injected: 1",
        "a" * 5000,
        "weft.api_keys",
        "sqlite_master",
        "ORDERS",
        "órders",
    ],
)
@pytest.mark.parametrize("action", ["", "/consume", "/events", "/subscribe", "/groups"])
def test_names(service, name, action):
    post = action in ("", "/consume")
    answer = service.client.request(
        "POST" if post else "GET",
        f"/api/v1/streams/{name}{action}",
        json={"consumer": "c"} if post else None,
    )
    assert answer.status_code in (404, 405), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert "x-injected" not in answer.headers
    assert answer.json()["status"] == answer.status_code


def test_nearest_name(service):
    answer = service.client.get("/api/v1/streams/order")
    assert answer.status_code == 404
    assert "orders" in answer.json()["hint"]


def test_malformed_json_names_its_position(service):
    answer = service.client.post(ORDERS, content=b'{"n": 1,\n "m": }', headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["position"] == {"byte": 15, "line": 2, "column": 7}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"[", 400),
        (b"nul", 400),
        (b'{"n": NaN}', 400),
        (b'{"n": Infinity}', 400),
        (b'{"n": 1}{"n": 2}', 400),
        (b'{"n": "\xff\xfe"}', 400),
        (b'{"s\\ud800": 1}', 400),
        (b"\xef\xbb\xbf{}", 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
        (b"1", 422),
        (b'"text"', 422),
        (b"[1]", 422),
        (b'[{"n": 1}, null]', 422),
        (b'{"_weft_rowid": 1}', 422),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bodies(service, body, code):
    before = len(service.events("orders"))
    answer = service.client.post(ORDERS, content=body, headers=JSON)
    assert answer.status_code == code, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(service.events("orders")) == before


def test_index_and_field_of_an_event_that_does_not_fit(service):
    answer = service.client.post(
        "/api/v1/streams/strict", json=[{"x": 1.0, "s": "a"}, {"x": "no", "s": "b"}], headers=JSON
    )
    assert answer.status_code == 422
    problem = answer.json()
    assert (problem["index"], problem["field"]) == (1, "x")


@pytest.mark.parametrize("value", ["1180591620717411303424", "1.5", '"one"', "[1]", "true"])
def test_values_that_do_not_fit(service, value):
    body = f'{{"x": 1.0, "s": "a", "n": {value}}}'
    answer = service.client.post("/api/v1/streams/strict", content=body, headers=JSON)
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"] == "n"


def test_numbers_at_the_edge(service):
    service.client.post(
        "/api/v1/streams/strict", content=b'[{"x": -0.0, "s": "\\u0000"}, {"x": 1e308, "s": ""}]', headers=JSON
    )
    found = service.client.post("/api/v1/streams/strict", content=b'{"x": 1e999, "s": ""}', headers=JSON)
    assert found.status_code in (400, 422)
    values = [event["x"] for event in service.events("strict")]
    assert all(json.dumps(value) not in ("NaN", "Infinity") for value in values)


@pytest.mark.parametrize(
    ("body", "kind", "index", "field"),
    [
        (b'{"n": 1e400}', "json", 0, "n"),
        (b' [{"n": 1}, {"n": 2, "x": {"deep": [1e400]}}, {"n": 1e400}]', "json", 1, "x"),
        (b'[{"n": 1}, 1e400]', "json", 1, None),
        (b'{"n": 1}\n\n{"n": ' + b"9" * 10_000 + b"}\n", "x-ndjson", 1, "n"),
    ],
)
def test_numbers_out_of_range(service, body, kind, index, field):
    answer = service.client.post(ORDERS, content=body, headers={"content-type": f"application/{kind}"})
    found = answer.json()
    assert (answer.status_code, found["type"]) == (422, "urn:weft:problem:event")
    assert (found["index"], found["field"]) == (index, field)


@pytest.mark.parametrize(("body", "index"), [("null", 0), ("1", 0), ('"x"', 0), ("[{}, [{}]]", 1), ("[null]", 0)])
def test_what_is_no_event(service, body, index):
    answer = service.client.post(ORDERS, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["index"]) == (422, index)
    assert answer.json()["detail"] == f"Event {index}: it is not a JSON object."


def test_bytes_are_base64_as_they_are_read(service):
    blobs = "/api/v1/streams/blobs"
    assert service.client.post(blobs, json=[{"b": "aGk=", "o": None}, {"b": "", "o": "AA=="}]).status_code == 202
    events = service.events("blobs")
    assert [(event["b"], event["o"]) for event in events] == [("aGk=", None), ("", "AA==")]
    assert service.client.post(blobs, json=[{"b": event["b"]} for event in events]).status_code == 202
    for wrong in ("aGk", "a-_=", "é", 7):
        refused = service.client.post(blobs, json=[{"b": "aGk="}, {"b": wrong}])
        assert refused.status_code == 422
        assert (refused.json()["index"], refused.json()["field"]) == (1, "b")
    assert len(service.events("blobs")) == 4


def test_too_large(service):
    answer = service.client.post(ORDERS, content=b" " * (17 * 1024 * 1024), headers=JSON)
    assert answer.status_code == 413
    # Also where no length is announced.
    answer = service.client.post(ORDERS, content=(b" " * 1_000_000 for _ in range(20)), headers=JSON)
    assert answer.status_code == 413


@pytest.mark.brief("True")
@pytest.mark.parametrize("lines", [False, True])
def test_too_many_events(service, lines):
    """Of which millions fit into a body: to parse those would hold up everybody, and take hundreds of megabytes."""
    events = [b"{}"] * 5_000_000
    body = b"\n".join(events) if lines else b"[" + b",".join(events) + b"]"
    kind = {"content-type": "application/x-ndjson"} if lines else JSON
    before = _memory(service)
    answer = service.client.post(ORDERS, content=body, headers=kind)
    assert (answer.status_code, answer.json()["limit"]) == (413, 100_000)
    nested = b'{"n": 1, "deep": [' + b",".join([b"[]"] * 3_000_000) + b"]}"
    assert service.client.post(ORDERS, content=nested, headers=kind).status_code == 413
    assert _memory(service) - before < 64 * 1024 * 1024
    values = b'{"n": 1, "deep": [' + b",".join([b"1"] * 5_000_000) + b"]}"
    assert service.client.post(ORDERS, content=values, headers=kind).status_code == 413
    many = b"\n".join([b"{}", b"{" + b",".join(b'"k%d":1' % n for n in range(1_000_000)) + b"}"])
    answer = service.client.post(ORDERS, content=many, headers={"content-type": "application/x-ndjson"})
    assert (answer.status_code, answer.json()["index"]) == (422, 1)
    few = b"[" + b",".join([b'{"n": 1}'] * 100_001) + b"]"
    assert service.client.post(ORDERS, content=few, headers=JSON).status_code == 413


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_bombs(service, coding):
    plain = b" " * (200 * 1024 * 1024)
    packed = gzip.compress(plain, 9) if coding == "gzip" else pa.compress(plain, coding, asbytes=True)
    before = _memory(service)
    answer = service.client.post(ORDERS, content=packed, headers={**JSON, "content-encoding": coding})
    assert answer.status_code == 413
    assert _memory(service) - before < 64 * 1024 * 1024


def _memory(service) -> int:
    (worker,) = service.workers()
    with open(f"/proc/{worker}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_codings_and_types(service):
    def post(content: bytes, **headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return service.client.post(ORDERS, content=content, headers=given).status_code

    assert post(b'{"n": 1}') == 415
    assert post(b'{"n": 1}', content_type="text/plain") == 415
    assert post(b"x", content_type="application/json", content_encoding="br") == 415
    assert post(b'{"n": 1}', content_type='application/json; Charset = "ISO-8859-1"') == 415
    assert post(b'{"n": 1}', content_type="application/json; charset=utf-8") == 202
    assert post(b"x", content_type="application/json", content_encoding="gzip") == 400
    assert post(gzip.compress(b'{"n": 1}')[:-4], content_type="application/json", content_encoding="gzip") == 400
    assert post(gzip.compress(b'{"n": 1}'), content_type="application/json", content_encoding="gzip") == 202
    assert post(b'{"n": 1}\n{"n": 2}\n', content_type="application/x-ndjson") == 202
    assert post(b'{"n": 1}', content_type="application/json; charset=utf-8", idempotency_key="k" * 256) == 400


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA\x00b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: example.com\r\n\r\n",
    ],
    ids=["tls", "no-version", "version", "length", "smuggling", "nul", "hosts"],
)
def test_what_is_not_http(service, request_bytes):
    head, _, body = service.raw(request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 "), head
    assert b"application/problem+json" in head
    # The log has it under the id that the answer has.
    request_id = json.loads(body)["request_id"]
    assert f"x-request-id: {request_id}".encode() in head
    (line,) = [line for line in service.log if line.get("request_id") == request_id]
    assert (line["status"], line["client"]) == (400, "127.0.0.1")
    assert json.loads(body)["detail"] in line["message"]


def test_transfer_codings(service):
    head = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    body = "8\r\n" + '{"n": 1}' + "\r\n0\r\n\r\n"
    for coding, status in (
        ("chunked", 202),
        ("Chunked", 202),
        ("gzip, chunked", 501),
        ("gzip\r\nTransfer-Encoding: chunked", 501),
    ):
        answer = service.raw(f"{head}Transfer-Encoding: {coding}\r\n\r\n{body}".encode())
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


def test_header_floods(service):
    line = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    assert service.raw(line + b"A: " + b"a" * 60_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert service.raw(line + b"".join(b"H%d: x\r\n" % n for n in range(10_000)) + b"\r\n").startswith(b"HTTP/1.1 431 ")
    assert service.raw(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    with service.connect() as endless:
        with contextlib.suppress(OSError):
            endless.sendall(line + b"A: ")
            for _ in range(100):
                endless.sendall(b"a" * 100_000)
        assert read_all(endless).startswith((b"HTTP/1.1 431 ", b""))


def test_large_body_in_the_packet_of_its_headers(service):
    body = json.dumps([{"n": n} for n in range(20_000)]).encode()
    head = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    assert service.raw(request).startswith(b"HTTP/1.1 202 ")


@pytest.mark.timing
def test_slow_headers(server):
    served = server(STREAMS, constants={"weft.server.worker._HEADER_SECONDS": 2.0})
    with served.connect() as silent, served.connect() as slow, served.connect() as second:
        second.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert second.recv(65536).startswith(b"HTTP/1.1 200 ")
        for connection in (slow, second):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: ")
        with contextlib.suppress(OSError):
            for _ in range(120):  # until the service had enough of it
                slow.sendall(b"a")
                slow.settimeout(0.25)
                with contextlib.suppress(TimeoutError):
                    assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
                    break
            else:
                raise AssertionError("a connection that sends a byte now and then is kept")
        assert b"HTTP/1.1 408 " in read_all(second)
        assert read_all(silent) == b""


def test_cut_connections(service):
    before = len(service.events("orders"))
    head = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for cut in (b"", b'{"n": 1}'):
        for _ in range(20):
            with service.connect() as connection:
                connection.sendall(f"{head}Content-Length: 100\r\n\r\n".encode() + cut)
    for _ in range(20):  # with a reset
        with service.connect() as connection:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n".encode())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    assert len(service.events("orders")) == before


def test_parameters(service):
    def get(query: str) -> int:
        return service.client.get(f"{ORDERS}/events?{query}").status_code

    assert get("after=-1") == get("after=x") == get("limit=0") == get("after=1e3") == 422
    assert get("after=99999999999999999999") == get("limit=%D9%A1") == 422
    assert get("limt=1") == get("after=1&after=2") == 422
    assert get("after=0&limit=1") == 200
    for query in ("where=n=1&where=n=2&bogus=1", "where=n=1&where=n=2&since=1&since=2", "where=n=1&bogus=1"):
        assert service.client.get(f"{ORDERS}/subscribe?{query}").status_code == 422
    assert service.client.get(f"{ORDERS}/subscribe?since=yesterday").status_code == 422

    def post(action: str, body: object) -> int:
        return service.client.post(f"{ORDERS}/{action}", json=body).status_code

    assert post("consume", {}) == post("consume", {"consumer": ""}) == post("consume", {"consumer": 1}) == 422
    assert post("consume", {"consumer": "c", "batch": 1}) == post("consume", {"consumer": "c", "batch_size": 0}) == 422
    assert post("consume", {"consumer": "c", "lease": 1e300}) == post("consume", [1]) == 422
    assert post("ack", {"consumer": "c", "events": [{}]}) == post("ack", {"consumer": "c", "events": [1]}) == 422
    assert post("ack", {"consumer": "c", "events": [{"_weft_rowid": 2**70}]}) == 422
    assert post("reset", {"consumer": "c", "to": "never"}) == post("reset", {"consumer": "c", "to": -1}) == 422
    assert post("reset", {"consumer": "c", "to": 2**63}) == post("reset", {"consumer": "c", "to": 2**70}) == 422
    assert post("reset", {"consumer": "c", "to": 2**63 - 1}) == 200


def test_parameters_of_a_post(service):
    before = len(service.events("orders"))

    def post(path: str, body: object) -> dict:
        answer = service.client.post(f"{ORDERS}{path}", json=body)
        assert (answer.status_code, answer.json()["title"]) == (422, "Unknown parameter"), answer.text
        return answer.json()

    assert post("?idempotency_key=a", {"n": 1})["field"] == "idempotency_key"
    told = post("/consume?batchsize=1", {"consumer": "asked"})
    assert told["hint"] == "Did you mean 'batch_size'? In the body: consumer, batch_size, member, lease, wait."
    assert "In the body: " in post("/ack?token=a", {"consumer": "asked", "events": []})["hint"]
    for action in ("ack", "nack", "reset"):
        post(f"/{action}?consumer=c", {"consumer": "asked", "events": [], "to": "end"})
    post("/ticket?where=n=1", {})
    assert service.client.get(f"{ORDERS}/groups?consumer=c").json()["hint"] == "There are none here."
    for path in (ORDERS, "/api/v1/overview"):
        told = service.client.get(f"{path}?history=yes")
        assert (told.status_code, told.json()["field"]) == (422, "history"), path
    assert len(service.events("orders")) == before
    groups = service.client.get(f"{ORDERS}/groups").json()["groups"]
    assert "asked" not in [each["consumer"] for each in groups]


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_times_that_leave_the_calendar_in_utc(service, moment):
    subscribe = f"{ORDERS}/subscribe"
    answers = [
        service.client.get(subscribe, params={"since": moment}),
        service.client.get(subscribe, headers={"last-event-id": moment}),
        service.client.post(f"{ORDERS}/reset", json={"consumer": "c", "to": moment}),
    ]
    assert [each.status_code for each in answers] == [422] * 3
    assert [each.json()["field"] for each in answers] == ["since", "since", "to"]


def test_methods(service):
    answer = service.client.delete(ORDERS)
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert service.client.put("/api/v1/streams").status_code == 405
    assert service.client.get("/nothing/here").status_code == 404
    # No redirect, which would name any host that the client names.
    slash = service.client.get("/api/v1/streams/", headers={"host": "localhost"})
    assert (slash.status_code, slash.headers["content-type"]) == (200, "application/json")


def test_heads_have_an_end(service):
    for path in ("/healthz", "/api/v1/streams", ORDERS, f"{ORDERS}/subscribe"):
        answer = service.raw(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + LAST)
        assert answer.count(b"HTTP/1.1 200 ") == 2, answer


@pytest.mark.timing
def test_slow_body(server):
    """Of a service that waits a second for a body."""
    served = server(STREAMS, toml="[server]\nbody_seconds = 1\n")
    head = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with served.connect() as slow:
        slow.sendall(head.encode() + b'{"n"')
        assert b" 408 " in read_all(slow).partition(b"\r\n")[0]


UPGRADE = (
    f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nContent-Type: application/x-ndjson\r\n"
).encode()
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("cut", [0, 60, len(UPGRADE) + 5, len(UPGRADE) + 25])
def test_asking_for_another_protocol_drops_no_body(service, cut):
    """Clients that prefer HTTP/2 ask so with their first request. The parser takes its body for the other protocol."""
    body = b'{"n": 4711}\n{"n": 4712}\n'
    lengthy = UPGRADE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    before = len(service.events("orders"))
    with service.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        everything = lengthy + chunked + lengthy + LAST
        connection.sendall(everything[:cut])
        assert service.client.get("/healthz").status_code == 200  # so that the rest comes in another packet
        connection.sendall(everything[cut:])
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 202 ") == answer.count(b'"rows_received":2') == 3, answer
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert [event["n"] for event in service.events("orders")][before:] == [4711, 4712] * 3


def test_curl_with_http2(service):
    command = ["curl", "-s", "--http2", f"{service.url}{ORDERS}", "-H", "content-type: application/x-ndjson"]
    done = subprocess.run([*command, "--data-binary", '{"n": 5}'], capture_output=True, check=True)
    assert json.loads(done.stdout)["rows_received"] == 1


def test_other_protocols(service):
    socket_key = b"Upgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    assert service.raw(head + socket_key + b"\r\n" + LAST).count(b"HTTP/1.1 200 ") == 2
    assert service.raw(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n").startswith(b"HTTP/1.1 400 ")
