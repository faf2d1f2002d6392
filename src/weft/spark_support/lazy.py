"""Spark's functions and types, which are imported at first use: that takes long, and Spark need not be installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["F", "T"]

if TYPE_CHECKING:
    from pyspark.sql import functions as F
    from pyspark.sql import types as T
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # pickle asks for some before there is a name
                raise AttributeError(name)
            return getattr(importlib.import_module(self._name), name)

    F, T = _LazyModule("pyspark.sql.functions"), _LazyModule("pyspark.sql.types")
