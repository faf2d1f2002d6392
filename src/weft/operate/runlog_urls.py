"""The URLs of run logs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from weft import settings
from weft.errors import NotFoundError, SettingsError, nearest
from weft.operate.runlog_objects import RunObjects
from weft.operate.runlog_tables import schemes
from weft.project import build_connection, current
from weft.systems.base import Connection, system_for_url, url_scheme
from weft.systems.file_connection import MEMORY
from weft.systems.object_stores.opening import SCHEMES, is_object_store, open_objects

DEFAULT_FILE = ".weft/runs.db"
_EXAMPLES = "sqlite://runs.db, postgres://user:${PASSWORD}@host/database, s3://bucket/prefix or memory://."


def parse(url: str | None, root: Path) -> tuple[Connection | RunObjects, bool]:
    """Return the connection or object store that a run log's URL or name leads to, and whether tables may be made."""
    if url is None:
        return build_connection(None, {"kind": "sqlite", "path": str(root / DEFAULT_FILE)}, "The run log"), True
    if not isinstance(url, str) or not url.strip():
        raise SettingsError("A run log needs a URL or the name of a connection.", hint=f"For example {_EXAMPLES}")
    if url_scheme(url) is None and settings.has_references(url):
        url = settings.interpolate(url, "the URL of the run log")
    url, create = _without_create_tables(url)
    scheme = url_scheme(url)
    if scheme is None:
        return current().connection(url), create
    if is_object_store(scheme):
        return RunObjects(open_objects(settings.interpolate(url, "the URL of the run log"))), create
    known = [*schemes(), *SCHEMES, "memory"]
    if scheme not in known:
        close = nearest(scheme, known)
        hint = f"Did you mean {close}://? " if close else ""
        raise NotFoundError(f"There is no run log at {scheme}://.", hint=f"{hint}For example {_EXAMPLES}")
    if scheme == "memory":
        if url.partition("://")[2].strip("/"):
            raise SettingsError("A run log in memory has no path.", hint="Write memory://.")
        return in_memory(), create
    if system_for_url(url).load_connection().one_host:
        return _file(scheme, url, root), create
    return build_connection(None, {"url": url}, "The run log"), create


def _without_create_tables(url: str) -> tuple[str, bool]:
    """Return the URL without that parameter, and its value."""
    base, question, query = url.partition("?")
    create, rest = True, []
    for pair in query.split("&") if question else ():
        name, _, value = pair.partition("=")
        if name == "create_tables":
            if value.lower() not in ("true", "false"):
                raise SettingsError("create_tables of a run log is true or false.", hint="Write ?create_tables=false.")
            create = value.lower() == "true"
        else:
            rest.append(pair)
    return (f"{base}?{'&'.join(rest)}" if rest else base), create


def _file(scheme: str, url: str, root: Path) -> Connection:
    """Return the connection of `sqlite://runs.db`, or of a URL with three or four slashes as every connection's."""
    text = settings.interpolate(url.partition("://")[2], "the URL of the run log")
    if "?" in text:
        raise SettingsError(f"A run log at {scheme}:// has no parameter but create_tables.")
    path = unquote(text)
    if path.startswith("/"):
        first = path[1:].partition("/")[0]
        if first and Path("/", first).is_dir() and not (root / first).exists():
            # With a log in each folder, each host would run everything.
            raise SettingsError(
                f"{scheme}:///{first}/… is a path in the project's folder, and looks like an absolute one.",
                hint=f"An absolute path has four slashes: {scheme}:////{first}/…",
            )
        path = path[1:]
    if not path or path == MEMORY:
        raise SettingsError(f"A run log at {scheme}:// needs a file.", hint=f"For example {_EXAMPLES}")
    return system_for_url(url).load_connection().from_fields({"path": str(root / path)}, name=None)


def in_memory() -> Connection:
    return build_connection(None, {"kind": "sqlite", "path": MEMORY}, "The run log")
