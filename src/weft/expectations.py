"""What must hold for the rows of a pipeline: `from weft.expectations import not_null, range`."""

from weft.pipelines.expectations import accepted, freshness, not_null, range, row_count, sql, unique
from weft.systems.expectation import Expectation

__all__ = ["Expectation", "accepted", "freshness", "not_null", "range", "row_count", "sql", "unique"]
