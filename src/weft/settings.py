"""Configuration files, `${VAR}` references, and keeping secrets out of what people read.

Two files are read: `weft.toml` (or `.weft.toml`) in the project's folder, and `~/.weft/connections.toml` for what a
user has everywhere.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from weft.errors import SettingsError, did_you_mean

PROJECT_FILE = "weft.toml"
_HIDDEN_PROJECT_FILE = ".weft.toml"
USER_FILE = "~/.weft/connections.toml"
HIDDEN = "***"
_SHORT = 2

_PROJECT_KEYS = (
    "modules",
    "models",
    "connections",
    "spark",
    "engine",
    "run_log",
    "on_run_log_failure",
    "alerters",
    "alerts",
    "metrics",
    "traces",
    "pools",
    "server",
)
_ALERT_LIMITS = ("restarts", "lag", "dead_letters")
_USER_KEYS = ("connections",)


# Files


def project_file(folder: Path) -> Path:
    """Return where the settings of the project in `folder` are kept: `weft.toml`, or `.weft.toml` if that is there."""
    file, hidden = folder / PROJECT_FILE, folder / _HIDDEN_PROJECT_FILE
    if not hidden.exists():
        return file
    if file.exists():
        raise SettingsError(
            f"Both {PROJECT_FILE} and {_HIDDEN_PROJECT_FILE} are in {folder}, and only one is read.",
            hint=f"Move what is in {_HIDDEN_PROJECT_FILE} to {PROJECT_FILE}, and remove it.",
        )
    return hidden


def user_file() -> Path:
    """Return where the user's own connections are kept."""
    return Path(USER_FILE).expanduser()


def read_project_file(folder: Path) -> dict[str, Any]:
    """Return the contents of `weft.toml` in `folder`; empty when there is none."""
    file = project_file(folder)
    settings = _read(file, file.name, _PROJECT_KEYS)
    modules = settings.get("modules", [])
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise SettingsError(
            f"{PROJECT_FILE}: modules must be a list of module names.", hint='For example modules = ["my_streams"].'
        )
    models = settings.get("models", [])
    if not isinstance(models, list) or not all(isinstance(folder, str) for folder in models):
        raise SettingsError(
            f"{PROJECT_FILE}: models must be a list of folders with .sql files.",
            hint='For example models = ["models"].',
        )
    if not isinstance(settings.get("run_log", ""), str):
        raise SettingsError(f"{PROJECT_FILE}: run_log must be a URL or a connection's name.")
    if settings.get("on_run_log_failure", "warn") not in ("warn", "fail"):
        raise SettingsError(f"{PROJECT_FILE}: on_run_log_failure is 'warn' or 'fail'.")
    if not isinstance(settings.get("metrics", ""), str):
        raise SettingsError(f"{PROJECT_FILE}: metrics must be a URL.", hint='metrics = "prometheus://:9100"')
    if not isinstance(settings.get("traces", ""), str):
        raise SettingsError(f"{PROJECT_FILE}: traces must be a URL.", hint='traces = "otlp://collector:4318"')
    pools = settings.get("pools", {})
    if not isinstance(pools, dict) or not all(type(size) is int and size > 0 for size in pools.values()):
        raise SettingsError(f"{PROJECT_FILE}: pools must be a table of names and sizes.", hint="[pools]\nwarehouse = 2")
    alerters = settings.get("alerters", [])
    if not isinstance(alerters, list) or not all(isinstance(url, str) for url in alerters):
        raise SettingsError(f"{PROJECT_FILE}: alerters must be a list of URLs.", hint='alerters = ["stdout://"]')
    _check_alerts(settings.get("alerts", {}))
    if not isinstance(settings.get("server", {}), dict):
        raise SettingsError(f"{PROJECT_FILE}: server must be a table.", hint="Write [server] and its settings below.")
    return settings


def _check_alerts(alerts: Any) -> None:
    hint = "[alerts]\nrestarts = 3\nlag = 100000\n[alerts.pipelines.NAME]\ndead_letters = 50"
    own = alerts.get("pipelines", {}) if isinstance(alerts, dict) else None
    if not isinstance(own, dict) or not all(isinstance(each, dict) for each in own.values()):
        raise SettingsError(f"{PROJECT_FILE}: alerts must be a table.", hint=hint)
    limits = {key: value for key, value in alerts.items() if key != "pipelines"}
    for where, table in (("alerts", limits), *((f"alerts.pipelines.{name}", each) for name, each in own.items())):
        for key, value in table.items():
            if key not in _ALERT_LIMITS:
                close = did_you_mean(key, _ALERT_LIMITS, f"Known keys: {', '.join(_ALERT_LIMITS)}.")
                raise SettingsError(f"{PROJECT_FILE}: unknown key {key!r} in {where}.", hint=close)
            if type(value) is not int or value < 1:
                raise SettingsError(f"{PROJECT_FILE}: {key} in {where} is a whole number of at least 1.", hint=hint)


def read_user_file() -> dict[str, Any]:
    """Return the contents of `~/.weft/connections.toml`; empty when there is none."""
    return _read(user_file(), USER_FILE, _USER_KEYS)


# A connection is looked up on many calls: parse a file again only when it changed.
_parsed: dict[Path, tuple[tuple[int, int, int], dict[str, Any]]] = {}


def _read(path: Path, shown: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    try:
        status = path.stat()
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = _parsed.get(path)
        if known is not None and known[0] == version:
            return known[1]
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SettingsError(f"{shown} cannot be read: {error.strerror}.", hint=f"The file is {path}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{shown} is not UTF-8 text.", hint=f"The file is {path}.") from None
    settings = parse_toml(text, shown)
    for key in settings:
        if key not in allowed:
            hint = did_you_mean(key, allowed, f"Known keys: {', '.join(allowed)}.")
            raise SettingsError(f"{shown}: unknown key {key!r}.", hint=hint)
    connections = settings.get("connections", {})
    if not isinstance(connections, dict):
        raise SettingsError(f"{shown}: connections must be tables.", hint="Write [connections.NAME] and url = … below.")
    for name, fields in connections.items():
        if not isinstance(fields, dict):
            # The value is not shown: it may well be a DSN with a password.
            raise SettingsError(
                f"{shown}: connections.{name} must be a table.",
                hint=f"Write [connections.{name}] and url = … below it.",
            )
    _parsed[path] = (version, settings)
    return settings


def parse_toml(text: str, shown: str) -> dict[str, Any]:
    """Parse TOML; an error names the file and the line but quotes nothing of it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{shown} is not valid TOML: {error}.", hint="Correct the file at that line.") from None


def write_connection(path: Path, name: str, url: str) -> object:
    """Set `[connections.NAME]` in the file to `url`, leaving everything else in it as it is, comments included.

    The file is replaced in one step, so that a reader or a crash never sees half of it. Gives what was there before.
    """
    path, before, wanted = _to_edit(path)
    present = wanted["connections"].get(name)
    wanted["connections"][name] = {"url": url}
    _replace_if(
        path,
        _with_connection(before, name, url),
        wanted,
        hint=f"Set {_toml_key(name)} by hand, as a table [connections.{_toml_key(name)}] with url = … below it.",
    )
    return present


def remove_connection(path: Path, name: str) -> bool:
    """Take `[connections.NAME]` out of the file, leaving everything else in it as it is. Says whether it was there."""
    path, before, wanted = _to_edit(path)
    if wanted["connections"].pop(name, None) is None:
        return False
    _replace_if(path, _without_connection(before, name), wanted, hint=f"Remove {_toml_key(name)} by hand.")
    return True


def _to_edit(path: Path) -> tuple[Path, str, dict[str, Any]]:
    path = Path(os.path.realpath(path))  # a link to the file stays a link
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        text = ""
    parsed = parse_toml(text, path.name)
    parsed.setdefault("connections", {})
    if not isinstance(parsed["connections"], dict):
        raise SettingsError(f"{path.name}: connections must be tables.")
    return path, text, parsed


def _replace_if(path: Path, after: str, wanted: dict[str, Any], hint: str) -> None:
    """Write the file if it then says what is wanted."""
    try:
        correct = {"connections": {}, **tomllib.loads(after)} == wanted
    except tomllib.TOMLDecodeError:
        correct = False
    if not correct:
        raise SettingsError(f"{path.name} defines its connections in a way that cannot be edited safely.", hint=hint)
    _replace_file(path, after)


def _with_connection(text: str, name: str, url: str) -> str:
    """`text` with the table of the connection rewritten, or added at the end. The caller checks the result."""
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    setting = f"url = {json.dumps(url, ensure_ascii=False)}"
    start, end = _table(lines, name)
    if start is None:
        gap = newline if text and not text.endswith("\n") else ""
        blank = newline if text.strip() else ""
        return f"{text}{gap}{blank}[connections.{_toml_key(name)}]{newline}{setting}{newline}"
    body, comment = [], ""
    for line in lines[start + 1 : end]:
        if not line.strip() or line.lstrip().startswith("#"):
            body.append(line)
        elif remark := re.fullmatch(r"""\s*url\s*=\s*(?:"(?:[^"\\]|\\.)*"|'[^']*')(\s*#.*?)\s*""", line):
            comment = remark[1]
    if not lines[start].endswith("\n"):
        lines[start] += newline
    return "".join([*lines[: start + 1], setting, comment, newline, *body, *lines[end:]])


def _without_connection(text: str, name: str) -> str:
    """`text` without the table of the connection. Comments below its last key belong to what follows."""
    lines = text.splitlines(keepends=True)
    start, end = _table(lines, name)
    if start is None:
        return text
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    before, after = lines[:start], lines[end:]
    # One blank line between what is left is enough.
    while after and not after[0].strip() and (not before or not before[-1].strip()):
        del after[0]
    while not after and before and not before[-1].strip():
        del before[-1]
    return "".join([*before, *after])


def _table(lines: list[str], name: str) -> tuple[int | None, int]:
    """Return the line of the connection's header, and the one after its table."""
    headers = [index for index, line in enumerate(lines) if line.lstrip().startswith("[")]
    start = next((index for index in headers if _header_is(lines[index], name)), None)
    return start, next((index for index in headers if start is not None and index > start), len(lines))


def _header_is(line: str, name: str) -> bool:
    try:
        return tomllib.loads(line) == {"connections": {name: {}}}
    except tomllib.TOMLDecodeError:
        return False


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _replace_file(path: Path, text: str) -> None:
    """Write the file; it keeps its mode. A new one is as every new file, but the user's own for its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    is_private = path == Path(os.path.realpath(user_file()))
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666)
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            with suppress(FileNotFoundError):
                os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# References

_REFERENCE = re.compile(r"\$(\$\{)|\$\{([^}]*)(\}?)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def has_references(text: str) -> bool:
    """Return whether `text` holds a `${VAR}` (or the start of one) that is substituted at use."""
    return any(not match[1] for match in _REFERENCE.finditer(text))


def interpolate(text: str, where: str) -> str:
    """Put the environment's values in the place of each `${VAR}`; `$${` stands for a literal `${`.

    `where` says in an error whose text it is. Values are not searched for references again. A value that stands for a
    user or a password in a URL is percent-encoded, so that any will do.
    """
    user_begins, user_ends = _user_part(text)

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "${"
        name = match[2]
        if not match[3] or not _VARIABLE.fullmatch(name):
            raise SettingsError(
                f"A ${{…}} reference is malformed in {where}.",
                hint="Write ${NAME} with letters, digits and underscores, or $${ for the two characters themselves.",
            )
        if name not in os.environ:
            raise SettingsError(
                f"The environment variable {name} is not set, and {where} needs it.",
                hint=f"Set it with export {name}=…",
            )
        if user_begins <= match.start() < user_ends:
            # The only reference, and all there is before the "@": it may hold both, as user:password.
            return quote(os.environ[name], safe=":" if match.span() == (user_begins, user_ends) else "")
        return os.environ[name]

    return _REFERENCE.sub(value, text)


def _user_part(url: str) -> tuple[int, int]:
    """Where user and password begin and end, in a URL whose scheme and whose "@" are written out; else nowhere."""
    parts = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://(?P<user>[^/?#]*)@", url)
    return parts.span("user") if parts else (0, 0)


# Secrets

_SECRET_NAME = re.compile(r"pas+w|pwd|passphrase|secret|token|(api|access|private)_?key|credential|signature", re.I)
_PARAMETER = re.compile(r"([^&=?]+)=([^&]*)")
_KEYWORD = re.compile(r"(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|\S+)")


def is_secret_name(name: str) -> bool:
    """Return whether a field or parameter of this name usually carries a secret."""
    return _SECRET_NAME.search(name) is not None


def redact_url(url: str, *, keep_references: bool = True) -> str:
    """`url` with its password and its secret parameters as `***`, fit to show to a person.

    A secret that is written as a `${VAR}` reference stays: it says where the value comes from, not what it is.
    """
    shown, end = [], 0
    for start, stop in sorted(_secret_spans(url)):
        if keep_references and re.fullmatch(r"\$\{[^}]*\}", url[start:stop]):
            continue
        if start >= end:
            shown += [url[end:start], HIDDEN]
        end = max(end, stop)
    return "".join([*shown, url[end:]])


def url_secrets(url: str) -> set[str]:
    """Return the secret values in `url`, each as it is written and percent-decoded.

    A driver that reads an unescaped password differently may quote only a part of it, so parts count as well: short
    ones where they are quoted, and what is left of the password together with the host.
    """
    secrets: set[str] = set()
    for start, stop in _secret_spans(url):
        secret = url[start:stop]
        secrets |= {secret, unquote(secret)}
        parts = re.split("[@/?#:,]", secret)
        for part in filter(None, parts):
            secrets |= {part} if len(part) > _SHORT else {f"'{part}'", f'"{part}"'}
        for piece in re.split("[/?#:,]", url[start:]) if len(parts) > 1 else ():
            while "@" in piece:
                secrets.add(piece)
                piece = piece.partition("@")[2]
    return secrets


def _secret_spans(url: str) -> Iterator[tuple[int, int]]:
    """Where the secrets are in `url`; spans may overlap. In an ambiguous URL too much is secret, not too little."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url)
    start = scheme.end() if scheme else 0
    # A password may hold an unescaped "/", "?", "#" or "@" by mistake: take everything up to the last "@" for it.
    at = url.rfind("@", start)
    colon = url.find(":", start, max(at, start))
    if 0 <= colon < at - 1 and "/" not in url[start:colon]:
        yield colon + 1, at
    # Without a scheme it may be a text of keywords, as libpq takes: host=localhost password=…
    for pattern in (_PARAMETER,) if scheme else (_PARAMETER, _KEYWORD):
        for parameter in pattern.finditer(url, start):
            if is_secret_name(parameter[1]) and parameter[2]:
                yield parameter.span(2)


def redact(text: str, secrets: Iterable[str]) -> str:
    """`text`, which came from a driver, without any of `secrets`, however they are quoted in it."""
    spellings: tuple[Callable[[str], str], ...] = (
        str,
        lambda secret: quote(secret, safe=""),
        quote,
        quote_plus,
        lambda secret: repr(secret)[1:-1],
    )
    forms = {spell(secret) for secret in secrets if secret for spell in spellings}
    # The longest first, so that a secret that is part of another leaves no remainder of it.
    for form in sorted(forms, key=len, reverse=True):
        if len(form) == 1:  # it is in many words: only in quotes, or where a URL or a setting has a value
            text = re.sub(rf"(?<=['\":=]){re.escape(form)}(?=['\"@&;,\s]|$)", HIDDEN, text)
        elif form.isalnum() and len(form) <= _SHORT:  # a part of many words
            text = re.sub(rf"(?<!\w){form}(?!\w)", HIDDEN, text)
        else:
            text = text.replace(form, HIDDEN)
    return text
