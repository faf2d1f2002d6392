"""A module that cannot be used: every command that needs it says which file and line, and ends with exit code 1."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from click.testing import Result

    from weft.project import Project

COMMANDS = [
    ("list",),
    ("run", "orders"),
    ("run", "--all"),
    ("run-due",),
    ("status",),
    ("preview", "orders"),
    ("validate",),
    ("dry-run",),
    ("doctor",),
]
GOOD = 'import weft\n\n\n@weft.pipeline(target="a", name="orders")\ndef orders():\n    return "SELECT 1 AS id"\n'
SECOND = """

@weft.pipeline(target="b", name="{name}", depends_on=["{upstream}"])
def second():
    return "SELECT 1"
"""

# What is in work.py and in helper.py, what the error says, and the places that it names.
BAD: dict[str, tuple[str, str, str, list[str]]] = {
    "a syntax error": ("import weft\n\ndef orders(:\n", "", "SyntaxError", ["work.py, line 3"]),
    "a syntax error in what it imports": ("import helper\n", "x = 1\ny = (\n", "SyntaxError", ["helper.py, line 2"]),
    "a wrong indentation": ("def f():\nreturn 1\n", "", "IndentationError", ["work.py, line 2"]),
    "a null byte": ("x = 1\0\n", "", "null bytes", ["work.py"]),
    "not UTF-8": ("x = 'caf\udce9'\n", "", "utf-8", ["work.py"]),
    "a missing import": (
        "import weft\nimport wefft_helpers\n",
        "",
        "No module named 'wefft_helpers'",
        ["work.py, line 2"],
    ),
    "a missing name": ("import weft\nfrom weft import pipelin\n", "", "pipelin", ["work.py, line 2"]),
    "a missing import of an import": (
        "import helper\n",
        "\nimport nothing_here\n",
        "nothing_here",
        ["helper.py, line 2"],
    ),
    "an exception": ("import weft\n\n1 / 0\n", "", "ZeroDivisionError: division by zero", ["work.py, line 3"]),
    "an exception in Python's own code": ("import re\n\nre.compile('(')\n", "", "error", ["work.py, line 3"]),
    "an exception in another package": ("import click\n\nclick.Choice(None)\n", "", "TypeError", ["work.py, line 3"]),
    "an exception without a text": ("\nraise ValueError\n", "", "ValueError", ["work.py, line 2"]),
    "an exit": ("import sys\nsys.exit(0)\n", "", "SystemExit", ["work.py, line 2"]),
    "an unknown option": (GOOD.replace('"a"', '"a", modus="append"'), "", "Did you mean 'mode'", ["work.py, line 4"]),
    "a schedule that cannot be": (
        GOOD.replace('"a"', '"a", schedule="61 * * * *"'),
        "",
        "out of range",
        ["work.py, line 4"],
    ),
    "two of one name": (
        GOOD + SECOND.format(name="orders", upstream="x"),
        "",
        "'orders' is declared twice",
        ["work.py, line 4", "work.py, line 9"],
    ),
    "two of one name in two modules": (
        "import helper\n" + GOOD,
        GOOD,
        "'orders' is declared twice",
        ["helper.py, line 4", "work.py, line 5"],
    ),
    "a ring": (
        GOOD.replace('"a"', '"a", depends_on=["second"]') + SECOND.format(name="second", upstream="orders"),
        "",
        "orders → second → orders",
        ["work.py, line 9"],
    ),
    "a ring of one": (GOOD.replace('"a"', '"a", depends_on=["orders"]'), "", "orders → orders", ["work.py, line 4"]),
    "an unknown upstream": (
        GOOD + SECOND.format(name="second", upstream="order"),
        "",
        "depends on 'order', which is not declared",
        ["work.py, line 9"],
    ),
    "no pipeline": ("import weft\n", "", "No pipeline is declared", []),
}


@pytest.fixture
def fresh(local: Project) -> Iterator[None]:
    """Modules of other tests have the same names."""
    before = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before[0]:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == Path.cwd():
            del sys.modules[name]
    sys.path[:] = before[1]


CASES = [(command, bad) for command in COMMANDS for bad in BAD]
# A project may have streams alone.
CASES.remove((("doctor",), "no pipeline"))


# All commands load modules by the same code.
@pytest.mark.brief(
    *(f"run orders-{bad}" for bad in BAD),
    *(f"{' '.join(command)}-{bad}" for command in COMMANDS for bad in ("a syntax error", "a ring")),
)
@pytest.mark.parametrize(("command", "bad"), CASES, ids=[f"{' '.join(command)}-{bad}" for command, bad in CASES])
def test_file_and_line(
    project: Path, fresh: None, call: Callable[..., Result], command: tuple[str, ...], bad: str
) -> None:
    work, helper, says, places = BAD[bad]
    (project / "work.py").write_text(work, errors="surrogateescape")
    (project / "helper.py").write_text(helper)
    (project / "weft.toml").write_text('modules = ["work"]\n')
    done = call(*command, code=1)
    shown = done.stdout + done.stderr
    assert says in shown
    for place in places:
        assert place in shown
    assert "Traceback" not in shown
    # Nothing was begun, so nothing was recorded.
    assert not (project / ".weft" / "runs.db").exists() or command == ("doctor",)
