"""A connection to a schema registry: what it refuses, how it signs in, what it says when nobody answers; schemas."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import ConnectionFailedError, DeclarationError, KafkaConnection, SchemaRegistryConnection
from weft.systems.schema_registry import client
from weft.systems.schema_registry.client import SchemaRegistry

_numbers = itertools.count(1)
ORDER = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]})


@contextmanager
def gate(api: str, wanted: str | None = None, certificate: Path | None = None) -> Iterator[str]:
    """A door before a registry, which lets those through whose `Authorization` is this one."""

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if wanted is not None and self.headers.get("Authorization") != wanted:
                self._answer(401, b'{"error_code": 401, "message": "Unauthorized"}')
                return
            try:
                with urllib.request.urlopen(api + self.path, timeout=30) as answer:
                    self._answer(answer.status, answer.read())
            except urllib.error.HTTPError as error:
                self._answer(error.code, error.read())

        def _answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.fixture
def opened(registry: Any) -> SchemaRegistry:
    return SchemaRegistry(SchemaRegistryConnection(registry.api))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:8081"}, r"is not a URL; a schema_registry connection needs http:// or https://"),
        ({"url": "kafka://h"}, "begins with kafka://"),
        ({"url": "http://"}, "has no host"),
        ({"basic_auth_user": "me"}, "basic_auth_password, both or neither"),
        ({"basic_auth_user": "me", "basic_auth_password": "x", "bearer_token": "t"}, "signs in in two ways"),
        ({"url": "http://a:b@h", "bearer_token": "t"}, "signs in in two ways"),
        ({"ssl_key_location": "/k"}, "both or neither"),
        ({"basic_auth_pasword": "x"}, r"Did you mean 'basic_auth_password'\?"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        SchemaRegistryConnection(**{"url": "http://h:8081", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"payload_format": "avro"}, "'avro', which needs a schema registry"),
        ({"payload_format": "protobuf"}, "'protobuf', which needs a schema registry"),
        ({"schema_registry": "a", "schema_registry_url": "http://h"}, "both schema_registry and schema_registry_url"),
        ({"schema_registry": 3}, "must be a schema_registry connection or its name, not int"),
        ({"schema_registry_url": "h:1"}, "is not a URL"),
        ({"schema_registry": "a", "subject_name_strategy": "topic"}, r"Did you mean 'topic_name'\?"),
    ],
)
def test_what_a_broker_cannot_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        KafkaConnection(**{"bootstrap_servers": "h:9092", **fields})


def test_declared_by_name_and_by_url(project: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SR_URL", "http://me:hunter2@registry:8081/")

    @weft.connection
    class sr_prod:
        kind = "schema_registry"
        url = "${SR_URL}"

    registry: Any = sr_prod
    assert repr(registry) == "SchemaRegistryConnection(name='sr_prod', url='${SR_URL}')"
    by_name = KafkaConnection("h", payload_format="avro", schema_registry="sr_prod")
    itself = KafkaConnection("h", payload_format="avro", schema_registry=sr_prod)
    by_url = KafkaConnection("h", payload_format="avro", schema_registry_url="${SR_URL}")
    for made in (by_name, itself, by_url):
        found = made.resolved().registry
        assert found is not None
        resolved = found.resolved()
        assert (resolved.base_url, resolved.user) == ("http://registry:8081", ("me", "hunter2"))
        assert "hunter2" not in f"{made!r} {made.resolved()!r} {resolved!r} {resolved.target}"
        assert "hunter2" in made.secrets()
    assert weft.connect("https://registry").kind == "schema_registry"
    weft.register_connection(weft.SQLiteConnection("a.db", name="db"))
    with pytest.raises(DeclarationError, match="is the connection 'db', a sqlite connection"):
        _ = KafkaConnection("h", payload_format="avro", schema_registry="db").registry


def test_check(registry: Any) -> None:
    report = SchemaRegistryConnection(registry.api).check()
    assert report["server"] == "Schema registry"
    assert report["subjects"] >= 0
    assert report["latency_ms"] > 0


@pytest.mark.parametrize("way", ["basic", "url", "bearer"])
def test_sign_in(registry: Any, way: str) -> None:
    basic = f"Basic {base64.b64encode('mé:p@ss:w'.encode()).decode()}"
    with gate(registry.api, "Bearer hunter2" if way == "bearer" else basic) as url:
        fields: dict[str, Any] = {
            "basic": {"url": url, "basic_auth_user": "mé", "basic_auth_password": "p@ss:w"},
            "url": {"url": url.replace("http://", "http://m%C3%A9:p%40ss%3Aw@")},
            "bearer": {"url": url, "bearer_token": "hunter2"},
        }[way]
        assert SchemaRegistryConnection(**fields).check()["server"] == "Schema registry"
        wrong = SchemaRegistryConnection(url, name="sr", bearer_token="correct-horse")
        with pytest.raises(ConnectionFailedError, match=r"'sr' .* refuses us with 401[\s\S]*bearer_token") as raised:
            wrong.check()
        assert "correct-horse" not in f"{raised.value} {wrong!r}"


def test_tls(registry: Any, tmp_path: Path) -> None:
    certificate = tmp_path / "both.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    certificate.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "certificate.pem").read_text())
    with gate(registry.api, certificate=certificate) as url:
        trusting = SchemaRegistryConnection(url, ssl_ca_location=str(tmp_path / "certificate.pem"))
        assert trusting.check()["server"] == "Schema registry"
        with pytest.raises(ConnectionFailedError, match="certificate verify failed"):
            SchemaRegistryConnection(url).check()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSES", (0.0,))
    with socket.socket() as taken:  # bound, so that nobody else is there, and not listening
        taken.bind(("127.0.0.1", 0))
        made = SchemaRegistryConnection(f"http://127.0.0.1:{taken.getsockname()[1]}", name="sr")
        with pytest.raises(ConnectionFailedError, match=r"'sr' .*refused[\s\S]*weft connections check sr"):
            made.check()


def test_another_path_is_not_an_unknown_schema(registry: Any) -> None:
    made = SchemaRegistryConnection(registry.api.removesuffix("/apis/ccompat/v7"))
    with pytest.raises(ConnectionFailedError, match=r"/schemas/ids/1 with 404[\s\S]*Check the path"):
        SchemaRegistry(made).schema(1)


def test_schemas(opened: SchemaRegistry) -> None:
    subject = f"orders {next(_numbers)}/ü-value"
    assert opened.newest(subject) is None
    number = opened.register(subject, "AVRO", ORDER)
    assert opened.register(subject, "AVRO", ORDER) == number
    found = opened.newest(subject)
    assert found is not None
    assert (found.number, found.kind, json.loads(found.text)) == (number, "AVRO", json.loads(ORDER))
    assert opened.schema(number) == found
    assert opened.schema(2**31 - 1) is None
    assert subject in opened.subjects()


def test_a_schema_that_is_refused(opened: SchemaRegistry, registry: Any) -> None:
    subject = f"refused-{next(_numbers)}-value"
    opened.register(subject, "AVRO", ORDER)
    request = urllib.request.Request(
        f"{registry.api}/config/{subject}",
        b'{"compatibility": "BACKWARD"}',
        {"Content-Type": "application/json"},
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=30).close()
    with pytest.raises(DeclarationError, match="refuses the schema: it is not compatible"):
        opened.register(subject, "AVRO", ORDER.replace('"long"', '"string"'))


def test_references(opened: SchemaRegistry, registry: Any) -> None:
    city = json.dumps({"type": "record", "name": "City", "fields": [{"name": "name", "type": "string"}]})
    one = f"city-{next(_numbers)}"
    opened.register(one, "AVRO", city)
    body = {
        "schema": ORDER.replace('"long"', '"City"'),
        "references": [{"name": "City", "subject": one, "version": 1}],
    }
    request = urllib.request.Request(
        f"{registry.api}/subjects/of-{one}/versions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        number = json.load(answer)["id"]
    found = opened.schema(number)
    assert found is not None
    assert [(name, json.loads(text)) for name, text in found.references] == [("City", json.loads(city))]
