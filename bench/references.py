"""Packages that we are measured against, each in an environment of its own: nothing of ours depends on them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bench.harness import SkippedError

_FOLDER = Path(__file__).parents[1] / ".cache" / "references"


def python_with(*packages: str) -> str:
    """An interpreter that has these packages, installed when first asked for."""
    folder = _FOLDER / re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(packages))
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
            subprocess.run(install, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise SkippedError(f"cannot install {' '.join(packages)}: {error.stderr.decode()[-300:]}") from None
        done.touch()
    return str(python)
