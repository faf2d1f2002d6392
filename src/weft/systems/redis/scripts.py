"""The Lua scripts that run inside the server, each as one atomic step."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from weft.systems.redis.client import Client

# A script is its file after the one that all share; one that is long is several, in this order.
_PARTS = {"lease": ("arguments", "find", "take", "lease")}


@cache
def source(name: str) -> tuple[str, str]:
    """Return the text of a script, and the digest by which a server that has it knows it."""
    parts = [f"{name}/{part}" for part in _PARTS[name]] if name in _PARTS else [name]
    folder = files("weft.systems.redis") / "lua"
    text = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", *parts))
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def run(client: Client, name: str, keys: list[str], *arguments: Any) -> Any:
    """Run a script; its text is sent once."""
    text, digest = source(name)
    try:
        return client.evalsha(digest, len(keys), *keys, *arguments)
    except NoScriptError:
        return client.eval(text, len(keys), *keys, *arguments)
