"""What metrics and traces share: the URL of a sink, and a collector of OpenTelemetry as one (`otlp://collector:4318`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from weft import settings
from weft.errors import MissingExtraError, NotFoundError, SettingsError, installing, listed
from weft.systems.base import url_scheme

# A collector that hangs must not hold up the end of a run for long.
FLUSH_SECONDS = 5
_WITH_PLACE = ("prometheus", "otlp")


def sink(url: str | None, what: str, sinks: Sequence[str], examples: str) -> SplitResult:
    """Return the parts of the URL of a sink for `what` (metrics, traces): one of `sinks`, by default `null://`."""
    url = "null://" if url is None else settings.interpolate(str(url).strip(), f"the URL of {what}")
    scheme, hint = url_scheme(url), f"For example {examples}"
    if scheme not in sinks:
        raise NotFoundError(
            f"There is no {what} sink {scheme}://." if scheme else f"A {what} sink needs a URL.",
            hint=listed(scheme or url[:20], sinks, hint),
        )
    try:
        split = urlsplit(url)
        _ = split.port
    except ValueError:
        raise SettingsError(f"The URL of {what} at {scheme}:// cannot be read.", hint=hint) from None
    if split.username or split.password or split.query or (scheme not in _WITH_PLACE and split.netloc):
        raise SettingsError(f"The URL of {what} at {scheme}:// has too much in it.", hint=hint)
    if scheme == "otlp" and not split.hostname:
        raise SettingsError("otlp:// needs the host of a collector.", hint="otlp://collector:4318")
    return split


def service() -> dict[str, str]:
    """Return the name of this service, unless a variable of OpenTelemetry says another one."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {} if named else {"service.name": "weft"}


def endpoint(url: SplitResult, what: str) -> str:
    """Return where a collector takes `what` by OTLP over HTTP."""
    assert url.hostname is not None
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"http://{host}:{url.port or 4318}{url.path.rstrip('/')}/v1/{what}"


@contextmanager
def importing() -> Iterator[None]:
    """Around the imports of OpenTelemetry: an error says what to install."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"otlp:// needs OpenTelemetry, which is not there: {error}.", hint=installing("otel")
        ) from error
