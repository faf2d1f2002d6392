"""Speed, each number as a ratio to a yardstick of the same run. `python -m bench --help`."""

import sys
from pathlib import Path

# The servers of the tests, under the names by which the tests know them.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
