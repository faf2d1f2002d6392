"""What happens to the rows of a pipeline before they are loaded: `transforms_pre=[filter_where("amount > 0")]`."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import DeclarationError


@dataclass(frozen=True)
class FilterWhere:
    """Keeps the rows that meet a condition."""

    condition: str


@dataclass(frozen=True)
class Limit:
    """Keeps so many rows."""

    rows: int


@dataclass(frozen=True)
class Sample:
    """Keeps a part of the rows, chosen at random."""

    percent: float


@dataclass(frozen=True)
class Deduplicate:
    """Keeps one row a key."""

    columns: tuple[str, ...]


Transform = FilterWhere | Limit | Sample | Deduplicate


def filter_where(condition: str) -> FilterWhere:
    """Keep the rows that meet a condition, in the SQL of the source (of Spark where the source has none)."""
    if not isinstance(condition, str) or not condition.strip():
        raise DeclarationError('filter_where takes a condition in SQL: filter_where("amount > 0").')
    return FilterWhere(condition)


def limit(rows: int) -> Limit:
    """Keep no more than so many rows, whichever come first."""
    if type(rows) is not int or rows < 0:
        raise DeclarationError(f"limit takes a number of rows, not {rows!r}.")
    return Limit(rows)


def sample_pct(percent: float) -> Sample:
    """Keep about so many of 100 rows, chosen at random in each run."""
    if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 < percent <= 100:
        raise DeclarationError(f"sample_pct takes a number above 0 and up to 100, not {percent!r}.")
    return Sample(float(percent))


def deduplicate_by(*columns: str) -> Deduplicate:
    """Keep one row a key: the greatest in these columns."""
    if not columns or not all(isinstance(name, str) and name for name in columns):
        raise DeclarationError('deduplicate_by takes names of columns: deduplicate_by("updated_at").')
    return Deduplicate(columns)
