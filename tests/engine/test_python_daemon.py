"""What forks Spark's Python workers."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from weft.engine.python_daemon import forget_jar_of_spark


def test_modules_are_not_looked_for_in_the_jar_of_spark(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have some: Spark takes the jars of users for packages too."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    jars = [str(project / name) for name in ("spark-core_2.13-4.2.0.jar", "users.jar")]
    for number, jar in enumerate(jars):
        with zipfile.ZipFile(jar, "w") as archive:
            archive.writestr(f"module_of_jar_{number}.py", "")
        sys.path.append(jar)
        assert importlib.util.find_spec(f"module_of_jar_{number}") is not None
    forget_jar_of_spark()
    assert sys.path[-1] == jars[1] and jars[0] not in (*sys.path, *sys.path_importer_cache)
    assert importlib.util.find_spec("module_of_jar_0") is None
    assert importlib.util.find_spec("module_of_jar_1") is not None
