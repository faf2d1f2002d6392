"""The parameters behind the `?` of a connection's URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_plus

from weft.errors import SettingsError, did_you_mean


def url_parameters(
    query: str, known: Mapping[str, Callable[[str], Any]], malformed: Callable[[str, str | None], SettingsError]
) -> dict[str, Any]:
    """Return the parameters behind the `?` of a URL, each read by its function. Raise for an unknown name."""
    parameters: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        name, _, text = pair.partition("=")
        if name not in known:
            if "@" in query:
                # Not quoted: it may well be the end of a password.
                raise malformed(
                    "has an unknown parameter",
                    "A ? in a user or password must be percent-encoded: %3F for ?, %40 for @.",
                )
            hint = did_you_mean(name, known, f"Known parameters: {', '.join(known)}.")
            raise malformed(f"has an unknown parameter {name!r}", hint)
        try:
            parameters[name] = known[name](unquote_plus(text))
        except ValueError:
            raise malformed(f"has an invalid value of {name!r}", None) from None
    return parameters


def flag(text: str) -> bool:
    """Read a parameter that is on or off."""
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise ValueError("must be true or false")
    return text.lower() in ("true", "1", "yes")
