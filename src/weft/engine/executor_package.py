"""Sending our own package to the executors of a cluster, where it is not installed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext


def write_package(folder: Path) -> Path:
    """A zip of the package that this process runs. Workers import from it, before one that is installed there."""
    source = Path(__file__).parents[1]
    path = folder / "weft.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, Path("weft") / file.relative_to(source))
    return path


def ship(context: SparkContext) -> None:
    """Make the package known to every task of this context. What it imports in turn must be there already."""
    # Spark's own temporary folder: it is removed when the context stops, and the executors may ask until then.
    folder = Path(str(context._temp_dir)) / "weft-package"
    if not folder.exists():
        folder.mkdir()
        context.addPyFile(str(write_package(folder)))
