"""Events as the commands print them: a readable line each, or NDJSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import click

from weft.cli.common import escaped, one_line
from weft.streams.events import in_json
from weft.systems.log import ROWID
from weft.types import to_json

# On a terminal a longer value is cut, so that the next events are in sight.
_SHOWN_CHARACTERS = 200
_PLAIN = re.compile(r"[^\s\"'=]+")


def print_events(events: Iterable[Mapping[str, Any]], output: str) -> None:
    """Print events, all in one write."""
    show = to_ndjson if output == "json" else _readable
    lines = [show(event) for event in events]
    if lines:
        click.echo("\n".join(lines))


def to_ndjson(event: Mapping[str, Any]) -> str:
    """Return an event as one line of JSON. Unicode's line separators are escaped: some readers split lines at them."""
    shown = in_json({**event}) if ROWID in event else event
    return escaped(json.dumps(shown, ensure_ascii=False, default=to_json))


def as_text(value: object) -> str:
    """Return a value of an event as text: strings as they are, other values as in JSON but without quotes."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False, default=to_json)
    return text if isinstance(value, dict | list) else text.strip('"')


def _readable(event: Mapping[str, Any]) -> str:
    """`42  2026-01-31 12:00:00Z  user_id=u_123 action="a click"`; what is null is left out."""
    published = event["_weft_published_at"]
    assert isinstance(published, datetime)
    parts = [
        click.style(str(event["_weft_rowid"]).rjust(6), fg="cyan"),
        click.style(f"{published:%Y-%m-%d %H:%M:%S}Z", dim=True),
        *(
            f"{click.style(one_line(name) + '=', dim=True)}{_shown(value)}"
            for name, value in event.items()
            if value is not None and not name.startswith("_weft_")
        ),
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    text, used = parts[0], 6
    for part in parts[1:]:
        size = len(click.unstyle(part))
        # Rather a new line than a value that the terminal breaks in two.
        fits = used + 2 + size <= width or used == 8
        text, used = (f"{text}  {part}", used + 2 + size) if fits else (f"{text}\n        {part}", 8 + size)
    return text


def _shown(value: object) -> str:
    text = as_text(value)
    if len(text) > _SHOWN_CHARACTERS and sys.stdout.isatty():
        text = f"{text[:_SHOWN_CHARACTERS]}… ({len(text):,} characters)"
    elif isinstance(value, str) and not _PLAIN.fullmatch(text):
        text = json.dumps(text, ensure_ascii=False)
    return one_line(text)
