"""What every outside system has: a kind, a typed connection, and the parts of Weft that it can carry."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, NoReturn, Self

from weft import hooks, settings
from weft.errors import (
    ConnectionFailedError,
    DeclarationError,
    MissingExtraError,
    NotFoundError,
    SettingsError,
    WeftError,
    did_you_mean,
    installing,
    listed,
)
from weft.options import fits, refuse_unknown, type_name

ENTRY_POINTS = "weft.systems"
SIGN_IN_HINT = "Check host, port, user, password and database. Encode special characters (%40 for @)."
# They take longer than all else of making a connection, and each batch of a pipeline makes several.
_hints = cache(typing.get_type_hints)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A named, typed handle to an outside system.

    Frozen and hashable. `${VAR}` references stay as written until `resolved()`; what `repr` shows holds no secret.
    A subclass is a frozen dataclass that marks its fields with `metadata={"secret": True}` or `{"url": True}`.
    """

    kind: ClassVar[str]
    one_host: ClassVar[bool] = False
    """Whether only this machine can open it: Spark's workers on a cluster cannot."""
    _is_resolved: ClassVar[bool] = False

    name: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Set here because @dataclass would otherwise give a subclass a repr that shows its secrets.
        cls.__repr__ = Connection.__repr__  # type: ignore[method-assign]

    def __new__(cls, *args: object, **fields: object) -> Self:
        # Before __init__, which would answer an unknown field with a bare TypeError.
        cls.refuse_unknown_fields(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]  # a class is hashable
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, each.name, value)
            if not fits(value, hints[each.name]):
                raise DeclarationError(
                    f"{type(self).__name__}: {each.name} must be {type_name(hints[each.name])}, "
                    f"not {type(value).__name__}."
                )
        self.validate()

    def __repr__(self) -> str:
        shown = [
            f"{each.name}={self._shown(each)!r}"
            for each in dataclasses.fields(self)
            if getattr(self, each.name) is not None
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def refuse_unknown_fields(cls, fields: typing.Iterable[str]) -> None:
        """Raise for a field that this kind of connection does not have, naming the nearest one that it has."""
        known = [each.name for each in dataclasses.fields(cls)]
        refuse_unknown(fields, known, cls.__name__, "Its fields", noun="field")

    @classmethod
    def from_fields(cls, fields: typing.Mapping[str, Any], *, name: str | None) -> Self:
        """A connection from fields that were read from a file or a class body."""
        cls.refuse_unknown_fields(fields)
        for each in dataclasses.fields(cls):
            if each.default is dataclasses.MISSING and each.name not in fields:
                raise DeclarationError(f"{cls.__name__} needs the field {each.name!r}.")
        return cls(**{**fields, "name": name})

    def validate(self) -> None:
        """Check what can be known without opening the connection; called at declaration and again once resolved."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.metadata.get("url") and value is not None:
                self._check_scheme(each.name, value)

    def is_known(self, name: str) -> bool:
        """Return whether the value of a field is known: before the connection is resolved, a `${VAR}` is not."""
        return self._is_resolved or not settings.has_references(getattr(self, name) or "")

    def one_of(self, name: str, choices: Sequence[str]) -> None:
        """Refuse a field whose value is none of the choices."""
        value = getattr(self, name)
        if value is None or value in choices or not self.is_known(name):
            return
        hint = did_you_mean(value, choices) or did_you_mean(value.upper(), choices, f"Known: {', '.join(choices)}.")
        raise DeclarationError(f"{self.label} has the {name} {value!r}, which does not exist.", hint=hint)

    def both_or_neither(self, first: str, second: str) -> None:
        """Refuse one of two fields without the other."""
        if bool(getattr(self, first)) != bool(getattr(self, second)):
            raise DeclarationError(f"{self.label} needs {first} and {second}, both or neither.")

    def _check_scheme(self, field_name: str, url: str) -> None:
        schemes = system_for(self.kind).schemes
        scheme = url_scheme(url)
        if scheme in schemes or (scheme is None and not self._is_resolved and settings.has_references(url)):
            self._refuse_second_scheme(field_name, url)
            return
        problem = f"begins with {scheme}://" if scheme else "is not a URL"
        raise DeclarationError(
            f"The {field_name} of {self.label} {problem}; {self.any_such} needs "
            f"{' or '.join(f'{each}://' for each in schemes)}."
        )

    def _refuse_second_scheme(self, field_name: str, url: str) -> None:
        second = url_scheme(url.partition("://")[2].lstrip("/"))
        if any(second in system.schemes for system in systems().values()):
            raise DeclarationError(
                f"The {field_name} of {self.label} has two schemes: {url_scheme(url)}:// and {second}://.",
                hint='Leave one out. If a variable holds a whole URL, write it alone: url = "${WAREHOUSE_DSN}"',
            )

    def resolved(self) -> Self:
        """A copy in which each `${VAR}` has its value from the environment. This is what a system opens."""
        if self._is_resolved:
            return self
        copy = object.__new__(type(self))
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str) and each.name != "name":
                value = settings.interpolate(value, f"the {each.name} of {self.label}")
            object.__setattr__(copy, each.name, value)
        object.__setattr__(copy, "_is_resolved", True)
        copy.validate()
        return copy

    def secrets(self) -> set[str]:
        """Return the secret values of this connection once resolved, for `weft.settings.redact`."""
        resolved, secrets = self.resolved(), set()
        for each in dataclasses.fields(self):
            value = getattr(resolved, each.name)
            if value is None:
                continue
            if each.metadata.get("url"):
                secrets |= settings.url_secrets(value)
            elif each.metadata.get("secret"):
                secrets.add(str(value))
        return secrets

    @property
    def target(self) -> str:
        """The server, file or bucket that it leads to, in one line without secrets."""
        shown = {each.name: (each, self._shown(each)) for each in dataclasses.fields(self) if each.name != "name"}
        for each, text in shown.values():
            if each.metadata.get("url") and text is not None:
                return str(text)
        return " ".join(f"{name}={text}" for name, (_, text) in shown.items() if text is not None)

    def is_same_place(self, other: Connection) -> bool:
        """Return whether both lead to one place, whatever their names."""
        return self.kind == other.kind and self.resolved().identity() == other.resolved().identity()

    def identity(self) -> object:
        """Return what distinguishes the place of a resolved connection from all others."""
        return [getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "name"]

    def is_missing(self) -> bool:
        """Return whether it is a file that does not exist yet: the first write creates it."""
        return False

    def refuse_missing(self) -> None:
        """Raise if it is a file to be read that does not exist."""

    @property
    def is_private_memory(self) -> bool:
        """Whether what it holds is in memory that only one opened connection sees."""
        return False

    def stream_table(self, stream: Any) -> str:
        """Return the quoted name of a stream's table in this database, for SQL."""
        raise DeclarationError(f"On {self.label} a stream is not a table.", hint="Read it with weft.read_stream.")

    def reports_missing(self, error: str) -> Literal["table", "database"] | None:
        """Return what an error of this system reports as missing: a table, or the whole database."""
        return None

    def check(self) -> dict[str, Any]:
        """Open the connection, run a trivial query, and return what answered: server, database, latency_ms."""
        raise NotImplementedError

    def configure(self, spark: Any) -> None:
        """Configure a Spark session to reach this system, where options of its connector cannot do it."""

    def has_path(self, name: str, path: str) -> bool:
        """Return whether a path is among the files of a source or target here."""
        return False

    def xconsumer(self, *streams: Any, **options: Any) -> Any:
        """Return a `weft.Consumer` of streams here, or with `group` and `consumer` a `weft.GroupConsumer`."""
        system = system_for(self.kind)
        if system.entries is None:
            system.load_log()  # refuses what holds no streams
        return hooks.open_consumer(self, *streams, **options)

    def failed(
        self, error: BaseException, *, hint: str | None = None, is_transient: bool = True
    ) -> ConnectionFailedError:
        """Return the error to raise for a driver's `error` in opening this connection, without its secrets.

        Raise it `from None`: a chained driver error would show its own text.
        """
        text = " ".join(settings.redact(str(error), self.secrets()).split())
        return ConnectionFailedError(
            f"Cannot open {self.label} ({self.target}): {text}", hint=hint, is_transient=is_transient
        )

    def unreachable(self, error: BaseException, *, answered: bool, denied: bool = False) -> ConnectionFailedError:
        """Return the error for a connection that cannot be opened. `answered`: a server answered, and refused it.
        `denied`: it knows no such user, password or database, so that who waits for it waits in vain."""
        hint = "Check that the server runs and takes connections"
        hint += f": weft connections check {self.name}" if self.name else "."
        return self.failed(
            error, hint=self.checked(SIGN_IN_HINT) if answered or denied else hint, is_transient=not denied
        )

    def closed(self) -> ConnectionFailedError:
        """Return the error for a use of what this process has closed."""
        what, hint = f"Nothing was done: {self.label} was closed.", "The next use of the stream opens it."
        return ConnectionFailedError(what, hint=hint, is_transient=False)

    def checked(self, hint: str) -> str:
        """Return what to do about a connection that fails, and the command that says whether it helped."""
        return f"{hint} Then: weft connections check {self.name}" if self.name else hint

    @property
    def any_such(self) -> str:
        """How errors call connections of this kind: "an object_store_s3 connection"."""
        return f"a{'n' if self.kind[0] in 'aeiou' else ''} {self.kind} connection"

    @property
    def label(self) -> str:
        """How errors call this connection."""
        return f"the connection {self.name!r}" if self.name else self.any_such

    def _shown(self, each: dataclasses.Field[Any]) -> object:
        value = getattr(self, each.name)
        if value is None:
            return None
        if each.metadata.get("url"):
            return settings.redact_url(value, keep_references=not self._is_resolved)
        if each.metadata.get("secret"):
            is_reference = isinstance(value, str) and re.fullmatch(r"\$\{[^}]*\}", value)
            return value if is_reference and not self._is_resolved else settings.HIDDEN
        return value


AnyConnection = str | Connection | type[Any]
"""A connection or its name. A type checker takes what `@weft.connection` decorates for a class."""


class Settings(dict[str, Any]):
    """A dict that may be a field of a frozen, hashable connection."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


@contextmanager
def measured(report: dict[str, Any]) -> Iterator[None]:
    """Put the time that the block took into `report` as `latency_ms`."""
    start = time.perf_counter()
    yield
    report["latency_ms"] = round((time.perf_counter() - start) * 1000, 2)


@dataclass(frozen=True)
class System:
    """A kind of outside system. Its classes are named as `module:Class` and imported when first needed.

    A system with a `log` needs no other class to be a source, a target and a dead-letter store of streaming pipelines:
    streams are. One with `tables` needs none to be a target and a dead-letter store.
    """

    kind: str
    connection: str
    schemes: tuple[str, ...] = ()
    log: str | None = None
    """Keeps streams: `weft.systems.log.Store`."""
    tables: str | None = None
    """Reads and writes SQL tables: `weft.systems.sql.tables.SqlTables`."""
    stream_source: str | None = None
    """A source of streaming pipelines: `weft.systems.stream_source.StreamSource`."""
    target: str | None = None
    """A target that Spark writes: `weft.systems.target.SparkTarget`."""
    dead_letter_store: str | None = None
    """Keeps rejected rows: `weft.systems.dead_letter_store.DeadLetterStore`."""
    jars: tuple[str, ...] = ()
    """The locked sets of jars that Spark needs for it: see `weft.engine.jars`."""
    entries: str | None = None
    """Reads the system's own streams for consumers: see `weft.systems.entries`."""
    pages: str | None = None
    """Reads the system's own streams as frames: see `weft.systems.pages`."""
    hashes: str | None = None
    """Writes hashes: `(connection, keys, fields)`, with a list of values for each field."""
    api_keys: str | None = None
    """Keeps the keys of the service, on a system without `tables`: `weft.server.keys.KeyRows`."""
    endpoint: str = "weft.systems.endpoint:StoreEndpoint"
    extra: str | None = None
    describes: str = ""
    instead: str = ""
    """What to use instead, for those who take it for something that it is not."""

    def load(self, capability: Literal["stream_source", "target", "entries", "pages", "hashes", "api_keys"]) -> Any:
        """Return the class or function that this system names for a capability; `None` where it names none."""
        return self._load(getattr(self, capability))

    def load_connection(self) -> type[Connection]:
        """Return the class of this system's connections."""
        loaded: type[Connection] = self._load(self.connection)
        return loaded

    def load_log(self) -> Any:
        """Return the class that keeps streams on this system."""
        return self._load(self.log) or self._refuse("hold a stream", lambda each: each.log)

    def load_tables(self) -> Any:
        """Return the class that reads and writes tables on this system."""
        return self._load(self.tables) or self._refuse("hold tables", lambda each: each.tables)

    def load_dead_letter_store(self) -> Any:
        """Return the class that keeps dead letters on this system: its own, or that of every system with tables."""
        of_tables = self.tables and "weft.systems.sql.dead_letters:TableLetters"
        return self._load(self.dead_letter_store or of_tables) or self._refuse(
            "keep dead letters", lambda each: each.dead_letter_store or each.tables
        )

    def load_endpoint(self) -> Any:
        """Return what streaming pipelines can read and write on this system: a `weft.systems.endpoint.Endpoint`."""
        return self._load(self.endpoint)(self)

    @property
    def takes_loads(self) -> bool:
        """Whether loads and batch pipelines can write what Spark writes on this system."""
        target = self.load("target")
        return target is not None and target.exactly_once

    def _load(self, reference: str | None) -> Any:
        module, _, name = (reference or "").partition(":")
        return getattr(require(module, self), name) if module else None

    def _refuse(self, purpose: str, is_able: Callable[[System], str | None]) -> NoReturn:
        able = ", ".join(each.kind for each in systems().values() if is_able(each))
        raise DeclarationError(
            f"A {self.kind} connection cannot {purpose}.", hint=f"{self.instead} These can: {able}.".lstrip()
        )


def require(module: str, system: System | str) -> types.ModuleType:
    """Import `module`, which a system needs; when a package is not installed, say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        system = system_for(system) if isinstance(system, str) else system
        if isinstance(error, WeftError) or system.extra is None or (error.name or "").partition(".")[0] == "weft":
            raise
        raise MissingExtraError(
            f"The {system.kind} system needs a package that is not installed: {error}.",
            hint=installing(system.extra),
        ) from error


_FILES = System(
    kind="object_store_local",
    connection="weft.systems.objects.connection:ObjectStoreLocalConnection",
    stream_source="weft.systems.objects.stream_source:FileSource",
    target="weft.systems.objects.target:FileTarget",
    dead_letter_store="weft.systems.objects.dead_letters:FolderLetters",
    endpoint="weft.systems.objects.connection:FileEndpoint",
    extra="spark",
    describes="Parquet, CSV, JSON lines or ORC files in a folder",
)
_DELTA = System(
    kind="delta_local",
    connection="weft.systems.delta.connection:DeltaLocalConnection",
    stream_source="weft.systems.delta.stream_source:DeltaSource",
    target="weft.systems.delta.target:DeltaTarget",
    dead_letter_store="weft.systems.delta.dead_letters:DeltaLetters",
    jars=("delta",),
    endpoint="weft.systems.delta.connection:DeltaEndpoint",
    extra="spark",
    describes="Delta tables in a folder",
)
_BUILT_IN = {
    system.kind: system
    for system in (
        System(
            kind="sqlite",
            connection="weft.systems.sqlite.connection:SQLiteConnection",
            schemes=("sqlite",),
            log="weft.systems.sqlite.store:SqliteStore",
            tables="weft.systems.sqlite.tables:SqliteTables",
            describes="SQLite: a file in the project, no server",
        ),
        System(
            kind="postgres",
            connection="weft.systems.postgres.connection:PostgresConnection",
            schemes=("postgres", "postgresql"),
            log="weft.systems.postgres.store:PostgresStore",
            tables="weft.systems.postgres.tables:PostgresTables",
            extra="postgres",
            describes="PostgreSQL",
        ),
        System(
            kind="mysql",
            connection="weft.systems.mysql.connection:MySQLConnection",
            schemes=("mysql", "mariadb"),
            log="weft.systems.mysql.store:MySQLStore",
            tables="weft.systems.mysql.tables:MySQLTables",
            extra="mysql",
            describes="MySQL and MariaDB",
        ),
        System(
            kind="duckdb",
            connection="weft.systems.duckdb.connection:DuckDBConnection",
            schemes=("duckdb",),
            tables="weft.systems.duckdb.tables:DuckDBTables",
            extra="duckdb",
            describes="DuckDB: a file that one process at a time may write",
        ),
        System(
            kind="redis",
            connection="weft.systems.redis.connection:RedisConnection",
            endpoint="weft.systems.redis.connection:RedisEndpoint",
            schemes=("redis", "rediss"),
            log="weft.systems.redis.store:RedisStore",
            entries="weft.systems.redis.entries:RedisEntries",
            pages="weft.systems.redis.pages:RedisPages",
            hashes="weft.systems.redis.hashes:write_hashes",
            api_keys="weft.systems.redis.key_rows:RedisKeyRows",
            extra="redis",
            describes="Redis: one server, a cluster, or one behind Sentinels",
        ),
        System(
            kind="kafka",
            connection="weft.systems.kafka.connection:KafkaConnection",
            stream_source="weft.systems.kafka.stream_source:KafkaSource",
            target="weft.systems.kafka.target:KafkaTarget",
            dead_letter_store="weft.systems.kafka.dead_letters:KafkaLetters",
            jars=("kafka",),
            endpoint="weft.systems.kafka.connection:KafkaEndpoint",
            extra="kafka",
            describes="Kafka: topics of JSON, Avro or Protobuf messages, or of bytes",
        ),
        System(
            kind="schema_registry",
            connection="weft.systems.schema_registry.connection:SchemaRegistryConnection",
            schemes=("http", "https"),
            endpoint="weft.systems.schema_registry.connection:SchemaRegistryEndpoint",
            extra="registry",
            describes="A schema registry: the schemas of Avro and Protobuf messages",
            instead="An http:// URL is that of a schema registry. Pass the URL of the database that holds the stream, "
            "such as postgres://…; the service (weft serve) is for clients of HTTP, not for connections.",
        ),
        System(
            kind="kinesis",
            connection="weft.systems.kinesis.connection:KinesisConnection",
            stream_source="weft.systems.kinesis.stream_source:KinesisSource",
            target="weft.systems.kinesis.target:KinesisTarget",
            dead_letter_store="weft.systems.kinesis.dead_letters:KinesisLetters",
            endpoint="weft.systems.kinesis.connection:KinesisEndpoint",
            extra="kinesis",
            describes="Amazon Kinesis: streams of JSON records or of bytes",
        ),
        System(
            kind="pubsub",
            connection="weft.systems.pubsub.connection:PubSubConnection",
            stream_source="weft.systems.pubsub.stream_source:PubSubSource",
            target="weft.systems.pubsub.target:PubSubTarget",
            dead_letter_store="weft.systems.pubsub.dead_letters:PubSubLetters",
            endpoint="weft.systems.pubsub.connection:PubSubEndpoint",
            extra="pubsub",
            describes="Google Pub/Sub: topics of JSON messages or of bytes",
        ),
        System(
            kind="rabbitmq",
            connection="weft.systems.rabbitmq.connection:RabbitMQConnection",
            schemes=("amqp", "amqps"),
            stream_source="weft.systems.rabbitmq.stream_source:RabbitMQSource",
            target="weft.systems.rabbitmq.target:RabbitMQTarget",
            dead_letter_store="weft.systems.rabbitmq.dead_letters:RabbitMQLetters",
            endpoint="weft.systems.rabbitmq.connection:RabbitMQEndpoint",
            extra="rabbitmq",
            describes="RabbitMQ: queues of JSON messages or of bytes",
        ),
        _FILES,
        dataclasses.replace(
            _FILES,
            kind="object_store_s3",
            connection="weft.systems.objects.connection:ObjectStoreS3Connection",
            dead_letter_store="weft.systems.objects.dead_letters:BucketLetters",
            jars=("s3",),
            describes="Parquet, CSV, JSON lines or ORC files in a bucket",
        ),
        _DELTA,
        dataclasses.replace(
            _DELTA,
            kind="delta_s3",
            connection="weft.systems.delta.connection:DeltaS3Connection",
            jars=("delta", "s3"),
            describes="Delta tables in a bucket",
        ),
    )
}


def systems() -> dict[str, System]:
    """Return every system by its kind: the built-in ones, then those of installed packages."""
    return {**_BUILT_IN, **_third_party()[0]}


def system_for(kind: str) -> System:
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    installed, broken = _third_party()
    if kind in installed:
        return installed[kind]
    if kind in broken:
        raise SettingsError(broken[kind], hint="Update or remove that package.")
    raise _no_system(f"There is no kind of connection named {kind!r}.", kind, "kinds", systems())


def system_for_url(url: str) -> System:
    """Return the system whose URLs begin as `url` does."""
    scheme = url_scheme(url)
    for system in systems().values():
        if scheme in system.schemes:
            return system
    schemes = [each for system in systems().values() for each in system.schemes]
    if scheme is None:
        # Not quoted: what was passed in the place of a URL may be a secret.
        known = ", ".join(f"{each}://" for each in schemes)
        raise SettingsError(
            "A connection's URL must begin with a scheme such as postgres://.",
            hint=f"Known schemes: {known}. A file is sqlite:///relative/path or sqlite:////absolute/path.",
        )
    raise _no_system(f"No kind of connection has URLs that begin with {scheme}://.", scheme, "schemes", schemes)


def url_scheme(url: str) -> str | None:
    """Return the scheme that `url` begins with, in lower case."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    return match[1].lower() if match else None


def _no_system(what: str, name: str, noun: str, known: typing.Iterable[str]) -> NotFoundError:
    names = sorted(known)
    return NotFoundError(what, hint=listed(name, names, f"Known {noun}: {', '.join(names)}."))


@cache
def _third_party() -> tuple[dict[str, System], dict[str, str]]:
    """Return the systems of installed packages, and by entry point name what is wrong with those that do not load. A
    broken package is a warning here and an error only for who asks for its kind: it never breaks the others."""
    from importlib.metadata import entry_points

    installed: dict[str, System] = {}
    broken: dict[str, str] = {}
    for point in entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist else "an unnamed package"
        problem = None
        try:
            system = point.load()
        except Exception as error:  # any error of a module that is not ours
            problem = f"does not load: {type(error).__name__}: {error}"
        else:
            if not isinstance(system, System):
                problem = f"is a {type(system).__name__}, not a weft.systems.System"
            elif system.kind in _BUILT_IN or system.kind in installed:
                problem = f"has the kind {system.kind!r}, which is taken"
            else:
                installed[system.kind] = system
        if problem is not None:
            broken[point.name] = f"The system {point.name!r} of the package {package} {problem}."
            warnings.warn(broken[point.name], stacklevel=2)
    return installed, broken
