"""`weft test`: models on sample rows, from files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from weft.cli.common import common_options, engine_option, plural, print_json
from weft.errors import DeclarationError, NotFoundError
from weft.options import refuse_unknown
from weft.settings import parse_toml

_FOLDER = "tests/models"
_KEYS = ("model", "inputs", "this", "expected", "name")


@click.command("test")
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@engine_option
@common_options
def test(paths: tuple[Path, ...], output: str) -> None:
    """Build models on the sample rows of each PATH, and compare the results: files of TOML or JSON, or folders of them.

    Without a PATH those in tests/models. No server is used. Ends with exit code 1 where a result differs.
    """
    results: list[dict[str, Any]] = []
    for file, case in _cases(paths or (Path(_FOLDER),)):
        results.append(_run(file, case))
        if output != "json":
            _show(results[-1])
    failed = sum(each["status"] != "ok" for each in results)
    if output == "json":
        print_json(results)
    else:
        click.echo(f"{plural(len(results), 'case')}, {failed} failed")
    if failed:
        sys.exit(1)


def _cases(paths: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise NotFoundError(f"There is no {path}.", hint=f"Name a file or a folder. By default it is {_FOLDER}.")
        below = sorted(each for each in path.rglob("*") if each.suffix in (".toml", ".json"))
        files += [path] if path.is_file() else below
    cases = [(file, case) for file in files for case in _read(file)]
    if not cases:
        raise NotFoundError(f"There is no case in {', '.join(map(str, paths))}.", hint="docs/models-plan.md has one.")
    return cases


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the cases of a file: it is one, or has a list of them."""
    text = file.read_text(encoding="utf-8")
    try:
        content: Any = parse_toml(text, str(file)) if file.suffix == ".toml" else json.loads(text)
    except json.JSONDecodeError as error:
        raise DeclarationError(f"{file} is not JSON: {error}.") from None
    cases = content if isinstance(content, list) else content.get("case", [content])
    for case in cases:
        if not isinstance(case, dict) or not isinstance(case.get("model"), str) or "expected" not in case:
            raise DeclarationError(f"{file}: a case has a model, its inputs and the rows that are expected.")
        refuse_unknown(case, _KEYS, str(file), "Keys", "key")
    return cases


def _run(file: Path, case: dict[str, Any]) -> dict[str, Any]:
    from weft.operate.runner import described
    from weft.pipelines.models import find
    from weft.testing import build, differing_rows

    result = {"file": str(file), "model": case["model"], "name": case.get("name"), "status": "ok", "difference": None}
    model = find(case["model"])
    try:
        rows = build(model, case.get("inputs", {}), this=case.get("this"))
    except Exception as error:  # of the model's own function too
        return {**result, "status": "error", "difference": described(error)}
    difference = differing_rows(rows, case["expected"])
    return {**result, "status": "failed" if difference else "ok", "difference": difference or None}


def _show(result: dict[str, Any]) -> None:
    color = "green" if result["status"] == "ok" else "red"
    name = f": {result['name']}" if result["name"] else ""
    click.echo(f"{click.style(result['status'], fg=color, bold=True)} {result['model']}{name} ({result['file']})")
    for line in (result["difference"] or "").splitlines():
        click.echo(f"  {click.style(line, fg={'-': 'red', '+': 'green'}.get(line[:1]))}")
