"""The handler of a function of AWS Lambda that runs what a scheduler dispatches (`lambda://`)."""

from __future__ import annotations

import os
import sys
from typing import Any

from weft.cli import main
from weft.errors import SettingsError

_COMMANDS = ("run-due", "run")


def handler(event: dict[str, Any], _context: Any = None) -> dict[str, Any]:
    """Run what a scheduler dispatched: the handler of the function."""
    arguments = event.get("arguments")
    if not isinstance(arguments, list) or not arguments or arguments[0] not in _COMMANDS:
        raise SettingsError(f"The event must have the arguments of weft {' or '.join(_COMMANDS)}.")
    variables = {str(name): str(value) for name, value in event.get("environment", {}).items()}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        sys.argv = ["weft", *map(str, arguments)]
        main()
        code: Any = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        # The next call is one of the same process, and perhaps of another trace or run log.
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    if code:
        # Recorded in the run log already: the next attempt is its policy's, not Lambda's.
        print(f"weft {' '.join(map(str, arguments))} ended with exit code {code}")
    return {"code": code}
