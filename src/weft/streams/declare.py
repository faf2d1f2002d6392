"""`@stream`: what a stream is, checked where it is declared."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_overloads, overload

from weft.errors import DeclarationError, did_you_mean
from weft.options import look_like, refuse_unknown
from weft.project import current
from weft.settings import redact_url
from weft.systems.base import Connection
from weft.systems.log import DEAD_LETTER_SUFFIX, QUARANTINE_SUFFIX, RESERVED_PREFIX
from weft.types import FieldType, comparable

Drift = Literal["evolve", "reject", "quarantine"]

CATALOGUE_SCHEMA = "weft"
# PostgreSQL cuts names at 63 bytes; the longest suffix and a sequence's name must still fit.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,46}")
_FIELD = re.compile(r"[^\W\d][\w .@#$:/-]*")
# PostgreSQL has these in every table.
_SYSTEM_COLUMNS = frozenset({"tableoid", "ctid", "xmin", "xmax", "cmin", "cmax"})
_DEFAULT_HORIZON_DAYS = 30.0
# No key of an event makes a table wider than this: databases limit the columns of a row.
MAX_NEW_COLUMNS = 100
_KEPT_AS_DECLARED = (
    "schema",
    "connection",
    "cursor",
    "description",
    "owner",
    "validate_schema",
    "on_schema_drift",
    "max_new_columns",
    "max_deliveries",
)
_SLOWEST = 0.001


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """A declared stream. `publish`, `consume` and the others take it in place of its name."""

    name: str
    schema: str = "events"
    connection: str | Connection | None = None
    cursor: str = "rowid"
    fields: Mapping[str, FieldType] = field(default_factory=dict)
    description: str | None = None
    tags: tuple[str, ...] = ()
    owner: str | None = None
    auth: Mapping[str, Any] | None = field(default=None, repr=False)
    rate_limit: Mapping[str, float] | None = None
    validate_schema: bool = False
    max_age_days: float | None = None
    max_rows: int | None = None
    key_fields: tuple[str, ...] = ()
    key_horizon_days: float = _DEFAULT_HORIZON_DAYS
    on_schema_drift: Drift = "evolve"
    max_new_columns: int = MAX_NEW_COLUMNS
    max_deliveries: int | None = None
    dead_letter: str | None = None

    @property
    def retention(self) -> dict[str, float]:
        """The retention policy as it was declared."""
        policy = {"max_age_days": self.max_age_days, "max_rows": self.max_rows}
        return {key: value for key, value in policy.items() if value is not None}

    @functools.cached_property
    def quarantine(self) -> Stream:
        """The stream of events that do not fit, when `on_schema_drift` is `quarantine`."""
        return Stream(
            name=self.name + QUARANTINE_SUFFIX,
            schema=self.schema,
            connection=self.connection,
            fields=_QUARANTINE_FIELDS,
            description=f"Events that did not fit {self.name}",
        )

    @functools.cached_property
    def dead_letters(self) -> Stream:
        """The stream of events that were delivered `max_deliveries` times. By its key, a retry stores none twice."""
        return Stream(
            name=self.dead_letter or self.name + DEAD_LETTER_SUFFIX,
            schema=self.schema,
            connection=self.connection,
            fields=LETTER_FIELDS,
            description=f"Events of {self.name} that no consumer could process",
            key_fields=("delivery",),
        )


_QUARANTINE_FIELDS = {
    "event": FieldType("json"),
    "field": FieldType("string"),
    "reason": FieldType("string"),
}
LETTER_FIELDS = {
    "stream": FieldType("string"),
    "consumer": FieldType("string"),
    "rowid": FieldType("int64"),
    "published_at": FieldType("timestamp"),
    "deliveries": FieldType("int32"),
    "reason": FieldType("string"),
    "event": FieldType("json"),
    "delivery": FieldType("string"),
}


# A type checker reads the overloads. The second also gives what runs the options and their defaults.
@overload
def stream(name: Callable[..., Any], /) -> Stream: ...
@overload
def stream(
    name: str | None = None,
    *,
    schema: str = "events",
    connection: str | Connection | None = None,
    cursor: str = "rowid",
    fields: Mapping[str, str] | None = None,
    description: str | None = None,
    tags: Sequence[str] = (),
    owner: str | None = None,
    auth: Mapping[str, str | Sequence[str]] | None = None,
    rate_limit: Mapping[str, float] | None = None,
    validate_schema: bool = False,
    retention: Mapping[str, float] | None = None,
    idempotency_key: str | Sequence[str] | Mapping[str, Any] | None = None,
    on_schema_drift: Drift = "evolve",
    max_new_columns: int = MAX_NEW_COLUMNS,
    max_deliveries: int | None = None,
    dead_letter: str | bool | None = None,
) -> Callable[[Callable[..., Any]], Stream]: ...
def stream(name: str | Callable[..., Any] | None = None, **options: Any) -> Any:
    """Declare a stream. The decorated function is never called; it gives the stream its name.

        @stream(name="user_events", fields={"user_id": "string", "action": "string"})
        def user_events():
            pass

    `fields` maps names to types (`string`, `bool`, `int32`, `int64`, `float32`, `float64`, `decimal(p,s)`, `date`,
    `timestamp`, `json`, `bytes`, `uuid`; a trailing `?` makes a field optional under `validate_schema`). `retention`
    takes `max_age_days`, `max_rows` or both. `idempotency_key` is a field, a list of fields, or `{"fields": […],
    "horizon_days": 30}`. `max_new_columns` limits the columns that undeclared keys add. `max_deliveries` moves an event
    that was delivered so often to the stream `dead_letter` (`<name>__dead_letter` unless named).
    """
    if callable(name) and not isinstance(name, str):  # @stream without parentheses
        return stream()(name)
    refuse_unknown(options, ("name", *_DEFAULTS), "@stream")

    def declare(function: Callable[..., Any]) -> Stream:
        if not callable(function):
            raise DeclarationError(f"@stream decorates a function, not a {type(function).__name__}.")
        declared = _make_stream(function.__name__ if name is None else name, {**_DEFAULTS, **options})
        look_like(declared, function)
        register(declared, f"{function.__module__}.{function.__qualname__}")
        return declared

    return declare


_signature = inspect.signature(get_overloads(stream)[1])
_DEFAULTS = {name: each.default for name, each in _signature.parameters.items() if name != "name"}
stream.__signature__ = _signature  # type: ignore[attr-defined]


def register(declared: Stream, origin: str) -> None:
    """Add a stream to the project. Its function may declare it again (a reloaded module, a notebook's cell)."""
    streams = current().streams
    present = streams.get(declared.name)
    known = getattr(present, "origin", None)
    if present is not None and known != origin:
        raise DeclarationError(
            f"Stream {declared.name!r} is declared twice: by {known} and by {origin}.",
            hint="Give one of them another name.",
        )
    for other in streams.values():
        if other is not present and _place(other) == _place(declared):
            raise DeclarationError(
                f"Streams {other.name!r} and {declared.name!r} differ in case only.",
                hint="To some databases they are one table: give one of them another name.",
            )
    object.__setattr__(declared, "origin", origin)
    streams[declared.name] = declared
    current().declarations += 1


def _place(declared: Stream) -> tuple[object, ...]:
    return declared.connection, declared.schema.lower(), declared.name.lower()


def _make_stream(name: str, options: Mapping[str, Any]) -> Stream:
    """Return a stream of options, each checked; errors name the option."""
    where = f"Stream {name!r}"
    _check_name(name, "name", where)
    _check_name(options["schema"], "schema", where)
    if options["schema"].lower() == CATALOGUE_SCHEMA:
        raise DeclarationError(
            f"{where}: the schema {CATALOGUE_SCHEMA!r} holds Weft's own tables; choose another schema."
        )
    _check_lengths(name, options, where)
    connection = options["connection"]
    if connection is not None and not isinstance(connection, (str, Connection)):
        raise DeclarationError(f"{where}: connection must be a name or a connection, not {type(connection).__name__}.")
    if isinstance(connection, str) and "://" in connection:
        raise DeclarationError(
            f"{where}: connection is the URL {redact_url(connection)!r}, where a name is needed.",
            hint="Pass weft.connect(url=…) instead.",
        )
    for option in ("description", "owner"):
        if options[option] is not None and not isinstance(options[option], str):
            raise DeclarationError(f"{where}: {option} must be a string.")
    tags = options["tags"] if options["tags"] is not None else ()
    if not isinstance(tags, (list, tuple, set, frozenset)) or not all(isinstance(tag, str) for tag in tags):
        raise DeclarationError(f"{where}: tags must be a list of strings.")
    if not isinstance(options["validate_schema"], bool):
        raise DeclarationError(f"{where}: validate_schema must be True or False.")
    fields = _fields(options["fields"], where)
    if options["validate_schema"] and not fields:
        raise DeclarationError(
            f"{where}: validate_schema needs fields to validate against.", hint='Add fields={"id": "int64", …}.'
        )
    drift = options["on_schema_drift"]
    if drift not in ("evolve", "reject", "quarantine"):
        raise DeclarationError(f"{where}: on_schema_drift is {drift!r}; it can be 'evolve', 'reject' or 'quarantine'.")
    most = options["max_new_columns"]
    if type(most) is not int or not 0 <= most <= MAX_NEW_COLUMNS:
        raise DeclarationError(
            f"{where}: max_new_columns must be a whole number from 0 to {MAX_NEW_COLUMNS}, not {most!r}."
        )
    retention = _options(options["retention"], "retention", where, {"max_age_days": float, "max_rows": int})
    if options["retention"] is not None and not retention:
        raise DeclarationError(f"{where}: retention needs max_age_days, max_rows or both.")
    key_fields, horizon = _idempotency(options["idempotency_key"], fields, where)
    if options["cursor"] != "rowid":
        raise DeclarationError(
            f"{where}: cursor is {options['cursor']!r}; consumers read by the offset, which is called 'rowid'.",
            hint="For a pipeline that reads the stream's table by another column, say incremental_column there.",
        )
    max_deliveries, dead_letter = options["max_deliveries"], options["dead_letter"]
    if max_deliveries is not None and (type(max_deliveries) is not int or max_deliveries < 1):
        raise DeclarationError(f"{where}: max_deliveries must be a whole number of at least 1, not {max_deliveries!r}.")
    if dead_letter is not None and not isinstance(dead_letter, bool):
        _check_name(dead_letter, "dead_letter", where)
        if dead_letter.lower() == name.lower():
            raise DeclarationError(f"{where}: a stream cannot be its own dead_letter.")
    if dead_letter and max_deliveries is None:
        raise DeclarationError(f"{where}: dead_letter needs max_deliveries.", hint="For example max_deliveries=5.")
    if dead_letter is False and max_deliveries is not None:
        raise DeclarationError(f"{where}: max_deliveries needs a dead_letter stream; events are never thrown away.")
    return Stream(
        name=name,
        **{option: options[option] for option in _KEPT_AS_DECLARED},
        **retention,
        fields=MappingProxyType(fields),
        tags=tuple(tags),
        auth=_auth(options["auth"], where),
        rate_limit=_rate_limit(options["rate_limit"], where),
        key_fields=key_fields,
        key_horizon_days=horizon,
        dead_letter=dead_letter if isinstance(dead_letter, str) else None,
    )


def _check_name(name: object, option: str, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DeclarationError(
            f"{where}: {option} is {name!r}; a name has up to 47 letters, digits, _ and -, and no digit first."
        )


def _check_lengths(name: str, options: Mapping[str, Any], where: str) -> None:
    """MySQL's table is called `schema.name`, in 64 characters; what a stream brings along must fit as well."""
    longest = name
    if options["on_schema_drift"] == "quarantine":
        longest = name + QUARANTINE_SUFFIX
    if options["max_deliveries"] is not None:
        dead_letter = options["dead_letter"]
        other = dead_letter if isinstance(dead_letter, str) else name + DEAD_LETTER_SUFFIX
        longest = max(longest, other, key=len)
    full = f"{options['schema']}.{longest}"
    if len(full) > 64:
        raise DeclarationError(
            f"{where}: {full!r} has {len(full)} characters; tables have names of up to 64.",
            hint="Give the stream or its schema a shorter name.",
        )


def can_be_column(name: str) -> bool:
    """Return whether every database takes this as the name of a column."""
    return (
        bool(_FIELD.fullmatch(name))
        and len(name.encode()) <= 63
        and not name.endswith(" ")
        and name.lower() not in _SYSTEM_COLUMNS
        and all(ord(c) < 0x10000 for c in name)
    )


def _fields(declared: object, where: str) -> dict[str, FieldType]:
    if declared is None:
        return {}
    if not isinstance(declared, Mapping):
        raise DeclarationError(f"{where}: fields must be a dict of names to types, not {type(declared).__name__}.")
    fields: dict[str, FieldType] = {}
    seen: dict[str, str] = {}
    for name, kind in declared.items():
        if not isinstance(name, str) or not can_be_column(name):
            raise DeclarationError(
                f"{where}: {name!r} cannot be the name of a field: "
                "it may have up to 63 bytes of letters, digits, _ and ' .@#$:/-', begins with a letter or _, "
                f"and is none of {', '.join(sorted(_SYSTEM_COLUMNS))}."
            )
        if name.lower().startswith(RESERVED_PREFIX):
            raise DeclarationError(f"{where}: field {name!r}: names that begin with {RESERVED_PREFIX} belong to Weft.")
        same = seen.setdefault(comparable(name), name)
        if same != name:
            raise DeclarationError(f"{where}: fields {same!r} and {name!r} are the same column to some databases.")
        try:
            fields[name] = FieldType.parse(kind, field=name)
        except DeclarationError as error:
            raise DeclarationError(f"{where}: {error.what}", hint=error.hint) from None
    return fields


def _options(options: object, option: str, where: str, known: Mapping[str, type]) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise DeclarationError(f"{where}: {option} must be a dict, not {type(options).__name__}.")
    refuse_unknown(options, known, f"{where}: {option}")
    for key, value in options.items():
        kind = known[key]
        number = kind in (int, float)
        fits = type(value) in ((int, float) if kind is float else (kind,))
        # Databases count in microseconds from 1970: more days than these would leave their years.
        most = 100_000 if str(key).endswith("_days") else 10**15
        if not fits or (number and not 0 < value <= most) or (kind is str and not value):
            wanted = {int: "a positive whole number", float: "a positive number", str: "a non-empty string"}[kind]
            wanted += f" of at most {most:,}" if number else ""
            raise DeclarationError(f"{where}: {option}[{key!r}] must be {wanted}.")
    return dict(options)


_AUTH = {"bearer": ("token",), "api_key": ("header", "key"), "hmac": ("secret",)}
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _auth(declared: object, where: str) -> dict[str, Any] | None:
    """No value is shown: it may be the secret itself."""
    if declared is None:
        return None
    kinds = ", ".join(map(repr, _AUTH))
    if not isinstance(declared, Mapping) or "type" not in declared:
        raise DeclarationError(
            f"{where}: auth needs a type: {kinds}.", hint='For example auth={"type": "bearer", "token": "${TOKEN}"}.'
        )
    kind = declared["type"]
    if kind not in tuple(_AUTH):
        hint = did_you_mean(str(kind), _AUTH)
        raise DeclarationError(f"{where}: auth has a type that is not known; there are {kinds}.", hint=hint)
    options = dict(declared)
    secrets = options.get("secret")
    if kind == "hmac" and isinstance(secrets, (list, tuple)):
        if not secrets or not all(isinstance(secret, str) and secret for secret in secrets):
            raise DeclarationError(f"{where}: auth['secret'] must be a non-empty string, or a list of such.")
        options["secret"] = secrets[0]
    checked = _options(options, "auth", where, dict.fromkeys(("type", *_AUTH[kind]), str))
    if kind == "api_key" and not _HEADER.fullmatch(checked.setdefault("header", "X-API-Key")):
        raise DeclarationError(f"{where}: auth['header'] cannot be the name of a header.")
    for key in _AUTH[kind]:
        if key not in checked:
            raise DeclarationError(f"{where}: auth of type {kind!r} needs {key!r}.")
    return {**checked, "secret": tuple(secrets)} if isinstance(secrets, (list, tuple)) else checked


def _rate_limit(options: object, where: str) -> dict[str, float] | None:
    if options is None:
        return None
    checked = _options(options, "rate_limit", where, {"requests_per_second": float, "burst": int})
    if "requests_per_second" not in checked:
        raise DeclarationError(f"{where}: rate_limit needs requests_per_second.")
    if checked["requests_per_second"] < _SLOWEST:
        raise DeclarationError(f"{where}: rate_limit['requests_per_second'] must be at least {_SLOWEST:g}.")
    return checked


def _idempotency(declared: object, fields: Mapping[str, FieldType], where: str) -> tuple[tuple[str, ...], float]:
    horizon = _DEFAULT_HORIZON_DAYS
    if declared is None:
        return (), horizon
    if isinstance(declared, Mapping):
        rest = {key: value for key, value in declared.items() if key != "fields"}
        horizon = float(_options(rest, "idempotency_key", where, {"horizon_days": float}).get("horizon_days", horizon))
        declared = declared.get("fields")
    names = (declared,) if isinstance(declared, str) else declared
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise DeclarationError(
            f"{where}: idempotency_key must be a field, a list of fields or {{'fields': […], 'horizon_days': …}}."
        )
    for name in names:
        if fields and name not in fields:
            hint = did_you_mean(name, fields, f"Fields: {', '.join(fields)}.")
            raise DeclarationError(f"{where}: idempotency_key {name!r} is not a declared field.", hint=hint)
    return tuple(names), horizon
