"""Models that are files: `daily_revenue.sql` has a header of comments with the options, then one SELECT.

    -- materialise: merge
    -- key: day
    SELECT date(placed_at) AS day, sum(total) AS revenue FROM events.orders GROUP BY 1

The tables that the query names are the inputs. Each is bound to one plain word, so that the same text runs in a
database and on Spark.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, NotFoundError, WeftError, did_you_mean
from weft.options import refuse_unknown
from weft.pipelines import expectations, models
from weft.pipelines.models import OPTIONS, THIS, Model, ModelInput, ModelQuery
from weft.project import current, short_path
from weft.systems.base import system_for

if TYPE_CHECKING:
    from sqlglot import exp

_OPTION = re.compile(r"--\s*([a-z_]+)\s*:\s*(.*)")
_WORD = re.compile(r"[a-z_][a-z0-9_]*")
_LISTS = ("key", "tags", "dependencies")
_NUMBERS = ("debounce", "max_staleness")
_EXPECTATIONS = ("accepted", "freshness", "not_null", "range", "row_count", "sql", "unique")


def load_folder(folder: Path, failed: Callable[[str, DeclarationError], None] | None = None) -> None:
    """Declare the model of each `.sql` file in a folder and those below it."""
    if not folder.is_dir():
        raise NotFoundError(
            f"weft.toml: models lists the folder {short_path(str(folder))}, which is not there.",
            hint="Create it, or take it out of the list.",
        )
    for file in sorted(folder.rglob("*.sql")):
        try:
            declare(file)
        except DeclarationError as error:
            if failed is None:
                raise
            failed(short_path(str(file)), error)


def declare(file: Path) -> Model:
    """Declare the model that a file is."""
    shown = short_path(str(file))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{shown} cannot be read: {error}.") from None
    options, header = _header(text, shown)
    options.setdefault("name", file.stem)

    def function() -> str:
        return query.sql

    function.__name__ = function.__qualname__ = options["name"]
    query = _read_query(text, header, options, shown, str(file.resolve()))
    try:
        model = models.make(function, options, query)
    except DeclarationError as error:
        raise DeclarationError(f"{shown}: {error.what}", hint=error.hint) from None
    models.register(model)
    return model


# --------------------------------------------------------------------------------------------------------------- header


def _header(text: str, shown: str) -> tuple[dict[str, Any], int]:
    """Return the options, and how many lines the header has. Other comments in it describe the model."""
    options: dict[str, Any] = {}
    about: list[str] = []
    number = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("--"):
            number -= 1
            break
        option = _OPTION.fullmatch(stripped)
        if option is None:
            about.append(stripped.lstrip("-").strip())
            continue
        where = f"{shown}, line {number}"
        name, value = option.groups()
        refuse_unknown([name], OPTIONS, where)
        if name == "expectations":
            options.setdefault(name, []).extend(_expectations(value, where))
            continue
        if name in options:
            raise DeclarationError(f"{where}: {name} is there twice.")
        if not value:
            raise DeclarationError(f"{where}: {name} has no value.", hint="Write -- name: value, or remove the line.")
        options[name] = _value(name, value, where)
    if description := " ".join(filter(None, about)):
        options.setdefault("description", description)
    return options, number


def _value(name: str, text: str, where: str) -> Any:
    if name in _LISTS:
        return [each.strip() for each in text.split(",")]
    try:
        if name in _NUMBERS:
            return float(text)
        if name == "retry":
            return tomllib.loads(f"retry = {text}")["retry"]
    except (ValueError, tomllib.TOMLDecodeError):
        hint = "-- retry: {max_attempts = 3}" if name == "retry" else f"-- {name}: 5"
        raise DeclarationError(f"{where}: {name} cannot be {text!r}.", hint=hint) from None
    return text


def _expectations(text: str, where: str) -> Iterator[Any]:
    """Yield what `not_null("id"), range("total", min=0)` stands for."""
    hint = '-- expectations: not_null("order_id"), range("total", min=0)'
    try:
        listed = ast.parse(f"[{text}]", mode="eval").body
        assert isinstance(listed, ast.List)
        for each in listed.elts:
            if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Name):
                raise DeclarationError(f"{where}: {ast.unparse(each)} is not an expectation.", hint=hint)
            if each.func.id not in _EXPECTATIONS:
                near = did_you_mean(each.func.id, _EXPECTATIONS, f"There are: {', '.join(_EXPECTATIONS)}.")
                raise DeclarationError(f"{where}: there is no expectation {each.func.id!r}.", hint=near)
            values = [ast.literal_eval(value) for value in each.args]
            named = {one.arg: ast.literal_eval(one.value) for one in each.keywords if one.arg is not None}
            yield getattr(expectations, each.func.id)(*values, **named)
    except (SyntaxError, ValueError, TypeError) as error:
        raise DeclarationError(f"{where}: {text!r} cannot be read: {error}.", hint=hint) from None


# ---------------------------------------------------------------------------------------------------------------- query


@dataclass(frozen=True)
class _Named:
    """A table that a query names somewhere."""

    parts: tuple[str, ...]
    start: int
    end: int
    last: str
    """The last part of the name as it is written."""
    has_alias: bool

    @property
    def name(self) -> str:
        return ".".join(
            each if re.fullmatch(r"\w+", each) else '"' + each.replace('"', '""') + '"' for each in self.parts
        )


def _read_query(text: str, header: int, options: Mapping[str, Any], shown: str, origin: str) -> ModelQuery:
    """Return the query of a file, with one plain word in the place of each table that it names."""
    statement, dialect = _parsed(text, header, options, shown)
    tables, has_this = _tables(statement, text)
    for each in tables:
        if each.parts == (options["name"],):
            line = text.count("\n", 0, each.start) + 1
            raise DeclarationError(
                f"{shown}, line {line}: {each.name} reads itself.", hint=f"Call its last result {THIS}."
            )
    names = {each.name: each for each in tables}
    words = _words(tables, {each.alias.casefold() for each in statement.find_all(_exp().CTE)})
    changes: list[tuple[int, int, str]] = []
    lasts = [each.parts[-1] for each in names.values()]
    called = {name: each.last if lasts.count(each.parts[-1]) == 1 else words[name] for name, each in names.items()}
    for each in tables:
        word = words[each.name]
        if text[each.start : each.end] != word:
            is_called = each.has_alias or called[each.name] == word
            changes.append((each.start, each.end, word if is_called else f"{word} AS {called[each.name]}"))
    by_parts = {each.parts: name for name, each in names.items()}
    for column in statement.find_all(_exp().Column):
        *before, _ = column.parts
        name = by_parts.get(tuple(part.name for part in before))
        if len(before) > 1 and name is not None:
            changes.append((before[0].meta["start"], before[-1].meta["end"] + 1, called[name]))
    # Without the header, and without what stands behind the query.
    start = sum(len(line) for line in text.splitlines(keepends=True)[:header])
    end = _end(text, dialect)
    sql = text[:end]
    for first, last, word in sorted(changes, reverse=True):
        sql = sql[:first] + word + sql[last:]
    listed = tuple(ModelInput(name, words[name]) for name in names)
    more = tuple(ModelInput(name) for name in options.get("dependencies", ()) if name not in names)
    return ModelQuery(sql[start:], (*listed, *more), has_this, declared_at=shown, origin=origin)


def _parsed(text: str, header: int, options: Mapping[str, Any], shown: str) -> tuple[exp.Query, str]:
    import sqlglot

    problem: sqlglot.errors.SqlglotError | None = None
    for dialect in _dialects(options):
        try:
            parsed = sqlglot.parse(text, dialect=dialect)
        except sqlglot.errors.SqlglotError as error:
            problem = problem or error
            continue
        # A comment behind the last semicolon is a statement of its own.
        statements = [each for each in parsed if each is not None and not isinstance(each, sqlglot.exp.Semicolon)]
        if len(statements) == 1 and isinstance(statements[0], sqlglot.exp.Query):
            return statements[0], dialect
        instead = f"{len(statements)} statements"
        if len(statements) < 2:
            instead = f"a statement {statements[0].key.upper()}" if statements else "nothing"
        raise DeclarationError(
            f"{shown}, line {header + 1}: the file of a model has one SELECT, not {instead}.",
            hint="Its result becomes the table: leave CREATE TABLE and INSERT out.",
        )
    first = (getattr(problem, "errors", None) or [{}])[0]
    line = first.get("line") or header + 1
    near = f" near {first['highlight']!r}" if first.get("highlight") else ""
    what = str(first.get("description") or problem).partition(" but got <")[0]
    raise DeclarationError(f"{shown}, line {line}: this is not SQL{near}: {what}.")


def _dialects(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dialects that a query may be written in: that of Spark, then that of its database."""
    yield "spark"
    try:
        system = system_for(current().connection(options.get("connection")).kind)
    except WeftError:  # not defined here
        return
    if system.tables is not None:
        yield system.load_tables().dialect


def _tables(statement: exp.Expr, text: str) -> tuple[list[_Named], bool]:
    """Return the tables that a query names, and whether `this` is one. Names of common table expressions are none."""
    tables: list[_Named] = []
    has_this = False
    for table in statement.find_all(_exp().Table):
        if not isinstance(table.this, _exp().Identifier | _exp().Dot):  # a function that returns rows
            continue
        identifiers = list(table.parts)
        parts = tuple(each.name for each in identifiers)
        if len(parts) == 1 and parts[0].casefold() == THIS:
            has_this = True
        elif len(parts) > 1 or not _is_cte(table):
            start, end = identifiers[0].meta["start"], identifiers[-1].meta["end"] + 1
            last = text[identifiers[-1].meta["start"] : end]
            tables.append(_Named(parts, start, end, last, bool(table.alias)))
    return sorted(tables, key=lambda each: each.start), has_this


def _is_cte(table: exp.Expr) -> bool:
    """Whether a name is that of a common table expression which is known at this place."""
    name = table.name.casefold()
    inside: exp.Expr = table
    while inside.parent is not None:
        outside = inside.parent
        clause = inside if isinstance(inside, _exp().With) else outside.args.get("with_")
        if clause is not None:
            ctes = clause.expressions
            own = next((number for number, each in enumerate(ctes) if _holds(each, table)), len(ctes))
            known = ctes if clause.recursive else ctes[:own]
            if any(each.alias.casefold() == name for each in known):
                return True
        inside = outside
    return False


def _holds(outer: exp.Expr, inner: exp.Expr) -> bool:
    while inner is not outer and inner.parent is not None:
        inner = inner.parent
    return inner is outer


def _words(tables: list[_Named], ctes: set[str]) -> dict[str, str]:
    """Return a word that needs no quotation marks for each name."""
    words: dict[str, str] = {}
    for each in tables:
        if each.name in words:
            continue
        word = each.parts[0]
        if len(each.parts) > 1 or each.last != word or not _WORD.fullmatch(word) or word in ctes:
            joined = re.sub(r"\W+", "_", "_".join(each.parts).lower())
            word = joined if len(each.parts) > 1 else f"input_{joined}"
        used = {*ctes, *words.values()}
        words[each.name] = next(name for name in (word, *(f"{word}_{n}" for n in range(2, 1000))) if name not in used)
    return words


def _end(text: str, dialect: str) -> int:
    """Return where the last word of the query ends: what follows are comments and semicolons."""
    from sqlglot import TokenType, tokenize

    return max(each.end for each in tokenize(text, dialect) if each.token_type is not TokenType.SEMICOLON) + 1


def _exp() -> Any:
    from sqlglot import exp

    return exp
