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
    """The declaration of a class by `@weft.udaf`."""

    cls: type[Any]
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
        declared = Udf(
            function, _sql_name(name, own, where), _types(args, "args", where), _type(returns, "returns", where)
        )
        _refuse_other_parameters(function, declared.args, where)
        return declared

    return declare


def udaf(
    *, args: Sequence[str], state: Sequence[str], returns: str, name: str | None = None
) -> Callable[[Class], Class]:
    """Declare a class whose objects aggregate the rows of one group each, for `transform_sql`.

    `update_batch(*args)` takes rows in, `state()` gives what was gathered so far as a tuple of PyArrow arrays of length
    1, `merge_batch(*state)` takes such states of others in, `evaluate()` gives the result as an array of length 1. The
    types are those of `udf`.
    """

    def declare(cls: Class) -> Class:
        own = getattr(cls, "__name__", None)
        where = f"udaf {name or own}"
        if not isinstance(cls, type):
            raise DeclarationError(f"{where}: @udaf is for classes.", hint="For a function: @udf.")
        missing = [each for each in _METHODS if not callable(getattr(cls, each, None))]
        if missing:
            raise DeclarationError(
                f"{where}: the class {own} has no {', '.join(missing)}.", hint=f"It needs {', '.join(_METHODS)}."
            )
        declared = Udaf(
            cls,
            _sql_name(name, own, where),
            _types(args, "args", where),
            _types(state, "state", where),
            _type(returns, "returns", where),
        )
        _refuse_other_parameters(cls, (), where)
        _refuse_other_parameters(cls.update_batch, ("self", *declared.args), where)
        _refuse_other_parameters(cls.merge_batch, ("self", *declared.state), where)
        cls.weft_udaf, cls.sql_name = declared, declared.sql_name
        return cls

    return declare


def declared_udf(function: Any) -> Udf:
    """Return a function of `udfs=`, which must be decorated."""
    if isinstance(function, Udf):
        return function
    raise DeclarationError(
        f"udfs: {function!r} is not decorated with @udf.",
        hint="Give a class with @udaf to aggregate_udfs." if hasattr(function, "weft_udaf") else None,
    )


def declared_udaf(cls: Any) -> Udaf:
    """Return the declaration of a class of `aggregate_udfs=`."""
    # The declaration of this class itself, not of a decorated base class.
    declared = vars(cls).get("weft_udaf") if isinstance(cls, type) else None
    if isinstance(declared, Udaf):
        return declared
    raise DeclarationError(
        f"aggregate_udfs: {cls!r} is not a class decorated with @udaf.",
        hint="Give a function with @udf to udfs." if isinstance(cls, Udf) else None,
    )


def arrow_type(name: str) -> pa.DataType:
    import pyarrow

    return getattr(pyarrow, ARROW_TYPES[name])()


def _sql_name(name: str | None, own: str | None, where: str) -> str:
    chosen = own if name is None else name
    if not isinstance(chosen, str) or not _NAME.fullmatch(chosen):
        raise DeclarationError(
            f"{where}: {chosen!r} cannot be the name of a function in SQL.",
            hint='Give it one of letters, digits and _: name="my_function".',
        )
    return chosen


def _types(names: Any, option: str, where: str) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not names:
        raise DeclarationError(f"{where}: {option} is {names!r}.", hint=f'A tuple of types: {option}=("Float64",).')
    return tuple(_type(each, option, where) for each in names)


def _type(name: Any, option: str, where: str) -> str:
    if isinstance(name, str) and name in ARROW_TYPES:
        return name
    raise DeclarationError(
        f"{where}: {option} has the unknown type {name!r}.",
        hint=did_you_mean(str(name), ARROW_TYPES, f"Known: {', '.join(ARROW_TYPES)}."),
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
