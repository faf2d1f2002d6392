"""The rows that SQL fails for: found all at once where each row is computed alone, else by halving; the same ones."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from weft.engine import frames
from weft.engine.streaming.failing_rows import FailingRows
from weft.engine.streaming.transform import memory_of
from weft.errors import ConnectionFailedError, WeftError

ROWS = pa.table({"n": [1, 2, 3, 4, 5, 6], "v": ["1", "x", "3", None, "5", "-"]})
NAMES = "(VALUES (1, 'a'), (1, 'b'), (2, 'c')) AS names(n, name)"
AT_ONCE = {
    "value": ("SELECT CAST(v AS INT) AS v FROM source", [1, 5]),
    "value of some": ("SELECT CAST(v AS INT) AS v FROM source WHERE n <> 2", [5]),
    "condition": ("SELECT * FROM source WHERE CAST(v AS INT) > 0", [1, 5]),
    "filter": ("SELECT n FROM source WHERE n > 2 AND CAST(v AS INT) > 0", [5]),
    "ratio": ("SELECT n / (n - 3) AS ratio FROM source", [2]),
    "outer join": (f"SELECT CAST(v AS INT) AS v, name FROM source LEFT JOIN {NAMES} ON names.n = source.n", [1, 5]),
    "join": (f"SELECT CAST(v AS INT) AS v, name FROM source JOIN {NAMES} ON names.n = source.n", [1]),
    "explode": ("SELECT CAST(v AS INT) AS v, explode(array(1, 2)) AS n FROM source", [1, 5]),
    "subquery": ("SELECT CAST(v AS INT) AS v FROM source WHERE n > (SELECT min(n) FROM source)", [1, 5]),
}
BY_HALVING = [
    ("SELECT v FROM (SELECT CAST(v AS INT) AS v FROM source) WHERE v > 1", [1, 5]),
    ("SELECT sum(CAST(v AS INT)) AS v FROM source", [1, 5]),
    ("SELECT CAST(v AS INT) AS v FROM source ORDER BY 1", [1, 5]),
]


class Attempts(FailingRows):
    def __init__(self, spark: Any, sql: str) -> None:
        super().__init__(
            "run it",
            lambda rows: frames.from_memory(spark, memory_of(rows)),
            lambda frame: frames.transformed(frame, sql),
        )
        self.sizes: list[int] = []

    def attempt(self, rows: pa.Table) -> pa.Table:
        self.sizes.append(len(rows))
        return super().attempt(rows)


@pytest.mark.brief("value")
@pytest.mark.parametrize(("sql", "bad"), AT_ONCE.values(), ids=AT_ONCE)
def test_at_once(sql: str, bad: list[int], plain_spark: Any) -> None:
    attempts = Attempts(plain_spark, sql)
    result, found = attempts.split(ROWS)
    assert {*attempts.sizes} <= {len(ROWS), len(ROWS) - len(bad), 1}  # some rows alone, for the reason
    assert sorted(found) == bad
    for number, why in found.items():
        if "among the others" in why:
            assert "SELECT min(n)" in sql
            continue
        with pytest.raises(WeftError) as alone:
            attempts.attempt(ROWS.slice(number, 1))
        assert alone.value.what == why
    good = [number for number in range(len(ROWS)) if number not in bad]
    assert sorted(map(str, result.to_pylist())) == sorted(map(str, attempts.attempt(ROWS.take(good)).to_pylist()))


@pytest.mark.parametrize(("sql", "bad"), BY_HALVING)
def test_by_halving(sql: str, bad: list[int], plain_spark: Any) -> None:
    attempts = Attempts(plain_spark, sql)
    result, found = attempts.split(ROWS, is_known=True)
    assert sorted(found) == bad
    assert all("CAST_INVALID_INPUT" in why for why in found.values())
    assert len(attempts.sizes) > 2 and attempts.sizes[-1] == len(ROWS) - len(bad)
    assert result.equals(attempts.attempt(ROWS.take([0, 2, 3, 4])))


@pytest.mark.full
def test_rows_that_all_fail(plain_spark: Any) -> None:
    for sql in ("SELECT 1 / 0 AS x FROM source", "SELECT sum(1 / (n - n)) AS x FROM source"):
        result, found = Attempts(plain_spark, sql).split(ROWS)
        assert (result.num_rows, sorted(found)) == (0, [*range(len(ROWS))])


def test_a_lookup_that_is_away_is_no_fault_of_rows(plain_spark: Any) -> None:
    attempts = Attempts(plain_spark, "SELECT sum(CAST(v AS INT)) AS v FROM source")
    attempt, tries = attempts.attempt, iter(range(3))

    def fail_later(rows: pa.Table) -> pa.Table:
        if next(tries) == 2:
            raise ConnectionFailedError("The lookup's database is away.")
        return attempt(rows)

    attempts.attempt = fail_later  # type: ignore[method-assign]
    with pytest.raises(ConnectionFailedError, match="away"):
        attempts.split(ROWS)


def test_no_row_is_to_blame(plain_spark: Any) -> None:
    with pytest.raises(WeftError, match="nothing"):
        Attempts(plain_spark, "SELECT nothing FROM source").split(ROWS)
