"""Functions of your own for the SQL of streaming pipelines: `@weft.udf` and `@weft.udaf`.

They are declared here, and checked; `weft.engine.streaming.functions` makes Spark call them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

from weft.errors import DeclarationError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

Class = TypeVar("Class", bound=type[Any])

ARROW_TYPES = {
    "Int8": "int8",
    "Int16": "int16",
    "Int32": "int32",
    "Int64": "int64",
    "UInt8": "uint8",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
    "Float32": "float32",
    "Float64": "float64",
    "Boolean": "bool_",
    "Utf8": "string",
    "Binary": "binary",
}
"""The types of arguments, states and results, and the functions of PyArrow that make them."""

_METHODS = ("update_batch", "merge_batch", "evaluate", "state")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Udf:
    """A function that SQL can call. Called from Python it is the function itself: PyArrow arrays in, an array out."""

    __name__: str

    def __init__(self, function: Callable[..., Any], sql_name: str, args: tuple[str, ...], returns: str) -> None:
        self.function, self.sql_name, self.args, self.returns = function, sql_name, args, returns
        update_wrapper(self, function)

    def __call__(self, *arrays: Any) -> Any:
        return self.function(*arrays)

    def __repr__(self) -> str:
        return f"<udf {self.sql_name}({', '.join(self.args)}) -> {self.returns}>"


@dataclass(frozen=True)
class Udaf:
    """What `@weft.udaf` was told of a class."""

    made: type[Any]
    sql_name: str
    args: tuple[str, ...]
    state: tuple[str, ...]
    returns: str


def udf(*, args: Sequence[str], returns: str, name: str | None = None) -> Callable[[Callable[..., Any]], Udf]:
    """Declare a function for `transform_sql`, called once a batch with PyArrow arrays; it returns one as long.

    `args` and `returns` are types: "Int8" to "Int64", "UInt8" to "UInt64", "Float32", "Float64", "Boolean", "Utf8" and
    "Binary". SQL calls it by `name`, or by its own. Its result may depend on nothing but its arguments, row by row.
    """

    def declare(function: Callable[..., Any]) -> Udf:
        own = getattr(function, "__name__", None)
        where = f"udf {name or own}"
        if not callable(function) or isinstance(function, type):
            raise DeclarationError(f"{where}: @udf is for functions.", hint="For a class: @udaf.")
        made = Udf(function, _sql_name(name, own, where), _types(args, "args", where), _type(returns, "returns", where))
        _refuse_other_parameters(function, made.args, where)
        return made

    return declare


def udaf(
    *, args: Sequence[str], state: Sequence[str], returns: str, name: str | None = None
) -> Callable[[Class], Class]:
    """Declare a class whose objects aggregate the rows of one group each, for `transform_sql`.

    `update_batch(*args)` takes rows in, `state()` gives what was gathered so far as a tuple of PyArrow arrays of length
    1, `merge_batch(*state)` takes such states of others in, `evaluate()` gives the result as an array of length 1. The
    types are those of `udf`.
    """

    def declare(made: Class) -> Class:
        own = getattr(made, "__name__", None)
        where = f"udaf {name or own}"
        if not isinstance(made, type):
            raise DeclarationError(f"{where}: @udaf is for classes.", hint="For a function: @udf.")
        missing = [each for each in _METHODS if not callable(getattr(made, each, None))]
        if missing:
            raise DeclarationError(
                f"{where}: the class {own} has no {', '.join(missing)}.", hint=f"It needs {', '.join(_METHODS)}."
            )
        declared = Udaf(
            made,
            _sql_name(name, own, where),
            _types(args, "args", where),
            _types(state, "state", where),
            _type(returns, "returns", where),
        )
        _refuse_other_parameters(made, (), where)
        _refuse_other_parameters(made.update_batch, ("self", *declared.args), where)
        _refuse_other_parameters(made.merge_batch, ("self", *declared.state), where)
        made.weft_udaf, made.sql_name = declared, declared.sql_name
        return made

    return declare


def declared_udf(given: Any) -> Udf:
    """What `udfs=` was given, which must be decorated."""
    if isinstance(given, Udf):
        return given
    raise DeclarationError(
        f"udfs: {given!r} is not decorated with @udf.",
        hint="Give a class with @udaf to aggregate_udfs." if hasattr(given, "weft_udaf") else None,
    )


def declared_udaf(given: Any) -> Udaf:
    """What was told of a class that `aggregate_udfs=` was given."""
    # Of this class itself: one made of a decorated class is another.
    found = vars(given).get("weft_udaf") if isinstance(given, type) else None
    if isinstance(found, Udaf):
        return found
    raise DeclarationError(
        f"aggregate_udfs: {given!r} is not a class decorated with @udaf.",
        hint="Give a function with @udf to udfs." if isinstance(given, Udf) else None,
    )


def arrow_type(name: str) -> pa.DataType:
    """The type of Arrow's."""
    import pyarrow

    return getattr(pyarrow, ARROW_TYPES[name])()


def _sql_name(name: str | None, own: str | None, where: str) -> str:
    given = own if name is None else name
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        raise DeclarationError(
            f"{where}: {given!r} cannot be the name of a function in SQL.",
            hint='Give it one of letters, digits and _: name="my_function".',
        )
    return given


def _types(given: Any, option: str, where: str) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise DeclarationError(f"{where}: {option} is {given!r}.", hint=f'A tuple of types: {option}=("Float64",).')
    return tuple(_type(each, option, where) for each in given)


def _type(given: Any, option: str, where: str) -> str:
    if isinstance(given, str) and given in ARROW_TYPES:
        return given
    raise DeclarationError(
        f"{where}: {option} has the unknown type {given!r}.",
        hint=did_you_mean(str(given), ARROW_TYPES, f"Known: {', '.join(ARROW_TYPES)}."),
    )


def _refuse_other_parameters(function: Callable[..., Any], declared: tuple[str, ...], where: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built into Python: it does not say what it takes
    try:
        signature.bind(*declared)
    except TypeError:
        raise DeclarationError(
            f"{where}: {function.__qualname__}{signature} does not take what is declared: "
            f"({', '.join(declared) or 'nothing'})."
        ) from None
