"""Users' functions in Spark: their registration, the SQL that calls them, and what runs in the tasks.

A `@udf` is an Arrow UDF of Spark's. Spark's own aggregates in Python cannot be mixed with built-in ones, and give no
row for no rows. So a `@udaf` is made of two things that Spark mixes freely: `collect_list`, which gathers the rows of a
group, and an Arrow UDF over many such lists at once. Where everything is one group, rows become states first.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from weft.engine import frames
from weft.errors import DeclarationError, WeftError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.udfs import Udaf, Udf, arrow_type, declared_udaf, declared_udf

_PREFIX = "__weft_"
# Spark has no unsigned types.
_STORED_UNSIGNED = {
    "UInt8": pa.int16(),
    "UInt16": pa.int32(),
    "UInt32": pa.int64(),
    "UInt64": pa.decimal128(20, 0),
}
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, as JSON may have it: UTF-8 has none."""
_pickling = threading.Lock()


def register(spark: Any, udfs: Sequence[Any], aggregate_udfs: Sequence[Any]) -> None:
    """Make functions known to a session, under names that nothing else has there."""
    from pyspark.sql.pandas.functions import arrow_udf

    functions, aggregates = [declared_udf(each) for each in udfs], [declared_udaf(each) for each in aggregate_udfs]
    if not functions and not aggregates:
        return
    built_in = {row[0].lower() for row in spark.sql("SHOW SYSTEM FUNCTIONS").collect()}
    seen: set[str] = set()
    declared: list[Udf | Udaf] = [*functions, *aggregates]
    for each in declared:
        name = each.sql_name.lower()
        if name in built_in or name in seen:
            raise DeclarationError(
                f"The UDF {each.sql_name!r} has the name of "
                + ("a function that Spark has already." if name in built_in else "another UDF."),
                hint=f'Give it another name in SQL: name="my_{each.sql_name}".',
            )
        seen.add(name)

    def add(name: str, run: Callable[..., pa.Array], returns: str) -> None:
        # Spark reads from the annotations of `run` which kind of function it is; its own annotations do not say so.
        spark.udf.register(name, arrow_udf(run, returns))  # type: ignore[call-overload]

    for udf in functions:
        add(udf.sql_name, _scalar(udf), _spark_type(udf.returns))
    for udaf in aggregates:
        name, returns = udaf.sql_name.lower(), _spark_type(udaf.returns)
        states = ", ".join(f"s{number}: {_spark_type(each)}" for number, each in enumerate(udaf.state))
        add(f"{_PREFIX}rows_{name}", _over_lists(udaf, "update_batch"), returns)
        add(f"{_PREFIX}partial_{name}", _partial(udaf), f"struct<{states}>")
        add(f"{_PREFIX}states_{name}", _over_lists(udaf, "merge_batch"), returns)


def _spark_type(declared: str) -> str:
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(_STORED_UNSIGNED.get(declared, arrow_type(declared))).simpleString()


def transformed(frame: Any, sql: str, aggregate_udfs: Sequence[Any] = ()) -> Any:
    """Return the result of Spark SQL over the table `source`, which may call the aggregates that were registered."""
    return frames.transformed(frame, rewritten(sql, [declared_udaf(each) for each in aggregate_udfs]))


# ---------------------------------------------------------------------------------------------------------------- SQL


def selecting_also(sql: str, column: str) -> str:
    """Return SQL that also selects a column of `source`. Spark refuses it where SQL groups the rows of `source`."""
    from sqlglot import tokenize
    from sqlglot.tokenizer_core import TokenType

    depth = 0
    for token in tokenize(sql, read="spark"):
        depth += (token.token_type == TokenType.L_PAREN) - (token.token_type == TokenType.R_PAREN)
        if depth == 0 and token.token_type == TokenType.FROM:
            return f"{sql[: token.start]}, {column} {sql[token.start :]}"
    return sql


def rewritten(sql: str, aggregates: Sequence[Udaf]) -> str:
    """Return SQL that calls what was registered for aggregates in their place. All other text stays as it is."""
    if not aggregates:
        return sql
    from sqlglot.tokenizer_core import TokenType

    tokens = _tokens(sql)
    kinds = [token.token_type for token in tokens]
    words = [token.text.upper() for token in tokens if token.token_type != TokenType.STRING]
    # A subquery may be grouped by what it is joined on, and PIVOT groups without GROUP BY.
    is_one_group = words.count("SELECT") == 1 and not any(word.startswith(("GROUP", "PIVOT")) for word in words)
    pieces: list[tuple[int, int, str]] = []  # from, up to, and what stands there instead
    for udaf, number, first, ends in _calls(tokens, aggregates):
        last = end = ends[-1]
        is_distinct = first > number + 2
        # FILTER (…), OVER (…) and OVER name belong to what gathers the rows.
        while end + 2 < len(tokens) and kinds[end + 1] in (TokenType.FILTER, TokenType.OVER):
            end = _closing(tokens, end + 2) if kinds[end + 2] == TokenType.L_PAREN else end + 2
        name = udaf.sql_name.lower()
        if is_one_group and end == last and not is_distinct:
            start = f"{_PREFIX}states_{name}(collect_list({_PREFIX}partial_{name}("
            named = [""] * len(ends)
        else:
            start = f"{_PREFIX}rows_{name}(collect_list({'DISTINCT ' if is_distinct else ''}struct("
            named = [f" AS a{position}" for position in range(len(ends))]
        named[-1] += ")"
        pieces.append((tokens[number].start, tokens[first].start, start))
        pieces += [(tokens[each].start, tokens[each].start, text) for each, text in zip(ends, named, strict=True)]
        pieces.append((tokens[end].end + 1, tokens[end].end + 1, ")"))
    texts, done = [], 0
    for begin, upto, instead in sorted(pieces, key=lambda piece: piece[0]):
        texts += [sql[done:begin], instead]
        done = upto
    return "".join((*texts, sql[done:]))


def check_calls(sql: str, udfs: Sequence[Any], aggregate_udfs: Sequence[Any]) -> None:
    """Raise if SQL calls a function with another number of arguments than it declares. Spark finds that with rows."""
    declared: list[Any] = [*map(declared_udf, udfs), *map(declared_udaf, aggregate_udfs)]
    if declared:
        for _ in _calls(_tokens(sql), declared):
            pass


def called_by(pipeline: StreamingPipeline) -> list[str]:
    """Return the names of the user's functions that the batches of a pipeline call."""
    window, udfs = pipeline.window, [declared_udf(each) for each in pipeline.udfs]
    declared = [*udfs, *(declared_udaf(each) for each in pipeline.aggregate_udfs)]
    aggregates = [] if window is None else [each.udaf for each in window.aggregations if each.udaf is not None]
    emit_sql = None if window is None else window.emit_sql
    calls = [_calls(_tokens(sql), declared) for sql in (pipeline.transform_sql, emit_sql) if sql and declared]
    called = [*aggregates, *(call[0] for call in itertools.chain(*calls))]
    return sorted({each.sql_name for each in called})


def _tokens(sql: str) -> list[Any]:
    from sqlglot import tokenize
    from sqlglot.errors import TokenError

    try:
        return list(tokenize(sql, read="spark"))
    except TokenError as error:
        raise DeclarationError(f"transform_sql cannot be read: {error}") from None


def _calls(tokens: Sequence[Any], declared: Sequence[Any]) -> Iterator[tuple[Any, int, int, list[int]]]:
    """Yield each call of a function: its token, that of its first argument, and those that end its arguments. From the
    last call to the first: of two that end at one place, the inner one ends first."""
    from sqlglot.tokenizer_core import TokenType

    by_name = {each.sql_name.lower(): each for each in declared}
    kinds = [token.token_type for token in tokens]
    for number in reversed(range(len(tokens) - 1)):
        called = by_name.get(tokens[number].text.lower())
        is_call = kinds[number + 1] == TokenType.L_PAREN and kinds[number] != TokenType.STRING
        if called is None or not is_call or (number > 0 and kinds[number - 1] == TokenType.DOT):
            continue
        last = _closing(tokens, number + 1)
        first = number + 2 + (kinds[number + 2] == TokenType.DISTINCT)
        ends = [*_commas(kinds, first, last), last] if first < last else []
        # `f(*)` and `f(t.*)` have as many arguments as there are columns.
        before = (TokenType.L_PAREN, TokenType.COMMA, TokenType.DOT)
        has_star = any(kinds[each] == TokenType.STAR and kinds[each - 1] in before for each in range(first, last))
        if len(ends) != len(called.args) and not (has_star and isinstance(called, Udf)):
            count = len(called.args)
            raise DeclarationError(
                f"transform_sql, line {tokens[number].line}: {called.sql_name} takes {count} "
                f"argument{'' if count == 1 else 's'} ({', '.join(called.args)}), not {len(ends)}."
            )
        yield called, number, first, ends


def _closing(tokens: Sequence[Any], opened: int) -> int:
    """Return where the parenthesis at a token is closed."""
    from sqlglot.tokenizer_core import TokenType

    depth = 0
    for number in range(opened, len(tokens)):
        kind = tokens[number].token_type
        depth += (kind == TokenType.L_PAREN) - (kind == TokenType.R_PAREN)
        if depth == 0:
            return number
    raise DeclarationError(f"transform_sql: a parenthesis in line {tokens[opened].line} is never closed.")


def _commas(kinds: Sequence[Any], first: int, last: int) -> Iterator[int]:
    from sqlglot.tokenizer_core import TokenType

    depth = 0
    for number in range(first, last):
        depth += kinds[number] in (TokenType.L_PAREN, TokenType.L_BRACKET)
        depth -= kinds[number] in (TokenType.R_PAREN, TokenType.R_BRACKET)
        if depth == 0 and kinds[number] == TokenType.COMMA:
            yield number


# -------------------------------------------------------------------------------------------------------------- tasks


def _scalar(udf: Udf) -> Callable[..., pa.Array]:
    name, args, returns, code = f"UDF {udf.sql_name!r}", udf.args, udf.returns, _portable(udf.function)

    def run(*arrays: pa.Array) -> pa.Array:
        function, arguments = _loaded(code), _arguments(arrays, args, name)
        with _one_line_error(name):
            result = function(*arguments)
        return _stored(_checked(result, returns, len(arrays[0]), name), returns)

    return run


def _partial(udaf: Udaf) -> Callable[..., pa.Array]:
    """Return a function that makes one state of all rows of a batch, in the first row; the others have none."""
    name, args, state, code = f"UDF {udaf.sql_name!r}", udaf.args, udaf.state, _portable(udaf.cls)

    def run(*arrays: pa.Array) -> pa.Array:
        cls, arguments = _loaded(code), _arguments(arrays, args, name)
        with _one_line_error(name):
            aggregate = cls()
            aggregate.update_batch(*arguments)
            result = aggregate.state()
        fields = _state(result, state, f"{name}: {cls.__name__}.state()")
        first = pa.StructArray.from_arrays(fields, names=[f"s{number}" for number in range(len(state))])
        rows = len(arrays[0])
        return pa.concat_arrays([first, pa.nulls(rows, first.type)]).slice(0, rows)

    return run


def state_of(udaf: Udaf, method: str) -> Any:
    """Return a function of Spark from lists of structs, one a group, to the state of each group, a struct; of a group
    whose states cannot be merged, to the `error`."""
    from pyspark.sql.pandas.functions import arrow_udf

    state, catches = udaf.state, method == "merge_batch"
    name = f"UDF {udaf.sql_name!r}: {udaf.cls.__name__}.state()"
    over_lists = _grouped(udaf, method, "state", lambda result: _state(result, state, name))

    def run(lists: pa.Array) -> pa.Array:
        nothing = [pa.nulls(1, _STORED_UNSIGNED.get(each, arrow_type(each))) for each in state]
        states, errors = over_lists(lists, nothing, catches)
        columns = [*(pa.concat_arrays(column) for column in zip(*states, strict=True)), errors]
        return pa.StructArray.from_arrays(columns, names=[*(f"s{number}" for number in range(len(state))), "error"])

    kinds = ", ".join(f"s{number}: {_spark_type(each)}" for number, each in enumerate(state))
    return arrow_udf(run, f"struct<{kinds}, error: string>")  # type: ignore[call-overload]


def result_of(udaf: Udaf) -> Any:
    """Return a function of Spark from lists of states, one a group, to the `value` of each group, or its `error`."""
    from pyspark.sql.pandas.functions import arrow_udf

    over_lists, returns = _over_lists(udaf, "merge_batch", catches=True), _spark_type(udaf.returns)
    return arrow_udf(over_lists, f"struct<value: {returns}, error: string>")  # type: ignore[call-overload]


def _grouped(
    udaf: Udaf, method: str, gives: str, checked: Callable[[Any], Any]
) -> Callable[[pa.Array, Any, bool], tuple[list[Any], pa.Array]]:
    """Return a function from lists of structs, one a group, to what each group gives; `method` takes the structs. Where
    it catches errors, a group that fails gives nothing but its error."""
    name, code = f"UDF {udaf.sql_name!r}", _portable(udaf.cls)
    kinds = udaf.args if method == "update_batch" else udaf.state

    def run(lists: pa.Array, nothing: Any, catches: bool) -> tuple[list[Any], pa.Array]:
        cls, results, errors = _loaded(code), [], []
        fields = _arguments(lists.values.flatten(), kinds, name)
        for start, stop in itertools.pairwise(lists.offsets.to_pylist()):
            error = None
            try:
                with _one_line_error(name):
                    aggregate = cls()
                    if stop > start:
                        getattr(aggregate, method)(*(each.slice(start, stop - start) for each in fields))
                    value = getattr(aggregate, gives)()
                result = checked(value)
            except WeftError as failure:
                if not catches:
                    raise
                result, error = nothing, failure.what
            results.append(result)
            errors.append(error)
        return results, pa.array(errors, pa.string())

    return run


def _over_lists(udaf: Udaf, method: str, *, catches: bool = False) -> Callable[..., pa.Array]:
    """Return a function from lists of structs, one a group, to the result of each group; `method` takes the structs.
    `catches`: to structs of the value and the error of each group."""
    returns, evaluate = udaf.returns, f"UDF {udaf.sql_name!r}: {udaf.cls.__name__}.evaluate()"
    over_lists = _grouped(udaf, method, "evaluate", lambda result: _checked(result, returns, 1, evaluate))

    def run(lists: pa.Array) -> pa.Array:
        kind = arrow_type(returns)
        results, errors = over_lists(lists, pa.nulls(1, kind), catches)
        values = _stored(pa.concat_arrays([pa.array([], kind), *results]), returns)
        return pa.StructArray.from_arrays([values, errors], names=["value", "error"]) if catches else values

    return run


def _portable(function: Any) -> bytes:
    """Return a function or class with what its module defines: workers elsewhere do not have that module."""
    from pyspark import cloudpickle

    pickler: Any = cloudpickle  # it has no annotations
    module = sys.modules.get(function.__module__)
    with _pickling:
        is_other = module is not None and module.__name__ not in pickler.list_registry_pickle_by_value()
        if is_other:
            pickler.register_pickle_by_value(module)
        try:
            return bytes(pickler.dumps(function))
        finally:
            if is_other:
                pickler.unregister_pickle_by_value(module)


@functools.lru_cache(maxsize=64)
def _loaded(code: bytes) -> Any:
    from pyspark import cloudpickle

    return cloudpickle.loads(code)


def _state(result: Any, declared: Sequence[str], method: str) -> list[pa.Array]:
    """Return what `state()` of an aggregate gave, as Spark keeps it."""
    if not isinstance(result, tuple | list) or len(result) != len(declared):
        raise WeftError(f"{method} gave {_described(result)}, and a tuple of {len(declared)} arrays is declared.")
    return [_stored(_checked(each, kind, 1, method), kind) for each, kind in zip(result, declared, strict=True)]


def _arguments(arrays: Sequence[pa.Array], declared: Sequence[str], name: str) -> list[pa.Array]:
    """Return arguments as the types that were declared, where that loses nothing."""
    if len(arrays) != len(declared):
        raise WeftError(
            f"The {name} takes {len(declared)} arguments ({', '.join(declared)}), and SQL gives {len(arrays)}."
        )
    arguments = []
    for number, (array, kind) in enumerate(zip(arrays, declared, strict=True), 1):
        wanted = arrow_type(kind)
        if not _fits(array.type, wanted):
            raise WeftError(f"Argument {number} of the {name} is {array.type} in SQL, and {kind} is declared: CAST it.")
        try:
            arguments.append(array.cast(wanted))
        except pa.ArrowInvalid as error:
            raise WeftError(f"Argument {number} of the {name} does not fit {kind}: {error}") from None
    return arguments


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    types = pa.types
    if kind == wanted or types.is_null(kind):
        return True
    if types.is_integer(wanted):
        return bool(types.is_integer(kind) or (types.is_decimal(kind) and kind.scale == 0))
    if types.is_floating(wanted):
        is_shorter = types.is_floating(kind) and kind.bit_width < wanted.bit_width
        return bool(is_shorter or types.is_integer(kind) or types.is_decimal(kind))
    return (str(kind), str(wanted)) in (("large_string", "string"), ("large_binary", "binary"))


def _checked(result: Any, declared: str, length: int, name: str) -> pa.Array:
    if not isinstance(result, pa.Array) or result.type != arrow_type(declared):
        raise WeftError(f"The {name} gave {_described(result)}, and an array of {declared} is declared.")
    if len(result) != length:
        raise WeftError(f"The {name} gave {len(result)} values, and {length} are wanted.")
    return result


def _described(result: Any) -> str:
    if isinstance(result, pa.Array | pa.ChunkedArray):
        return f"{type(result).__name__} of {result.type}"
    return f"{type(result).__module__}.{type(result).__qualname__}".removeprefix("builtins.")


def _stored(array: pa.Array, declared: str) -> pa.Array:
    return array.cast(_STORED_UNSIGNED[declared]) if declared in _STORED_UNSIGNED else array


@contextmanager
def _one_line_error(name: str) -> Iterator[None]:
    """Raise an error of the user's code in one line: the driver shows the last line of what a worker reports."""
    try:
        yield
    except (Exception, SystemExit) as error:
        theirs = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
        where = f" in line {theirs[0].lineno} of {Path(theirs[0].filename).name}" if theirs else ""
        what = _SURROGATE.sub("\ufffd", " ".join(f"{type(error).__name__}: {_text_of(error)}".split()))
        # A worker of Spark's never ends if it cannot encode its report, which has the causes too.
        is_plain = _SURROGATE.search("".join(traceback.format_exception(error))) is None
        raise WeftError(f"The {name} failed{where}: {what}") from (error if is_plain else None)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"its text cannot be read, by {type(failure).__name__}"
