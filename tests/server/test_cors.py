"""Pages of named origins may use the service, others may not; and a slash at the end of a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from served import start, subscribe
from weft.errors import SettingsError
from weft.server import app

STREAMS = """
    @weft.stream(fields={"page": "string"})
    def clicks(): ...

    @weft.stream(auth={"type": "api_key", "header": "X-Shop-Key", "key": "secret"})
    def closed(): ...
"""
SHOP, URL = "https://shop.example", "/api/v1/streams/clicks"
ALLOW = "access-control-allow-origin"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    toml = f'[server]\norigins = ["{SHOP}", "http://localhost:3000"]\n'
    served = start(tmp_path_factory.mktemp("shop"), STREAMS, toml=toml)
    assert served.url
    yield served
    assert served.stop() == 0


def ask(shop: Any, method: str, path: str, origin: str = SHOP, **options: Any) -> httpx.Response:
    headers = {"origin": origin, **options.pop("headers", {})}
    answer: httpx.Response = shop.client.request(method, path, headers=headers, **options)
    return answer


def preflight(shop: Any, path: str, origin: str = SHOP) -> httpx.Response:
    wanted = "content-type,idempotency-key,x-shop-key"
    headers = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    return ask(shop, "OPTIONS", path, origin, headers=headers)


def test_a_page_publishes_and_reads(shop: Any) -> None:
    allowed = preflight(shop, URL)
    assert (allowed.status_code, allowed.headers[ALLOW], allowed.headers["vary"]) == (204, SHOP, "origin")
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "idempotency-key" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    for answer, status in (
        (ask(shop, "POST", URL, json={"page": "/"}), 202),
        (ask(shop, "GET", f"{URL}/events"), 200),
        (ask(shop, "GET", "/api/v1/streams/missing"), 404),
        (ask(shop, "POST", "/api/v1/streams/closed", json={}), 401),
        (ask(shop, "POST", "/api/v1/streams/closed", json={}, headers={"x-shop-key": "secret"}), 202),
        (ask(shop, "GET", URL, "http://localhost:3000"), 200),
    ):
        assert (answer.status_code, answer.headers[ALLOW]) == (status, answer.request.headers["origin"])
    with subscribe(shop.client, f"{URL}/subscribe", headers={"origin": SHOP}, since="start") as found:
        assert next(each for kind, each in found if kind == "stream.event")["event"]["page"] == "/"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://shop.example", "https://shop.example:8443", "https://x.shop.example", ""],
)
def test_other_pages_may_not(shop: Any, origin: str) -> None:
    for answer in (preflight(shop, URL, origin), ask(shop, "GET", URL, origin)):
        assert ALLOW not in answer.headers
    assert preflight(shop, URL, origin).status_code == 405


@pytest.mark.parametrize("wrong", ["*", "shop.example", "https://shop.example/", "https://Shop.example", "", 5])
def test_what_is_no_origin(project: Path, wrong: Any) -> None:
    with pytest.raises(SettingsError, match="is not the origin of a page"):
        app(origins=[wrong])
    (project / "weft.toml").write_text('[server]\norigins = "https://shop.example"\n')
    with pytest.raises(SettingsError, match="must be a list"):
        app()


def test_a_slash_at_the_end(shop: Any) -> None:
    assert ask(shop, "POST", f"{URL}/", json={"page": "/slash"}).status_code == 202
    for path in (f"{URL}/", f"{URL}/events/", "/api/v1/streams/", "/healthz/", "/"):
        assert ask(shop, "GET", path).status_code == 200
    redirected = ask(shop, "GET", "/docs/")
    assert (redirected.status_code, redirected.headers["location"]) == (307, "../docs")
    assert ask(shop, "POST", f"{URL}/consume/", json={"consumer": "c"}).status_code == 200
