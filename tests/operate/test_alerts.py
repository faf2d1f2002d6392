"""Alerters against real servers: what they send, and that nothing which goes wrong with them reaches the work."""

from __future__ import annotations

import http.server
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from weft.errors import NotFoundError, SettingsError
from weft.operate import alerts
from weft.operate.alerters import open_alerter, open_alerters
from weft.operate.alerts import Alert, Alerter, Alerters
from weft.operate.records import ClaimedRun

SECRET = "T000/B000/hunter2"


def a_run(*, attempt: int = 2, failures: int = 1) -> ClaimedRun:
    at = datetime(2025, 6, 1, 2, tzinfo=UTC)
    return ClaimedRun(
        "abc", "orders", at, attempt, 5, failures, fence=1, owner="h:1:1:m", lease_seconds=60, started_at=at
    )


@dataclass
class Hook:
    """A server that keeps what is posted to it."""

    port: int
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    posted: list[tuple[str, Any]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    hold: threading.Event | None = None


@pytest.fixture
def hook() -> Iterator[Hook]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.methods.append(self.command)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            kept.posted.append((self.path, json.loads(body) if body else None))
            if kept.hold is not None:
                kept.hold.wait(60)
            self.send_response(kept.status)
            for name, value in kept.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept = Hook(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        if kept.hold is not None:
            kept.hold.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(alerts, "WAIT_SECONDS", 120)


def test_http_gets_the_event_as_json(hook: Hook) -> None:
    with open_alerters([f"http://127.0.0.1:{hook.port}/hook?key={SECRET}"]) as told:
        told.failed("orders", a_run(), "it broke", datetime(2025, 6, 1, 3, tzinfo=UTC))
        told.gave_up("orders", a_run(attempt=5, failures=7), "it broke")
        told.recovered("orders", a_run(failures=3))
        told.notice("stale", "orders", "orders is late", failures=1)
    (path, first), (_, second), (_, third), (_, fourth) = hook.posted
    assert path == f"/hook?key={SECRET}"
    assert re.fullmatch(r"20.*\+00:00", first.pop("at"))
    assert first == {
        "event": "failed",
        "pipeline": "orders",
        "run_id": "abc",
        "slot": "2025-06-01T02:00:00+00:00",
        "attempt": 2,
        "max_attempts": 5,
        "failures": 2,
        "error": "it broke",
        "next_retry": "2025-06-01T03:00:00+00:00",
        "text": "orders failed (attempt 2 of 5; next attempt at 2025-06-01 03:00:00 UTC): it broke",
    }
    assert second["text"] == "orders failed for good (attempt 5 of 5; 8 failures in a row): it broke"
    assert (third["event"], third["failures"]) == ("recovered", 3)
    assert third["text"] == "orders succeeded after 3 failed attempts"
    assert (fourth["event"], fourth["text"], fourth["run_id"]) == ("stale", "orders is late", None)


def test_slack_gets_a_text(hook: Hook) -> None:
    with open_alerters([f"slack+http://127.0.0.1:{hook.port}/services/{SECRET}"]) as told:
        told.failed("orders", a_run(), "a < b & c")
    ((path, body),) = hook.posted
    assert path == f"/services/{SECRET}"
    assert body == {"text": ":x: orders failed (attempt 2 of 5): a &lt; b &amp; c"}


def test_stdout_is_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    told = open_alerters(["stdout://"])
    told.failed("orders", a_run(), "first\nsecond")
    told.recovered("orders", a_run(failures=1))
    captured = capsys.readouterr()
    assert captured.out == ""
    one, two, three = captured.err.splitlines()
    assert re.fullmatch(r"\d{4}-\S+ \S+ UTC ✗ orders failed \(attempt 2 of 5\): first", one)
    assert two == "    second"
    assert three.endswith("UTC ✓ orders succeeded after 1 failed attempt")


def test_a_first_success_is_no_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    open_alerters(["stdout://"]).recovered("orders", a_run(failures=0))
    assert capsys.readouterr().err == ""


def test_an_error_is_cut_and_has_no_secrets(hook: Hook) -> None:
    with open_alerters([f"http://127.0.0.1:{hook.port}/"]) as told:
        told.failed("orders", a_run(), "postgres://me:hunter2@db/x refused" + "x" * 5000)
    error = hook.posted[0][1]["error"]
    assert error.startswith("postgres://me:***@db/x refused") and len(error) == 1500


# -------------------------------------------------------------------------------------------------------------- trouble


class Broken(Alerter):
    shown = "broken"

    def deliver(self, event: Alert) -> None:
        raise RuntimeError(f"with a secret: {SECRET}")


def test_a_broken_alerter_does_not_reach_the_work_or_the_others(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    with Alerters([Broken(), open_alerter(f"http://127.0.0.1:{hook.port}/")]) as told:
        told.failed("orders", a_run(), "no")
    assert len(hook.posted) == 1
    assert [(record.name, record.levelno) for record in caplog.records] == [("weft.operate", logging.WARNING)]
    assert caplog.records[0].getMessage() == "The alerter broken failed: RuntimeError"


@pytest.mark.parametrize("scheme", ["http", "slack+http"])
def test_a_server_that_refuses(hook: Hook, caplog: pytest.LogCaptureFixture, scheme: str) -> None:
    hook.status = 403
    with open_alerters([f"{scheme}://127.0.0.1:{hook.port}/services/{SECRET}"]) as told:
        told.failed("orders", a_run(), "no")
    assert caplog.records[0].getMessage() == f"The alerter http://127.0.0.1:{hook.port}/*** failed: it answered 403"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(hook: Hook, caplog: pytest.LogCaptureFixture, status: int) -> None:
    hook.status, hook.headers = status, {"Location": f"http://127.0.0.1:{hook.port}/elsewhere"}
    with open_alerters([f"http://127.0.0.1:{hook.port}/{SECRET}"]) as told:
        told.failed("orders", a_run(), "no")
    assert [path for path, _ in hook.posted] == [f"/{SECRET}"]
    assert f"it answered {status}" in caplog.text and SECRET not in caplog.text


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and never listens
        with open_alerters([f"http://127.0.0.1:{taken.getsockname()[1]}/{SECRET}"]) as told:
            told.failed("orders", a_run(), "no")
    assert "refused" in caplog.text and SECRET not in caplog.text


def test_a_server_that_never_answers_delays_nothing(
    hook: Hook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_MOST_WAITING", 3)
    hook.hold = threading.Event()
    threads = threading.active_count()
    with open_alerters([f"http://127.0.0.1:{hook.port}/{SECRET}"]) as told:
        for _ in range(20):
            told.failed("orders", a_run(), "no")  # returns while the server holds the first
        assert len(hook.posted) <= 1 and not hook.hold.is_set()
        # One that delivers, one in hand, and the server's.
        assert threading.active_count() <= threads + 3
        monkeypatch.setattr(alerts, "WAIT_SECONDS", 0.2)
    messages = {record.getMessage() for record in caplog.records}
    shown = f"http://127.0.0.1:{hook.port}/***"
    assert f"The alerter {shown} is too slow: an alert was dropped." in messages
    assert f"Some alerts have not reached {shown}." in messages
    assert SECRET not in caplog.text


# ----------------------------------------------------------------------------------------------------------------- URLs


def test_the_path_of_a_webhook_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", SECRET)
    alerter = open_alerter("slack://hooks.slack.com/services/${HOOK}")
    assert repr(alerter) == "Slack('https://hooks.slack.com/***')"
    assert repr(open_alerter("stdout://")) == "Lines('stdout://')"


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("slak://hooks.slack.com/services/x", NotFoundError, "no alerter at slak://.*\n.*Did you mean slack://"),
        ("stdot://", NotFoundError, "Did you mean stdout://"),
        (f"hooks.slack.com/{SECRET}", NotFoundError, "without a scheme"),
        ("", SettingsError, "needs a URL"),
        ("stdout://x", SettingsError, "no path"),
        ("https://", SettingsError, "needs a host"),
        ("https://me:hunter2@example.com/", SettingsError, "no user or password"),
        (f"https://[{SECRET}", SettingsError, "cannot be read"),
        (f"slack+http://hooks.slack.com/{SECRET}", SettingsError, "for tests on this machine"),
        ("slack://${NOT_THERE}", SettingsError, "NOT_THERE is not set"),
    ],
)
def test_what_is_no_alerter(url: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        open_alerter(url)
    assert "hunter2" not in str(caught.value)
