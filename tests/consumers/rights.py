"""The rights that a guide names."""

from __future__ import annotations

import re
from pathlib import Path


def rights_of(guide: Path) -> list[list[str]]:
    """Those of each row of its table."""
    text = guide.read_text(encoding="utf-8").partition("## What a user of Redis must be allowed\n")[2]
    rows = text.partition("\n## ")[0].splitlines()
    return [re.findall(r"`(\+[^`]+)`", row)[-1].split() for row in rows if row.startswith("|") and "`+" in row]
