"""What the decorators declared, and where a connection's name leads: one registry for everything."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from weft import hooks, settings
from weft.errors import DeclarationError, NotFoundError, SettingsError, WeftError, did_you_mean, unknown
from weft.systems.base import AnyConnection, Connection, system_for, system_for_url

if TYPE_CHECKING:
    from weft.pipelines.declare import Pipeline
    from weft.pipelines.streaming.spec import StreamingPipeline
    from weft.streams.declare import Stream

Definition = tuple[str, Callable[[], Connection]]
"""A source of a connection's definition, and how to build it."""
DEFAULT = "default"
_ENVIRONMENT = "WEFT_DSN"


@dataclass(frozen=True)
class ConnectionInfo:
    """Where a connection's name leads, fit to show: `target` and `problem` hold no secret."""

    name: str
    kind: str | None
    target: str
    source: str
    shadows: tuple[str, ...] = ()
    problem: str | None = None


class Project:
    """The connections, streams and pipelines that a project's modules declare, and the folder that it lives in."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.connections: dict[str, Connection] = {}
        self.streams: dict[str, Stream] = {}
        self.pipelines: dict[str, Pipeline] = {}
        self.streaming_pipelines: dict[str, StreamingPipeline] = {}
        self.clock: Callable[[], float] = time.time
        """What the embedded database takes for the time; a test may put another clock here."""
        self.declarations = 0
        """How many there were: what was opened under an earlier one may have other options now."""
        self.has_read_models = False
        """Whether the folders of models were read that `weft.toml` lists."""
        self._root = Path(root) if root is not None else None
        self._lock = RLock()

    @property
    def root(self) -> Path:
        """The project's folder: the working directory, unless another was given."""
        return self._root or Path.cwd()

    def elsewhere(self) -> str | None:
        """Return where the settings are if not here but in a folder above: a hint for a person in the wrong one."""
        if not settings.project_file(self.root).exists():
            for folder in self.root.absolute().parents:
                if settings.project_file(folder).exists():
                    return f"{settings.PROJECT_FILE} is in {os.path.relpath(folder, self.root)}; run it there."
        return None

    # Connections

    def register(self, connection: Connection, *, replace: bool = False) -> Connection:
        """Make `connection` known under its name."""
        if not isinstance(connection, Connection):
            raise DeclarationError(f"A connection is needed, not a {type(connection).__name__}.")
        if connection.name is None:
            raise DeclarationError(
                f"{connection!r} cannot be registered: it has no name.", hint='Give it one with name="…".'
            )
        check_name(connection.name)
        with self._lock:
            present = self.connections.get(connection.name)
            if present is not None and present != connection and not replace:
                raise DeclarationError(
                    f"Another connection is registered as {connection.name!r} already: {present!r}.",
                    hint="Choose another name, or register_connection(…, replace=True).",
                )
            self.connections[connection.name] = connection
        return connection

    def connection(self, name: AnyConnection | None = None) -> Connection:
        """Return the connection that `name` leads to (`default` when none is given).

        The first of these wins: `WEFT_DSN_<NAME>`, `WEFT_DSN` (for `default`), `weft.toml` in the project's folder,
        `~/.weft/connections.toml`, what was registered in code, and for `default` SQLite at `.weft/weft.db`. A
        connection that is passed itself stands for what was registered; one without a name is always itself.
        """
        if isinstance(name, Connection):
            for _, define in self._from_outside(name.name) if name.name is not None else ():
                return define()
            return name
        name = DEFAULT if name is None else name
        if not isinstance(name, str):
            raise DeclarationError(f"A connection or its name is needed, not a {type(name).__name__}.")
        for _, define in self._definitions(name):
            return define()
        if "://" in name:
            raise NotFoundError(
                f"{settings.redact_url(name)!r} is a URL, where the name of a connection was expected.",
                hint="Pass weft.connect(url=…) instead.",
            )
        how = f"Define it with: weft connections set {name}=DSN, or in code: weft.register_connection(…)"
        raise unknown("connection", name, self.connection_names(), otherwise=how)

    def has_connection(self, name: str) -> bool:
        """Return whether a name leads to a connection."""
        return next(self._definitions(name), None) is not None

    def for_tables(self, connection: Connection) -> Connection:
        """Return the connection by which tables are reached; a project for tests may have another one for that."""
        return connection

    def where(self, name: str) -> ConnectionInfo:
        """Return where `name` leads, which source says so, and which sources that one shadows."""
        definitions = list(self._definitions(name))
        if not definitions:
            self.connection(name)  # raises, naming the nearest
        source, define = definitions[0]
        shadows = tuple(other for other, _ in definitions[1:])
        try:
            connection = define()
        except WeftError as error:
            return ConnectionInfo(name, None, "", source, shadows, problem=error.what)
        return ConnectionInfo(name, connection.kind, connection.target, source, shadows)

    def describe_connections(self) -> list[ConnectionInfo]:
        """Return every name that leads to a connection."""
        return [self.where(name) for name in self.connection_names()]

    def _definitions(self, name: str) -> Iterator[Definition]:
        """Yield each source that defines `name`, the one that wins first."""
        yield from self._from_outside(name)
        registered = self.connections.get(name)
        if registered is not None:
            yield "code", lambda: registered
        if name == DEFAULT:
            fields = {"kind": "sqlite", "path": os.path.join(self.root, ".weft", "weft.db")}
            yield "built in", partial(build_connection, name, fields, "the built-in default")

    def _from_outside(self, name: str) -> Iterator[Definition]:
        """Yield the sources that win over code: the environment and the files."""
        for variable in _variables(name):
            if variable in os.environ:
                yield f"env {variable}", partial(build_connection, name, {"url": os.environ[variable]}, variable)
        for source, file in self._files():
            fields = file.get("connections", {}).get(name)
            if fields is not None:
                yield source, partial(build_connection, name, fields, f"{source}, [connections.{name}]")

    def connection_names(self) -> list[str]:
        """Return every name that leads to a connection."""
        names = {DEFAULT, *self.connections}
        for _, file in self._files():
            names |= set(file.get("connections", {}))
        known_variables = {variable for name in names for variable in _variables(name)}
        for variable in os.environ:
            if variable.startswith(_ENVIRONMENT + "_") and variable not in known_variables:
                names.add(variable.removeprefix(_ENVIRONMENT + "_").lower())
        return sorted(names)

    def _files(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (
            (settings.project_file(self.root).name, settings.read_project_file(self.root)),
            (settings.USER_FILE, settings.read_user_file()),
        )

    # Modules

    def load_modules(
        self, names: Iterable[str] = (), failed: Callable[[str, DeclarationError], None] | None = None
    ) -> None:
        """Import the modules that `weft.toml` lists, then `names`, and read the models in the folders that it lists, so
        that they declare what they hold.

        With `failed` one that raises does not keep the others from being imported.
        """
        folder = str(self.root)
        with self._lock:
            if folder not in sys.path:
                sys.path.insert(0, folder)
        listed = settings.read_project_file(self.root).get("modules", [])
        for name in dict.fromkeys([*listed, *names]):
            try:
                _import(name, self.root)
            except DeclarationError as error:
                if failed is None:
                    raise
                failed(name, error)
        self._load_models(failed)

    def _load_models(self, failed: Callable[[str, DeclarationError], None] | None) -> None:
        self.has_read_models = True
        for name in settings.read_project_file(self.root).get("models", []):
            hooks.load_models(self.root / name, failed)

    def read_models(self, failed: Callable[[str, WeftError], None]) -> None:
        """Read the models in the folders that `weft.toml` lists, unless that was done: an import of the modules does
        not declare them."""
        with self._lock:
            if self.has_read_models:
                return
            try:
                self._load_models(failed)
            except WeftError as error:
                failed(settings.PROJECT_FILE, error)

    def lists_models(self) -> bool:
        """Whether `weft.toml` lists folders of models that nobody has read yet."""
        try:
            return not self.has_read_models and bool(settings.read_project_file(self.root).get("models"))
        except SettingsError:  # who needs the settings says so
            return False


def _variables(name: str) -> tuple[str, ...]:
    """Return the environment variables that define `name`, the one that wins first."""
    own = f"{_ENVIRONMENT}_{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}"
    return (own, _ENVIRONMENT) if name == DEFAULT else (own,)


def check_name(name: str) -> None:
    """Raise unless `name` can be the name of a connection."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise DeclarationError(
            f"{settings.redact_url(name)!r} cannot be the name of a connection.",
            hint="A name has letters, digits, underscores, dashes and dots.",
        )


def build_connection(name: str | None, fields: Mapping[str, Any], where: str) -> Connection:
    """Return a connection from loose fields: `kind` picks its class, or the scheme of `url` where there is no kind."""
    values = dict(fields)
    kind, url = values.pop("kind", None), values.get("url")
    try:
        for field, value in (("name", name), ("url", url), ("kind", kind)):
            if value is not None and not isinstance(value, str):
                raise DeclarationError(f"{field} must be a string, not {type(value).__name__}.")
        if name is not None:
            check_name(name)
        if kind is not None:
            system = system_for(kind)
        elif url:
            system = system_for_url(_with_scheme(url, name))
        else:
            problem = "url is empty" if url == "" else "url or kind is missing"
            raise DeclarationError(f"{problem}.", hint='For example url = "postgres://user:${PASSWORD}@host/database".')
        loaded = system.load_connection()
        if kind is None:
            # A URL has a name of its own on some systems: amqp_url.
            names = [each.name for each in fields_of(loaded) if each.metadata.get("url")]
            if names and "url" not in names:
                values[names[0]] = values.pop("url")
        return loaded.from_fields(values, name=name)
    except (DeclarationError, SettingsError, NotFoundError) as error:
        raise type(error)(f"{where}: {error.what}", hint=error.hint) from None


def _with_scheme(url: str, name: str | None) -> str:
    """`url`, with references substituted when its scheme is in one of them."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url) or not settings.has_references(url):
        return url
    try:
        return settings.interpolate(url, f"the url of the connection {name!r}" if name else "the url")
    except SettingsError as error:
        raise SettingsError(
            error.what, hint=f"{error.hint} Or state the kind too: then it is needed at use only."
        ) from None


def _import(name: str, folder: Path) -> None:
    if "/" in name or name.endswith(".py"):
        meant = os.path.normpath(name).removesuffix(".py").replace("/", ".").strip(".")
        raise NotFoundError(
            f"{name!r} is a file, where the name of a module was expected.", hint=f"Give a module's name: {meant}"
        )
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise _import_failed(name, error) from error
        files = [each.stem for each in folder.glob("*.py")]
        raise NotFoundError(
            f"There is no module {name!r} to import.",
            hint=did_you_mean(name, files, f"Looked for in {folder} and among installed packages."),
        ) from None
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(name: str, error: BaseException) -> DeclarationError:
    """Says where in the user's own code an import failed."""
    text = error.what if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({short_path(error.filename)}, line {error.lineno})"
        text = f"{type(error).__name__}: {error.msg}"
    elif frames := user_frames(error):
        place = f" ({short_path(frames[-1].filename)}, line {frames[-1].lineno})"
    elif (spec := importlib.util.find_spec(name)) is not None and spec.origin:
        place = f" ({short_path(spec.origin)})"
    return DeclarationError(
        f"The module {name!r} cannot be imported: {text}{place}",
        hint=error.hint if isinstance(error, WeftError) else None,
    )


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines on the way to an error, without ours; and without those of Python and packages if others are left."""
    own = (str(Path(__file__).parent), "<frozen", importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    libraries = tuple(sysconfig.get_path(each) + os.sep for each in ("stdlib", "purelib", "platlib"))
    return [frame for frame in frames if not frame.filename.startswith(libraries)] or frames


def short_path(file: str) -> str:
    """Return a file as a person here would name it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


_active = Project()


def current() -> Project:
    """Return the project in use."""
    return _active


@contextmanager
def use(project: Project) -> Iterator[Project]:
    """Make `project` the one in use, for the whole process, until the block ends."""
    global _active
    before, _active = _active, project
    try:
        yield project
    finally:
        _active = before


def register_connection(connection: Connection, *, replace: bool = False) -> Connection:
    """Make a typed connection known under its name, and give it back.

    Registering an equal one again changes nothing; a different one of the same name needs `replace=True`.
    """
    return current().register(connection, replace=replace)


def get_connection(name: str) -> Connection:
    """Return the connection that `name` leads to, through environment, files and code."""
    return current().connection(name)


def registered_connections() -> dict[str, Connection]:
    """Return what was registered in code, by name."""
    return dict(current().connections)


def connect(url: str | None = None, *, name: str | None = None, kind: str | None = None, **fields: Any) -> Connection:
    """Return a connection from a URL, or from a kind and its fields; registered when it has a name."""
    values = {key: value for key, value in {"url": url, "kind": kind, **fields}.items() if value is not None}
    connection = build_connection(name, values, "connect(…)")
    return connection if name is None else register_connection(connection)


def connection(cls: type) -> Connection:
    """Declare a connection as a class whose body lists its fields; registered under the class's name.

        @weft.connection
        class warehouse:
            kind = "postgres"
            url = "${WAREHOUSE_DSN}"

    The name `warehouse` is then the typed connection itself.
    """
    body = {
        key: value
        for each in reversed(cls.__mro__[:-1])
        for key, value in vars(each).items()
        if not key.startswith("_")
    }
    name = body.pop("name", cls.__name__)
    return register_connection(build_connection(name, body, f"@connection class {cls.__name__}"))
