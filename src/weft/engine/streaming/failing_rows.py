"""Which rows of a batch `transform_sql` fails for, each with the reason.

Of SQL that makes each row of one row of `source`, joined with others or not, Spark computes all at once whether a row
fails (`TryEval`), and the driver then computes the failing ones again for their reasons. Other SQL (that groups or
sorts rows, or has a subquery in FROM) is tried over halves, until the failing rows alone are left, and so are functions
in Python that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import pyarrow as pa

from weft.engine.frame_projection import gathered
from weft.errors import ConnectionFailedError, WeftError
from weft.spark_support import outcome
from weft.spark_support.sessions import java_class, of_plan

_ROW = "_weft_row"


class FailingRows:
    """Searches rows that this process has. `frame` makes a DataFrame of them, `transform` runs the SQL over it. Errors
    say that Spark could not do `what`."""

    def __init__(self, what: str, frame: Callable[[pa.Table], Any], transform: Callable[[Any], Any]) -> None:
        self._what, self._frame, self._transform = what, frame, transform

    def attempt(self, rows: pa.Table) -> pa.Table:
        """Return what the SQL makes of rows."""
        result = self._transform(self._frame(rows))
        with outcome.explained(self._what):
            return gathered(result)

    def split(self, rows: pa.Table, *, is_known: bool = False) -> tuple[pa.Table, dict[int, str]]:
        """Return what the SQL makes of the rows that it does not fail for, and the numbers of the others, each with the
        reason. `is_known`: all together have failed."""
        bad: dict[int, str] = {}
        result = None if is_known else self._result(rows)
        if result is None:
            with suppress(Exception):  # other SQL, or what Spark cannot compute in this way
                bad = self._find_at_once(rows)
            result = self._result(without_rows(rows, bad)) if bad else None
        if result is None:
            left = [number for number in range(len(rows)) if number not in bad]
            more = self._find_by_halving(without_rows(rows, bad))
            bad |= {left[number]: why for number, why in more.items()}
            result = self.attempt(without_rows(rows, bad))
        # SQL may return a row for no rows, such as a sum over nothing.
        return result if len(bad) < len(rows) else result.slice(0, 0), bad

    def _result(self, rows: pa.Table) -> pa.Table | None:
        result = self._result_or_error(rows)
        return None if isinstance(result, WeftError) else result

    def _result_or_error(self, rows: pa.Table) -> pa.Table | WeftError:
        """Return what the SQL makes of rows, or why it fails. A lookup whose database is away is no row's fault."""
        try:
            return self.attempt(rows)
        except ConnectionFailedError:
            raise
        except WeftError as error:
            return error

    def _find_at_once(self, rows: pa.Table) -> dict[int, str]:
        from pyspark.sql.classic.column import Column

        query = self._transform(self._frame(rows.append_column(_ROW, pa.array(range(len(rows)), pa.int64()))))
        plan, new = query._jdf.queryExecution().analyzed(), _Expressions(query.sparkSession)
        if plan.nodeName() != "Project":
            return {}
        values = new.struct(plan.projectList())
        fails, plan = new("IsNull", new("TryEval", values)), plan.child()
        while plan.nodeName() == "Filter":
            # A row that the condition leaves out does not fail, whatever SELECT would make of it.
            is_wanted = new("TryEval", new("If", plan.condition(), new.true, new.false))
            fails = new("If", new("IsNull", is_wanted), new.true, new("And", is_wanted, fails))
            values = new("If", plan.condition(), values, new.null_of(values))
            plan = plan.child()
        source = of_plan(query.sparkSession, plan)
        if _ROW not in source.columns:
            return {}
        failing = source.where(Column(new.column(fails)))._jdf.queryExecution()
        bound = new.bound(values, failing.analyzed().output())
        at, reasons = source.columns.index(_ROW), {}
        for row in failing.executedPlan().executeCollect():
            number = row.getLong(at)
            reasons[number] = self._reason(bound, row) or self._reason_alone(rows.slice(number, 1))
        return reasons

    def _reason(self, expression: Any, row: Any) -> str | None:
        """Return why an expression fails for a row; `None` where the driver cannot compute it: it has no Python
        workers, nor the results of subqueries."""
        from py4j import protocol

        client, name = expression._gateway_client, expression._target_id
        command = f"{protocol.CALL_COMMAND_NAME}{name}\neval\n{protocol.get_command_part(row)}"
        answer = client.send_command(f"{command}{protocol.END_COMMAND_PART}")
        try:
            with outcome.explained(self._what):
                # Not by a call: PySpark asks the JVM for the whole trace of each error, which takes 15 ms.
                protocol.get_return_value(answer, client, name, "eval")
        except WeftError as error:
            return None if "[INTERNAL_ERROR]" in error.what else error.what
        return None

    def _reason_alone(self, row: pa.Table) -> str:
        alone = self._result_or_error(row)
        if isinstance(alone, WeftError):
            return alone.what
        return f"Spark could not {self._what}: it fails for this row among the others of its batch"

    def _find_by_halving(self, rows: pa.Table) -> dict[int, str]:
        """Try halves of rows that fail together, with as few failures as possible: after each one Spark restarts
        Python's workers."""
        reasons: dict[int, str] = {}

        def fails(first: int, end: int, *, is_known: bool = False) -> bool:
            if not is_known or end - first == 1:
                result = self._result_or_error(rows.slice(first, end - first))
                if not isinstance(result, WeftError):
                    return False
                if end == first:  # no row is to blame
                    raise result
                if end - first == 1:
                    reasons[first] = result.what
                    return True
            middle = (first + end) // 2
            # Where the first half is good, it is the other one that fails.
            fails(middle, end, is_known=not fails(first, middle))
            return True

        fails(0, len(rows), is_known=len(rows) > 0)
        return reasons


def without_rows(rows: pa.Table, numbers: Collection[int]) -> pa.Table:
    """Return the rows but for those with these numbers."""
    return rows.take(pa.array([number for number in range(len(rows)) if number not in numbers], pa.int64()))


class _Expressions:
    """Makes expressions of Spark's: `new("IsNull", other)`."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        literal = self._class("Literal")
        self.true, self.false = literal.TrueLiteral(), literal.FalseLiteral()

    def __call__(self, name: str, *children: Any) -> Any:
        return self._class(name)(*children)

    def _class(self, name: str) -> Any:
        return java_class(self._spark, f"org.apache.spark.sql.catalyst.expressions.{name}")

    def struct(self, values: Any) -> Any:
        return self._class("CreateStruct").apply(values)

    def null_of(self, other: Any) -> Any:
        return self._class("Literal").create(None, other.dataType())

    def column(self, expression: Any) -> Any:
        return java_class(self._spark, "org.apache.spark.sql.classic.ExpressionUtils").column(expression)

    def bound(self, expression: Any, columns: Any) -> Any:
        """Return an expression that can be computed for rows of these columns."""
        return self._class("BindReferences").bindReference(expression, self("package$AttributeSeq", columns), False)
