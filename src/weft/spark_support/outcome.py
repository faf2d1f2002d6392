"""The outcome of a task for the driver, and Spark's errors for the user.

A `WeftError` travels as a value: Spark would try a refused load four times, and then show two stack traces around
the one line that matters.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from weft.errors import WeftError

# The class of an error of Java, before the condition by which Spark names it.
_CLASS = re.compile(r"^[\w.$]+: (?=\[[A-Z_.]+\])")
_ENDED = "Python worker exited unexpectedly"
_called: ContextVar[Sequence[str]] = ContextVar("_called", default=())


def of(work: Callable[[], Any], *, finally_: Callable[[], None] = lambda: None) -> bytes:
    """Return the result of `work`, or the `WeftError` that it raised, as bytes."""
    try:
        return pickle.dumps(("done", work()))
    except WeftError as error:
        return pickle.dumps(("failed", (type(error), error.args, error.__dict__)))
    finally:
        finally_()


def unpack(outcome: bytes) -> Any:
    """Return the result, or the error raised again."""
    kind, value = pickle.loads(outcome)
    if kind == "done":
        return value
    # Not by its constructor, which for some errors takes more than the text.
    kind_of_error, arguments, state = value
    error = kind_of_error.__new__(kind_of_error, *arguments)
    error.__dict__.update(state)
    raise error


@contextmanager
def calling(udfs: Sequence[str]) -> Iterator[None]:
    """Say which UDFs are called in the block: one that ends its process cannot say so itself."""
    token = _called.set(udfs)
    try:
        yield
    finally:
        _called.reset(token)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of Spark's into a `WeftError`: its most useful line, and where the rest is."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        if _ENDED in str(error) and (udfs := _called.get()):
            raise WeftError(
                f"Spark could not {what}: the Python process ended that ran the UDF"
                f"{'' if len(udfs) == 1 else 's'} {', '.join(udfs)}.",
                hint="os._exit, a crash of native code or too little memory ends it. More is in .weft/spark.log.",
            ) from error
        raise WeftError(
            f"Spark could not {what}: {_useful_line(str(error))}", hint="More is in .weft/spark.log."
        ) from error


def _useful_line(text: str) -> str:
    # Py4J's first line names the call, and the next one why it failed.
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    lines = [_CLASS.sub("", line) for line in lines]
    lines = [line for line in lines if not line.startswith("An error occurred while calling ")] or lines
    if _ENDED in text:
        return "a Python process ended, as too little memory makes it or a crash of native code"
    ours = [
        line for line in lines if "Error" in line and not line.startswith(("at ", "File ", "org.apache", "Traceback"))
    ]
    return (ours or lines or ["no reason given"])[-1 if ours else 0][:500]
