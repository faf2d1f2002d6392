"""How long the disk takes to sync, which decides what commits cost; and a disk that takes longer."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.harness import SkippedError

# As an SSD without a battery, or a volume in a cloud.
SLOW_MILLISECONDS = 2

_SLOW_SYNC = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

static int slowly(const char *name, int fd) {{
    struct timespec pause = {{0, {SLOW_MILLISECONDS} * 1000000}};
    nanosleep(&pause, 0);
    return ((int (*)(int)) dlsym(RTLD_NEXT, name))(fd);
}}

int fsync(int fd) {{ return slowly("fsync", fd); }}
int fdatasync(int fd) {{ return slowly("fdatasync", fd); }}
"""


def sync_milliseconds(folder: str, times: int = 100) -> float:
    """The median of so many times that 4 KiB are written and synced."""
    took = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(times):
            os.write(file.fileno(), bytes(4096))
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - start)
    return statistics.median(took) * 1000


def slow_sync(folder: str) -> str:
    """A library for LD_PRELOAD that makes fsync and fdatasync take longer."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SkippedError("there is no C compiler, cc, to make the disk slow with (sudo apt-get install gcc)")
    source, library = Path(folder) / "slow_sync.c", Path(folder) / "slow_sync.so"
    source.write_text(_SLOW_SYNC)
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SkippedError(f"cc cannot make the library that makes the disk slow: {done.stderr.strip()}")
    return str(library)
