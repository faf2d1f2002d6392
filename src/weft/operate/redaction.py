"""Texts that others read later: bounded, storable everywhere, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from weft import settings
from weft.errors import WeftError
from weft.project import current

MOST_CHARACTERS = 10_000
# Bounded, because a text may be one long word: without bounds each of its letters could begin a URL.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>]{1,2000}")


def clean(
    text: str, *, secrets: Iterable[str] = (), most: int = MOST_CHARACTERS, known: Iterable[str] | None = None
) -> str:
    """Return `text` without the secrets of this project's connections and of its URLs, cut in the middle if too long.

    `known`: the secrets of the connections, where the caller has them already.
    """
    # No database stores these: half of a surrogate pair, and the character 0.
    text = text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    text = settings.redact(text, {*secrets, *(project_secrets() if known is None else known)})
    text = _URL.sub(lambda match: settings.redact_url(match[0]), text)
    if len(text) <= most:
        return text
    # The cause is at the beginning of an error, or at the end of a traceback: cut the middle.
    cut = " … "
    return text[: (most - len(cut)) // 2] + cut + text[len(text) - (most - len(cut) + 1) // 2 :]


def project_secrets() -> set[str]:
    """Return the secrets of all connections that can be resolved."""
    secrets: set[str] = set()
    with suppress(WeftError):
        project = current()
        for each in project.describe_connections():
            with suppress(WeftError):
                secrets |= project.connection(each.name).secrets()
    return secrets
