"""Files beside rows: what is written is there whole, or as it was."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from weft.spark_support.folder import LocalFolder


@pytest.mark.parametrize("how", ["create", "write"])
def test_a_full_disk_leaves_what_was_there(how: str, tmp_path: Path) -> None:
    folder, path = LocalFolder(), str(tmp_path / "kept" / "columns.json")
    folder.write(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            getattr(folder, how)(path, b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert folder.read(path) == b"old"
    assert os.listdir(tmp_path / "kept") == ["columns.json"]
