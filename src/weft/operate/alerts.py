"""Alerts about failures and recoveries. A failing alerter never fails the work, nor delays it for long.

All of a URL but its host is a secret: anyone who knows a webhook's path can write to it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from weft import settings
from weft.errors import NotFoundError, SettingsError, nearest
from weft.operate.records import Attempt, ClaimedRun
from weft.operate.redaction import clean
from weft.systems.base import url_scheme

logger = logging.getLogger("weft.operate")

WAIT_SECONDS = 5.0
"""How long the work waits for all of its alerters together."""
_ERROR_CHARACTERS = 1500
_SCHEMES = ("stdout", "slack", "https", "http")
_NOT_OFFERED = ("email", "mailto", "smtp", "pagerduty")
_EXAMPLES = "For example stdout://, slack://hooks.slack.com/services/… or https://example.com/hook."

AlertKind = Literal["failed", "gave_up", "recovered"]


@dataclass(frozen=True)
class Alert:
    """What is sent. `failed`: an attempt failed. `gave_up`: the last one did. `recovered`: one succeeded after some
    that did not."""

    event: AlertKind
    pipeline: str
    run_id: str | None
    slot: datetime | None
    attempt: int | None
    max_attempts: int | None
    failures: int | None
    """Recovered: how many attempts in a row had not succeeded."""
    error: str | None
    next_retry: datetime | None
    at: datetime

    def __str__(self) -> str:
        attempts = f"attempt {self.attempt}" + (f" of {self.max_attempts}" if self.max_attempts else "")
        if self.event == "recovered":
            return f"{self.pipeline} succeeded after {self.failures} failed attempt{'s' if self.failures != 1 else ''}"
        what = "failed" if self.event == "failed" else "failed for good"
        after = f"; next attempt at {_time(self.next_retry)}" if self.next_retry else ""
        about = f" ({attempts}{after})" if self.attempt else ""
        return f"{self.pipeline} {what}{about}" + (f": {self.error}" if self.error else "")

    def as_json(self) -> dict[str, Any]:
        """Its fields, times in ISO form, and the text."""
        fields = {
            name: value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
            for name, value in asdict(self).items()
        }
        return {**fields, "text": str(self)}


class Alerter(ABC):
    """Delivers alerts. `deliver` may fail; `Alerters` keeps that from the work."""

    shown: str
    """Where they go, without secrets."""

    @abstractmethod
    def deliver(self, event: Alert) -> None:
        """Deliver an alert."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


class Lines(Alerter):
    """A line on stderr for each event."""

    shown = "stdout://"

    def deliver(self, event: Alert) -> None:
        sign = "✓" if event.event == "recovered" else "✗"
        first, *more = str(event).splitlines() or [""]
        lines = [f"{_time(event.at)} {sign} {first}", *(f"    {line}" for line in more)]
        print("\n".join(lines), file=sys.stderr, flush=True)


class _NoRedirects(HTTPRedirectHandler):
    """A redirected POST would become a GET without its body, and may lead to a stranger."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook(Alerter):
    """A POST of JSON for each event."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url, self.shown = url, f"{parts.scheme}://{parts.netloc}/{settings.HIDDEN}"
        self._opener = build_opener(_NoRedirects)

    def body(self, event: Alert) -> dict[str, Any]:
        return event.as_json()

    def deliver(self, event: Alert) -> None:
        data = json.dumps(self.body(event)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "weft"}
        with self._opener.open(Request(self._url, data, headers, method="POST"), timeout=WAIT_SECONDS):
            pass


class Slack(Webhook):
    """An incoming webhook of Slack's."""

    def body(self, event: Alert) -> dict[str, Any]:
        sign = ":white_check_mark:" if event.event == "recovered" else ":x:"
        # Slack's own marks are escaped.
        text = str(event).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": f"{sign} {text}"}


class Alerters:
    """All alerters of a process. Its methods never raise, and wait some seconds at most."""

    def __init__(self, alerters: Iterable[Alerter] = ()) -> None:
        self._alerters = tuple(alerters)

    def failed(self, pipeline: str, run: ClaimedRun, error: str, next_retry: datetime | None = None) -> None:
        self._alert("failed", pipeline, run, error=error, next_retry=next_retry)

    def gave_up(self, pipeline: str, last: ClaimedRun | Attempt | None, error: str | None = None) -> None:
        """The last attempt failed, or its process died."""
        self._alert("gave_up", pipeline, last, error=error)

    def recovered(self, pipeline: str, run: ClaimedRun) -> None:
        """An attempt succeeded. There is no alert where the one before it did so too."""
        if run.failures >= 1:
            self._alert("recovered", pipeline, run)

    def _alert(
        self,
        event: AlertKind,
        pipeline: str,
        about: ClaimedRun | Attempt | None,
        *,
        error: str | None = None,
        next_retry: datetime | None = None,
    ) -> None:
        """Send an alert to every alerter, to all at the same time."""
        if not self._alerters:
            return
        try:
            run = about if isinstance(about, ClaimedRun) else None
            error = about.error if error is None and isinstance(about, Attempt) else error
            self._send(
                Alert(
                    event,
                    pipeline,
                    run_id=about.run_id if about else None,
                    slot=about.slot if about else None,
                    attempt=about.attempt if about else None,
                    max_attempts=run.attempts_allowed if run else None,
                    failures=run.failures if run and event == "recovered" else None,
                    error=clean(error, most=_ERROR_CHARACTERS) if error else None,
                    next_retry=next_retry,
                    at=datetime.now(UTC),
                )
            )
        except Exception as problem:
            logger.warning("No alert was sent that %s %s: %s", pipeline, event, type(problem).__name__)

    def _send(self, event: Alert) -> None:
        # Threads, because a name server or a slow answer can take longer than any timeout of a socket.
        threads = [
            threading.Thread(target=_deliver, args=(each, event), name=f"weft alert to {each.shown}", daemon=True)
            for each in self._alerters
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + WAIT_SECONDS
        for thread, alerter in zip(threads, self._alerters, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("The alerter %s did not answer within %g s.", alerter.shown, WAIT_SECONDS)


def _deliver(alerter: Alerter, event: Alert) -> None:
    try:
        alerter.deliver(event)
    except Exception as error:
        logger.warning("The alerter %s failed: %s", alerter.shown, _reason(error))


def _reason(error: Exception) -> str:
    """Return what went wrong, without texts that may hold the URL."""
    if isinstance(error, HTTPError):
        error.close()
        return f"it answered {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    return str(reason.strerror or reason) if isinstance(reason, OSError) else type(error).__name__


def open_alerters(urls: Iterable[str]) -> Alerters:
    """Open the alerters at some URLs; raise for the first that is not valid."""
    return Alerters([open_alerter(url) for url in urls])


def open_alerter(url: str) -> Alerter:
    """Open the alerter at a URL: `stdout://`, `slack://hooks.slack.com/services/…`, `https://…` or `http://…`.

    `${VAR}` in it is replaced by the environment's value. `slack+http://127.0.0.1:PORT/…` is for tests: without TLS, so
    this machine only.
    """
    if not isinstance(url, str) or not url.strip():
        raise SettingsError("An alerter needs a URL.", hint=_EXAMPLES)
    url = settings.interpolate(url.strip(), "the URL of an alerter")
    scheme = url_scheme(url)
    if scheme in _NOT_OFFERED:
        raise SettingsError(
            f"An alerter at {scheme}: is not offered.", hint=f"Post to a service that forwards. {_EXAMPLES}"
        )
    if scheme == "stdout":
        if url.partition("://")[2].strip("/"):
            raise SettingsError("The alerter stdout:// has no path.", hint="Write stdout://.")
        return Lines()
    if scheme not in (*_SCHEMES, "slack+http"):
        close = nearest(scheme or url.partition(":")[0][:20], _SCHEMES)
        hint = f"Did you mean {close}://? " if close else ""
        named = f"at {scheme}://" if scheme else "without a scheme"
        raise NotFoundError(f"There is no alerter {named}.", hint=f"{hint}{_EXAMPLES}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        # Without the cause, which would quote the URL.
        raise SettingsError(f"The URL of an alerter at {scheme}:// cannot be read.", hint=_EXAMPLES) from None
    if not host or parts.username is not None or parts.password is not None:
        raise SettingsError(
            f"The URL of an alerter at {scheme}:// needs a host, and has no user or password.", hint=_EXAMPLES
        )
    rest = url.partition("://")[2]
    if scheme == "slack":
        return Slack(f"https://{rest}")
    if scheme == "slack+http":
        if not _is_loopback(host):
            raise SettingsError(
                "The alerter slack+http:// is for tests on this machine: it sends the webhook without TLS.",
                hint="Write slack://hooks.slack.com/services/….",
            )
        return Slack(f"http://{rest}")
    return Webhook(url)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
