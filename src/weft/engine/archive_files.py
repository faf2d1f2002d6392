"""Where the archives of Spark's classes are, and the flags with which a JVM uses the one that fits it.

`weft.engine.archive` makes them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from weft.engine import jvm
from weft.engine.jars import cache_folder, locked_folder
from weft.engine.java import Java

_TRAINING = 1
"""Raised when the training in `weft.engine.archive` changes, so that it is done again."""


def archives_folder() -> Path:
    """Return the folder of the archives. Each may be removed at any time: it is made again."""
    return cache_folder() / "archives"


def archive_flags(java: Java) -> list[str]:
    """Return the flags with which Java uses the archive that fits it, none where there is none."""
    base, archive = archive_files(java)
    if not archive.exists() or not (base is None or base.exists()):
        return []
    for path in filter(None, (base, archive)):
        _mark_used(path)
    # auto: Java ignores an archive that does not fit, without an error.
    return [
        f"-XX:SharedArchiveFile={f'{base}:' if base else ''}{archive}",
        "-Xshare:auto",
        "-Xlog:cds=off,cds+dynamic=off",
    ]


def build_in_background(java: Java) -> None:
    """Start a process that makes the archive, unless one runs already. It goes on when this process ends."""
    try:
        with locked_folder(archives_folder(), wait=False):
            pass
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.engine.archive", "--low-priority"],
            cwd=archives_folder(),  # not where this process is: a module there might be taken for one of ours
            env={**os.environ, "JAVA_HOME": str(java.home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no room or no right to write: it stays as slow as it is
        return
    # Waited for, so that it leaves no zombie behind.
    threading.Thread(target=process.wait, name="weft-spark-archive", daemon=True).start()


def archive_files(java: Java) -> tuple[Path | None, Path]:
    """The archive of Java's own classes, which some runtimes bring along, and the one of Spark's on top of it."""
    of_java = (java.home, java.version, changed_at(java.home / "release"))
    home = jvm.spark_home()
    of_spark = (*of_java, home, changed_at(home / "jars"), *jvm.MODULE_FLAGS, _TRAINING)
    folder = archives_folder()
    has_own = (java.home / "lib" / "server" / "classes.jsa").exists()
    base = None if has_own else folder / f"java-{java.version}-{_digest(of_java)}.jsa"
    return base, folder / f"spark-{_digest(of_spark)}.jsa"


def _digest(parts: tuple[object, ...]) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _mark_used(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > 86_400:
            os.utime(path)
