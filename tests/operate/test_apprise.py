"""Alerters of Apprise, against real servers: HTTP by its `json://`, and SMTP."""

from __future__ import annotations

import http.server
import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.policy import default
from typing import Any

import pytest

from weft.errors import MissingExtraError, NotFoundError, SettingsError
from weft.operate import alerts
from weft.operate.alerters import open_alerter, open_alerters

pytest.importorskip("apprise")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(alerts, "WAIT_SECONDS", 120)


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def posted() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def hook(posted: list[dict[str, Any]]) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(403 if "refused" in self.path else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as port:
        yield port


def test_json(hook: int, posted: list[dict[str, Any]]) -> None:
    with open_alerters([f"json://127.0.0.1:{hook}/hunter2"]) as told:
        told.notice("stale", "orders", "orders had no success for 3:00:00", failures=1)
        told.notice("recovered", "orders", "orders is fresh again")
    assert [(each["title"], each["message"], each["type"]) for each in posted] == [
        ("orders: stale", "orders had no success for 3:00:00", "failure"),
        ("orders: recovered", "orders is fresh again", "success"),
    ]


def test_refusal_is_told_without_the_url(hook: int, caplog: pytest.LogCaptureFixture) -> None:
    with open_alerters([f"json://me:hunter2@127.0.0.1:{hook}/refused/hunter2"]) as told:
        told.notice("stale", "orders", "late")
    assert [each.getMessage() for each in caplog.records] == ["The alerter json://*** failed: it was not delivered"]
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("chosen", ["", "&format=html"])
def test_mail(chosen: str) -> None:
    """An error may look like HTML, and is text all the same."""
    mails: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        """As much of SMTP as a client needs to hand over a mail."""

        def handle(self) -> None:
            self.wfile.write(b"220 test\r\n")
            while line := self.rfile.readline():
                word = line[:4].upper()
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = iter(self.rfile.readline, b".\r\n")
                    mails.append(b"".join(lines))
                self.wfile.write({b"EHLO": b"250 test\r\n", b"QUIT": b"221 bye\r\n"}.get(word, b"250 done\r\n"))

    url = f"?from=w@x.org&to=me@y.org{chosen}"
    with serving(Handler) as port, open_alerters([f"mailto://127.0.0.1:{port}{url}"]) as told:
        told.notice("gave_up", "orders", "orders failed, and has ended", error="<class 'int'> has\nno disk")
    (mail,) = [message_from_bytes(each, policy=default) for each in mails]
    assert (mail["Subject"], mail["To"]) == ("orders: gave up", "me@y.org")
    parts = {each.get_content_type(): each.get_content() for each in mail.walk() if not each.is_multipart()}
    assert ("text/html" in parts) == bool(chosen)
    for kind, text in parts.items():
        assert ("&lt;class" if kind == "text/html" else "<class 'int'> has") in text, kind
        assert kind == "text/plain" or "<class" not in text
        assert "no disk" in text.replace("&nbsp;", " ")


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("ftp://x/hunter2", NotFoundError, "no alerter at ftp://.\n.*stdout://"),
        ("jsn://x/hunter2", NotFoundError, "Did you mean json://"),
        ("email://me:hunter2@example.com", NotFoundError, "Did you mean mailto://"),
        ("nope://x/hunter2", NotFoundError, r"There is no alerter at nope://\.\n  For example"),
        ("pagerduty://?hunter2", SettingsError, "cannot read the URL of the alerter at pagerduty://"),
    ],
)
def test_what_is_no_alerter(url: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        open_alerter(url)
    assert "hunter2" not in str(caught.value)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    monkeypatch.delitem(sys.modules, "weft.operate.apprise_alerter", raising=False)
    with pytest.raises(MissingExtraError, match=r"mailto:// needs Apprise[\s\S]*'weft\[alerts\]'") as caught:
        open_alerter("mailto://me:hunter2@example.com")
    assert "hunter2" not in str(caught.value)


def test_the_url_is_not_shown() -> None:
    assert repr(open_alerter("mailto://me:hunter2@example.com")) == "Apprise('mailto://***')"
