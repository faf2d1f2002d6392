"""Where alerts go: lines on stderr, webhooks, Slack, and the services of Apprise, each by its URL.

All of a URL but its host is a secret: anyone who knows a webhook's path can write to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from weft import settings
from weft.errors import MissingExtraError, NotFoundError, SettingsError, nearest
from weft.operate import alerts
from weft.operate.alerts import EXAMPLES, Alert, Alerter, Alerters, shown_time
from weft.systems.base import url_scheme

_SCHEMES = ("stdout", "slack", "https", "http")


class Lines(Alerter):
    """A line on stderr for each event."""

    shown = "stdout://"
    is_local = True

    def deliver(self, event: Alert) -> None:
        sign = "✓" if event.event == "recovered" else "✗"
        first, *more = str(event).splitlines() or [""]
        lines = [f"{shown_time(event.at)} {sign} {first}", *(f"    {line}" for line in more)]
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
        with self._opener.open(Request(self._url, data, headers, method="POST"), timeout=alerts.WAIT_SECONDS):
            pass


class Slack(Webhook):
    """An incoming webhook of Slack's."""

    def body(self, event: Alert) -> dict[str, Any]:
        sign = ":white_check_mark:" if event.event == "recovered" else ":x:"
        # Slack's own marks are escaped.
        text = str(event).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": f"{sign} {text}"}


def open_alerters(urls: Iterable[str]) -> Alerters:
    """Open the alerters at some URLs; raise for the first that is not valid."""
    return Alerters([open_alerter(url) for url in urls])


def open_alerter(url: str) -> Alerter:
    """Open the alerter at a URL: `stdout://`, `slack://hooks.slack.com/services/…`, `https://…`, `http://…`, or one of
    Apprise's, such as `mailto://…`.

    `${VAR}` in it is replaced by the environment's value. `slack+http://127.0.0.1:PORT/…` is for tests: without TLS, so
    this machine only.
    """
    if not isinstance(url, str) or not url.strip():
        raise SettingsError("An alerter needs a URL.", hint=EXAMPLES)
    url = settings.interpolate(url.strip(), "the URL of an alerter")
    scheme = url_scheme(url)
    if scheme == "stdout":
        if url.partition("://")[2].strip("/"):
            raise SettingsError("The alerter stdout:// has no path.", hint="Write stdout://.")
        return Lines()
    if scheme not in (*_SCHEMES, "slack+http"):
        return _open_other(scheme, url)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        # Without the cause, which would quote the URL.
        raise SettingsError(f"The URL of an alerter at {scheme}:// cannot be read.", hint=EXAMPLES) from None
    if not host or parts.username is not None or parts.password is not None:
        raise SettingsError(
            f"The URL of an alerter at {scheme}:// needs a host, and has no user or password.", hint=EXAMPLES
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


def _open_other(scheme: str | None, url: str) -> Alerter:
    close = nearest(scheme or url.partition(":")[0][:20], _SCHEMES)
    if close or scheme is None:
        hint = f"Did you mean {close}://? " if close else ""
        named = f"at {scheme}://" if scheme else "without a scheme"
        raise NotFoundError(f"There is no alerter {named}.", hint=f"{hint}{EXAMPLES}")
    try:
        from weft.operate.apprise_alerter import Apprise
    except MissingExtraError as error:
        raise MissingExtraError(
            f"An alerter at {scheme}:// needs Apprise, which is not there.", hint=f"{error.hint} {EXAMPLES}"
        ) from None
    return Apprise(scheme, url)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
