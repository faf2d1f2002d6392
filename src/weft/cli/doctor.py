"""`weft doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click

from weft.cli.common import first_line, format_option, module_names_option, print_json, print_table, run_log_option
from weft.errors import WeftError, installing
from weft.project import current

_MINIMUM_FREE = 1024**3


@dataclass(frozen=True)
class _Diagnosis:
    """The result of one check."""

    what: str
    result: str
    """`ok`, `warning` or `problem`."""
    detail: str
    hint: str | None = None


@click.command()
@module_names_option
@run_log_option
@format_option
def doctor(modules: tuple[str, ...], run_log: str | None, output: str) -> None:
    """Look at this project and this machine: packages, Java, disk, settings, modules, connections, run log.

    Ends with exit code 1 where there is a problem.
    """
    results = list(_diagnose(modules, run_log))
    if output == "json":
        print_json([asdict(each) for each in results])
    else:
        rows = [{**asdict(each), "detail": first_line(each.detail)} for each in results]
        print_table(rows, ["what", "result", "detail"])
        for each in results:
            if each.result != "ok":
                click.echo(f"\n{each.what}: {each.detail}" + (f"\n  {each.hint}" if each.hint else ""))
    if any(each.result == "problem" for each in results):
        sys.exit(1)


def _diagnose(modules: tuple[str, ...], run_log: str | None) -> Iterator[_Diagnosis]:
    project = current()
    yield _try("python", lambda: f"{sys.version.split()[0]} at {sys.prefix}")
    yield _try("weft", lambda: version("weft"))
    try:
        spark = version("pyspark")
    except PackageNotFoundError:
        missing = "pyspark is not installed: loads between databases need it."
        yield _Diagnosis("spark", "warning", missing, installing("spark"))
    else:
        yield _Diagnosis("spark", "ok", f"pyspark {spark}")
        yield _try("java", _java)
    yield _disk(str(project.root))
    yield _try("settings and modules", lambda: _modules(modules))
    for info in project.describe_connections():
        name = f"connection {info.name}"
        if info.problem is not None:
            yield _Diagnosis(name, "problem", info.problem, f"It is defined in {info.source}.")
        else:
            yield _try(name, lambda info=info: _connection(info.name))  # type: ignore[misc]
    yield _try("run log", lambda: _log(run_log))


def _try(what: str, check: Callable[[], str]) -> _Diagnosis:
    try:
        return _Diagnosis(what, "ok", check())
    except WeftError as error:
        return _Diagnosis(what, "problem", error.what, error.hint)


def _java() -> str:
    from weft.engine.java import find_java

    java = find_java()
    return f"Java {java.version} at {java.home}"


def _disk(folder: str) -> _Diagnosis:
    free = shutil.disk_usage(folder).free
    text = f"{free / 1024**3:.1f} GiB free in {folder}"
    if free < _MINIMUM_FREE:
        return _Diagnosis("disk", "warning", text, "Spark and the embedded databases need room here.")
    return _Diagnosis("disk", "ok", text)


def _modules(modules: tuple[str, ...]) -> str:
    project = current()
    project.load_modules(modules)
    from weft.pipelines import graph

    graph.refuse_unknown_dependencies(project.pipelines)
    return (
        f"streams: {len(project.streams)}, pipelines: {len(project.pipelines)}, "
        f"streaming pipelines: {len(project.streaming_pipelines)}"
    )


def _connection(name: str) -> str:
    connection = current().connection(name)
    report = connection.check()
    shown = [str(report[each]) for each in ("server", "database") if report.get(each)]
    return ", ".join([connection.kind, *shown, f"{report.get('latency_ms', '?')} ms"])


def _log(url: str | None) -> str:
    from weft.operate.runlog import open_run_log, project_log_url

    with open_run_log(project_log_url(url), read_only=True) as log:
        return "not created yet" if log.shown == ":memory:" else log.shown
