"""What must hold for the rows of a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from weft.errors import DeclarationError

Reaction = Literal["fail", "warn", "quarantine"]
REACTIONS: tuple[str, ...] = get_args(Reaction)


@dataclass(frozen=True)
class Expectation:
    """Something that must hold. `reaction`: `None` stands for the pipeline's `on_quality_failure`."""

    kind: str
    columns: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    text: str = ""
    reaction: Reaction | None = None

    def __post_init__(self) -> None:
        if self.reaction is not None and self.reaction not in REACTIONS:
            raise DeclarationError(f"{self}: on_failure is one of {', '.join(REACTIONS)}, not {self.reaction!r}.")
        if self.reaction == "quarantine" and not self.is_about_rows:
            raise DeclarationError(f"{self}: it is about all rows together, so none of them can be put aside.")

    def __str__(self) -> str:
        named = ("min", "max") if self.kind in ("range", "row_count") else ()
        values = [f"{name}={value}" for name, value in zip(named, self.values, strict=False) if value is not None]
        values = values if named else [str(value) for value in self.values]
        shown = [*self.columns, *([self.text] if self.text else []), *values]
        return f"{self.kind}({', '.join(shown)})"

    @property
    def is_about_rows(self) -> bool:
        """Whether single rows break it, not the load as a whole."""
        return self.kind not in ("row_count", "freshness")
