"""`weft jars`: what Spark needs beyond its own, fetched beforehand and checked."""

from __future__ import annotations

import sys

import click

from weft.cli.common import format_option, print_json, print_table, unused_module_option
from weft.engine import jars as store
from weft.errors import StorageError, unknown

_ARGUMENT = click.argument("names", nargs=-1, metavar="[NAME]...")


@click.group()
def jars() -> None:
    """Fetch, list and verify the jars of Spark's connectors.

    They are fetched by themselves when a connection first needs them. Fetch them beforehand for a machine without a
    network, or copy the folder that `weft jars list` shows; WEFT_CACHE moves it.
    """


@jars.command()
@unused_module_option
@_ARGUMENT
def fetch(names: tuple[str, ...]) -> None:
    """Put the jars of each NAME (or of all) into the cache."""
    for name in _chosen(names):
        fetched = store.fetch(name, progress=_show if sys.stderr.isatty() else None)
        click.echo(f"{name}: {fetched} fetched, {len(store.locked(name)) - fetched} were there")
    click.echo(f"They are in {store.jars_folder()}")


@jars.command("list")
@unused_module_option
@format_option
def list_(output: str) -> None:
    """List what is locked, and how much of it is in the cache."""
    folder = store.jars_folder()
    rows = []
    for name in store.capabilities():
        locked = store.locked(name)
        cached = sum(jar.is_in(folder) for jar in locked)
        rows.append({"name": name, "jars": len(locked), "cached": cached, "bytes": sum(jar.size for jar in locked)})
    if output == "json":
        print_json({"folder": str(folder), "capabilities": rows})
        return
    print_table(rows, ["name", "jars", "cached", "bytes"])
    click.echo(f"They are in {folder}")


@jars.command()
@unused_module_option
@_ARGUMENT
def verify(names: tuple[str, ...]) -> None:
    """Compare the cached jars of each NAME (or of all that are there) with the lock."""
    folder = store.jars_folder()
    chosen = _chosen(names)
    if not names:
        chosen = [name for name in chosen if any((folder / jar.file).exists() for jar in store.locked(name))]
    bad = []
    for name in chosen:
        problems = store.damaged(name)
        for jar, problem in problems:
            click.echo(f"{name}: {jar.file} is {problem}", err=True)
        if problems:
            bad.append(name)
        else:
            click.echo(f"{name}: {len(store.locked(name))} jars are as locked")
    if bad:
        raise StorageError(
            f"The cache in {folder} is not what is locked.", hint=f"weft jars fetch {' '.join(bad)} replaces it."
        )
    if not chosen:
        click.echo(f"There are none in {folder}. weft jars fetch brings them.")


def _chosen(names: tuple[str, ...]) -> list[str]:
    known = store.capabilities()
    for name in names:
        if name not in known:
            raise unknown("set of jars", name, known)
    return list(names or known)


def _show(name: str, done: int, wanted: int) -> None:
    click.echo(f"\r\x1b[K{done}/{wanted} {name}" if done < wanted else "\r\x1b[K", nl=False, err=True)
