"""What the parsers of texts share: how they treat a text that cannot be parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError
from weft.normalize.base import Normalizer, Value, fitting, one_of

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlglot import exp

    from weft.normalize.dialects.base import SqlWriter


@dataclass(frozen=True)
class Parser(Normalizer):
    """A step from text to another type."""

    on_failure: str = "null"
    default: Any = None

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """Parse the text; null where it cannot be parsed."""
        raise NotImplementedError

    def parsed(self, value: Value, writer: SqlWriter, kind: pa.DataType) -> Value:
        """Parse the text, or return what the user chose for texts that cannot be parsed."""
        result = self.read(value.sql, writer)
        if self.on_failure != "null":
            if self.on_failure == "error":
                instead = writer.failed(value.sql, f"{value.column}: {self.name} cannot read", kind)
            else:
                instead = writer.literal(fitting(self.default, value._replace(kind=kind), self.name), kind)
            # The text is looked at a second time only where it could not be read.
            result = writer.coalesce(result, writer.case((writer.is_not_null(value.sql), instead)))
        return value._replace(sql=result, kind=kind)


def checked_failure(on_failure: object, default: object, who: str) -> None:
    """Refuse what does not go together."""
    one_of(on_failure, ("null", "error", "default"), f"on_failure of {who}")
    if (on_failure == "default") != (default is not None):
        raise DeclarationError(
            f"{who} takes on_failure='default' and default=… together.",
            hint="Say both, or neither: without them a text that cannot be read becomes null.",
        )
