"""Spark SQL over everything: the tables that a query names become views of a session of its own.

The text of a query stays as it was written but for the names of its tables: Spark alone says what it means.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.engine import inputs, relations
from weft.engine.readers import SqlReader, StreamReader, open_tables
from weft.engine.relations import Relation
from weft.errors import DeclarationError, SchemaError, WeftError, did_you_mean, listed
from weft.project import current
from weft.spark_support import outcome, sessions
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.spark_support.voids import with_element_types
from weft.systems.base import Connection
from weft.systems.log import ROWID
from weft.systems.sql.literals import literal

Parameters = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Place:
    """Where a query has a parameter, the name of a table, or the schema before that of a column's table, which goes."""

    start: int
    end: int
    table: int | None = None
    """The number of the table."""
    needs_alias: bool = False
    """Whether the query gives the table no other name, so that it goes by the last part of its own."""
    parameter: str | int | None = None
    """The name of the parameter, or its number."""


@dataclass(frozen=True)
class ParsedQuery:
    """A query whose tables are known."""

    text: str
    tables: tuple[Relation, ...]
    names: tuple[str, ...]
    """The last part of the name of each table."""
    places: tuple[Place, ...]

    def naming(
        self, names: Sequence[str], quote: Callable[[str], str], dialect: str, parameters: Parameters | None = None
    ) -> str:
        """Return the query with these names of its tables, and the values of its parameters."""
        pieces, done = [], 0
        for place in self.places:
            pieces.append(self.text[done : place.start])
            if place.parameter is not None:
                value = literal(_value(parameters, place.parameter), dialect)
                # Behind a minus a negative number would begin a comment.
                pieces.append(f"({value})" if value.startswith("-") else value)
            elif place.table is not None:
                pieces.append(names[place.table])
                if place.needs_alias:
                    pieces.append(f" AS {quote(self.names[place.table])}")
            done = place.end
        return "".join((*pieces, self.text[done:])).strip().rstrip(";")


def _value(parameters: Parameters | None, parameter: str | int) -> Any:
    try:
        return (parameters or {})[parameter]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        shown = f":{parameter}" if isinstance(parameter, str) else parameter
        raise DeclarationError(
            f"The query has a parameter without a value: {shown}.",
            hint='Give it one: parameters={"name": value} for :name, parameters=[value] for ?, or --param name=value.',
        ) from None


# ------------------------------------------------------------------------------------------------------- what it reads


def understand(sql: str, default: str | Connection | None = None, *, only: Connection | None = None) -> ParsedQuery:
    """Return a query with what its tables stand for; refuse what is no query. `only`: the connection of them all."""
    from sqlglot import exp

    tree = _parsed(sql)
    numbers: dict[tuple[str, ...], int] = {}
    places: list[Place] = []
    tables: list[Relation] = []
    for table in tree.find_all(exp.Table):
        if not all(isinstance(part, exp.Identifier) for part in table.parts) or _is_own(table):
            continue  # a function, a hint or a part of the query itself
        parts = tuple(part.name for part in table.parts)
        if parts not in numbers:
            numbers[parts] = len(tables)
            tables.append(relations.find_parts(parts, default) if only is None else _on(only, parts))
        has_name = any(table.args.get(each) for each in ("alias", "sample", "version"))
        start, end = table.parts[0].meta["start"], table.parts[-1].meta["end"] + 1
        places.append(Place(start, end, numbers[parts], not has_name))
    for column in tree.find_all(exp.Column):
        *qualifier, _ = column.parts
        if len(qualifier) > 1 and tuple(part.name for part in qualifier) in numbers:
            places.append(Place(qualifier[0].meta["start"], qualifier[-1].meta["start"], None))
    places += _parameters(sql)
    places.sort(key=lambda place: place.start)
    return ParsedQuery(sql, tuple(tables), tuple(parts[-1] for parts in numbers), tuple(places))


def statements(text: str) -> tuple[list[str], str]:
    """Return the statements of a text that end in a semicolon, and what follows the last of them."""
    from sqlglot.errors import SqlglotError
    from sqlglot.tokenizer_core import TokenType

    try:
        tokens = _dialect()().tokenize(text)
    except SqlglotError:  # in the middle of a text or a comment
        return [], text
    ends = [token.end + 1 for token in tokens if token.token_type == TokenType.SEMICOLON]
    starts = [0, *ends]
    has_more = bool(tokens) and tokens[-1].token_type != TokenType.SEMICOLON  # and no comment alone
    complete = [text[start:end].strip() for start, end in zip(starts, ends, strict=False)]
    return complete, text[starts[-1] :].strip() if has_more else ""


def _on(connection: Connection, parts: tuple[str, ...]) -> Relation:
    own = parts[1:] if len(parts) > 1 and parts[0] == connection.name else parts
    if len(own) > 2:
        raise DeclarationError(
            f"{'.'.join(parts)} is no table of {connection.label}, which all tables of this query must be of.",
            hint='A table there is schema.table, or a path in "…". weft.sql reads several connections.',
        )
    return relations.find_on(connection, own)


def _parsed(sql: str) -> Any:
    from sqlglot import exp, parse
    from sqlglot.errors import ParseError, SqlglotError

    with _quiet():
        try:
            trees = [each for each in parse(sql, read=_dialect()) if each is not None]
        except SqlglotError as error:
            where = ""
            if isinstance(error, ParseError) and error.errors:
                where = f" in line {error.errors[0]['line']} at {error.errors[0]['highlight']!r}"
            raise DeclarationError(f"The query cannot be understood{where}.", hint=_HINT) from None
    if len(trees) != 1:
        raise DeclarationError(f"One query is needed, not {len(trees) or 'an empty text'}.", hint=_HINT)
    if not isinstance(trees[0], exp.Query | exp.Values):
        raise DeclarationError(
            f"Only queries are run here, and this is none: {' '.join(sql.split())[:60]}",
            hint=f"{_HINT} To write rows, use weft.load or a pipeline.",
        )
    return trees[0]


def _parameters(sql: str) -> Iterator[Place]:
    from sqlglot.tokenizer_core import TokenType

    tokens = _dialect()().tokenize(sql)
    number = 0
    for before, token, name in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.token_type == TokenType.PLACEHOLDER:
            yield Place(token.start, token.end + 1, parameter=number)
            number += 1
        elif token.token_type == TokenType.COLON and name is not None and name.start == token.end + 1:
            # `a:b` and `xs[1:n]` have none.
            is_between = (
                before is not None
                and before.end + 1 == token.start
                and (before.text[-1:].isalnum() or before.text == "]")
            )
            if re.fullmatch(r"[A-Za-z_]\w*", name.text) and not is_between:
                yield Place(token.start, name.end + 1, parameter=name.text)


_HINT = "A query begins with SELECT, WITH, VALUES or FROM."


@functools.cache
def _dialect() -> Any:
    """Spark's SQL, with names in double quotes as in the databases."""
    from sqlglot.dialects.spark import Spark

    class QuotedSpark(Spark):
        class Tokenizer(Spark.Tokenizer):
            QUOTES: ClassVar = ["'"]
            IDENTIFIERS: ClassVar = ["`", '"']

    return QuotedSpark


@contextmanager
def _quiet() -> Iterator[None]:
    """Have sqlglot log nothing: it warns of statements that it does not know, and those are refused here."""
    import logging

    logger = logging.getLogger("sqlglot")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_own(table: Any) -> bool:
    """Return whether a name is that of a part of the query (WITH), or stands in a hint."""
    from sqlglot import exp

    inner, node = table, table.parent
    while node is not None:
        if isinstance(node, exp.Hint):
            return True
        if isinstance(node, exp.With):
            # A part sees those before it, and in WITH RECURSIVE itself.
            number = next(number for number, each in enumerate(node.expressions) if each is inner)
            visible = node.expressions[: number + bool(node.args.get("recursive"))]
        else:
            visible = getattr(node, "ctes", []) if not isinstance(inner, exp.With) else []
        if len(table.parts) == 1 and table.name.lower() in (each.alias.lower() for each in visible):
            return True
        inner, node = node, node.parent
    return False


# ---------------------------------------------------------------------------------------------------------- its result


def frame(query: ParsedQuery, parameters: Parameters | None = None) -> Any:
    """Return the result of a query as a DataFrame of a session of its own."""
    views = {f"_weft_{number}": each for number, each in enumerate(query.tables)}
    tables: dict[str, SqlReader | StreamReader | Relation] = {}
    for name, relation in views.items():
        tables[name] = relation if isinstance(relation.data, inputs.Files) else relations.reader_of(relation)
    return frame_over(tables, query.naming(list(views), quoted, "spark", parameters))


def frame_over(
    tables: Mapping[str, SqlReader | StreamReader | Relation], text: str, *, with_hints: bool = False
) -> Any:
    """Return the result of Spark SQL over tables of these names, of which files come as they were found. Columns that
    it does not use are not read, and its filters reach the databases. `with_hints`: as in `from_reader`."""
    from weft.engine import connectors, reader_frames, session

    readers = {name: each for name, each in tables.items() if not isinstance(each, Relation)}
    for name, reader in readers.items():
        reader.close()
        session.refuse_one_host(reader.one_host, f"The table {name} of the query")
    files = {name: each for name, each in tables.items() if isinstance(each, Relation)}
    spark = connectors.ready(session.spark(), *(each.connection for each in files.values()))
    spark = sessions.own_session(spark)
    rows = {name: _empty(spark, reader) for name, reader in readers.items()}
    for name, relation in files.items():
        rows[name] = sessions.moved_to(relations.frame_of(spark, relation), spark)
    spark.conf.set(sessions.QUOTED_NAMES, "true")
    # Names of columns are compared as SQL does, unless a table has two that are the same then.
    has_twins = any(len({*map(str.lower, each.columns)}) < len(each.columns) for each in rows.values())
    spark.conf.set("spark.sql.caseSensitive", str(has_twins).lower())
    for name, each in rows.items():
        each.createOrReplaceTempView(quoted(name))
    result = _planned(spark, text)
    if not readers:
        return with_element_types(result)
    used, scans = _used_columns(result, {_rdd_of(rows[name]): name for name in readers})
    for name, reader in readers.items():
        for column, what in reader.unreadable if isinstance(reader, SqlReader) else ():
            if column in used.get(name, ()):
                raise SchemaError(
                    what,
                    field=column,
                    hint="Leave it out of the query, or read a view of that database that has it as a text.",
                )
        columns = [each for each in reader.schema.names if each in used.get(name, ())] or [_narrow_column(reader)]
        parts = spark.sparkContext.defaultParallelism if isinstance(reader, StreamReader) else 1
        is_read_once = scans[name] <= 1 and "recursive" not in text.lower()
        read = reader_frames.from_reader(
            spark, reader.selecting(columns), parts, is_read_once=is_read_once, with_hints=with_hints
        )
        # The text may name columns in a subquery of which nothing is used: they are there, and null.
        every = (
            F.col(quoted(each.name)) if each.name in columns else F.lit(None).cast(each.dataType).alias(each.name)
            for each in rows[name].schema
        )
        read.select(*every).createOrReplaceTempView(quoted(name))
    return with_element_types(_planned(spark, text))


def _planned(spark: Any, text: str) -> Any:
    """Return the frame of Spark SQL; what is wrong with it is a `WeftError`."""
    from pyspark.errors import AnalysisException

    with outcome.explained("understand the query"):
        try:
            return spark.sql(text)
        except AnalysisException as error:
            raise _explained(error, text, spark) or error from None


def _explained(error: Any, text: str, spark: Any) -> WeftError | None:
    """Return what is wrong with a query, where names are; `None` where Spark's words will do."""
    condition, said = str(error.getCondition()), error.getMessageParameters() or {}
    name = _unquoted(said.get("objectName") or said.get("routineName") or "")
    if condition.startswith("UNRESOLVED_COLUMN"):
        near = [_unquoted(each) for each in said.get("proposal", "").split(", ") if each]
        hint = listed(name, near, f"They have {', '.join(near)}." if near else "")
        if f'"{name}"' in text:
            hint = f"In double quotes is a name; a text is in single quotes: '{name}'."
        return DeclarationError(f"The query names a column that its tables do not have: {name}.", hint=hint or None)
    if condition == "UNRESOLVED_ROUTINE":
        known = [row[0] for row in spark.sql("SHOW FUNCTIONS").collect()]
        near_one = did_you_mean(name.lower(), known, "It can call the functions of Spark SQL.")
        return DeclarationError(f"The query calls a function that is not there: {name}.", hint=near_one)
    return None


def _unquoted(name: str) -> str:
    return name.replace("`", "").strip()


# ----------------------------------------------------------------------------------------------- columns that it uses


def _empty(spark: Any, reader: SqlReader | StreamReader) -> Any:
    """Return a frame without rows of which Spark does not know that it has none: it would leave it out of the plan."""
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.types import from_arrow_schema

    session = spark._jsparkSession
    schema = reader.schema
    for name, _ in reader.unreadable if isinstance(reader, SqlReader) else ():
        schema = schema.append(pa.field(name, pa.string()))  # to see whether the query uses it
    columns = session.parseDataType(from_arrow_schema(schema, prefer_timestamp_ntz=True).json())
    return DataFrame(session.createDataFrame(spark.sparkContext._jsc.emptyRDD(), columns), spark)


def _rdd_of(frame: Any) -> int:
    return int(frame._jdf.queryExecution().analyzed().rdd().id())


def _used_columns(frame: Any, sources: Mapping[int, str]) -> tuple[dict[str, set[str]], Counter[str]]:
    """Return the columns that a query needs of each source, of which the RDD is known, and how often it reads it: by
    the plan that Spark has left columns out of."""
    nodes = [frame._jdf.queryExecution().optimizedPlan()]
    needed = {*_ids(nodes[0].output())}
    leaves = []
    while nodes:
        node = nodes.pop()
        if node.nodeName() == "LogicalRDD":
            leaves.append(node)
            continue
        needed |= {*_ids(node.references().toSeq())}
        for others, is_by_place in ((node.children(), node.nodeName().startswith("Union")), (node.subqueries(), True)):
            below = [others.apply(number) for number in range(others.size())]
            if is_by_place:
                # Nothing refers to the columns of the second branch of a union.
                needed |= {each for one in below for each in _ids(one.output())}
            nodes += below
    used: dict[str, set[str]] = {}
    scans: Counter[str] = Counter()
    for leaf in leaves:
        name, output = sources.get(leaf.rdd().id()), leaf.output()
        if name is not None:
            scans[name] += 1
            for place, column in enumerate(_ids(output)):
                if column in needed:
                    used.setdefault(name, set()).add(output.apply(place).name())
    return used, scans


def _ids(attributes: Any) -> Iterator[int]:
    for place in range(attributes.size()):
        yield attributes.apply(place).exprId().id()


def _narrow_column(reader: SqlReader | StreamReader) -> str:
    """Return the column to read where only the number of rows matters."""
    import pyarrow as pa

    if isinstance(reader, StreamReader):
        return ROWID
    names: list[str] = [each.name for each in reader.schema if pa.types.is_integer(each.type)]
    return (names or list(reader.schema.names))[0]


# ------------------------------------------------------------------------------------------------- inside a database


def pushed_down(
    query: ParsedQuery, default: str | Connection | None = None, parameters: Parameters | None = None
) -> SqlReader:
    """Return the reader of a query that the database of all its tables runs itself: in its own SQL, without Spark."""
    places = [each.connection for each in query.tables] or [current().connection(default)]
    for relation in query.tables:
        if relation.table is None or not relation.connection.is_same_place(places[0]):
            raise DeclarationError(
                f"The query cannot be pushed down: {relation.name} is not a table of the database of all others.",
                hint="Leave pushdown out: Spark joins tables of any connections.",
            )
    tables = open_tables(places[0])
    try:
        for relation in query.tables:
            relations.refuse_unknown_table(tables, relation)
        names = [tables.table(*each.table) for each in query.tables if each.table is not None]
        sql = query.naming(names, tables.quote, tables.dialect, parameters)
        return SqlReader(tables, sql, tables.describe(sql))
    except BaseException:
        tables.close()
        raise
