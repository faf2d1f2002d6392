"""`weft init`: the files of a new project."""

from __future__ import annotations

from pathlib import Path

import click

from weft.cli.common import unused_module_option
from weft.errors import DeclarationError

_SETTINGS = """\
# The settings of this project. Commands of weft that are run in this folder read them.

# The modules that declare streams and pipelines.
modules = ["my_streams", "my_pipelines"]

# Streams are kept on the connection "default". Without further settings that is SQLite at .weft/weft.db: nothing to
# install, nothing to run. To use a server, uncomment this; each ${VAR} is read from the environment at use.
#
# [connections.default]
# url = "postgres://me:${PASSWORD}@localhost:5432/app"
"""

_STREAMS = '''\
"""The streams of this project."""

from weft import stream


@stream(
    name="page_views",
    schema="events",
    fields={"user_id": "string", "page": "string", "timestamp": "timestamp?"},
    description="Pages that users looked at",
    tags=["ingestion", "clickstream"],
    owner="data-team",
)
def page_views():
    """Never called: it stands for the stream, as in publish(page_views, {...})."""
'''

_PIPELINES = '''\
"""The pipelines of this project."""

from typing import Annotated

import weft
from weft import pk
from weft.types import BigInt, String


@weft.table(schema="analytics")
class ViewsByPage:
    page: Annotated[String[200], pk()]
    views: BigInt


@weft.pipeline(target=ViewsByPage, schedule="*/5 * * * *", mode="merge")
def views_by_page(conn):
    """How often each page was looked at."""
    # A stream is a table. An event may lack a field, or have a text that is too long for a key.
    return """
        SELECT substr(page, 1, 200) AS page, count(*) AS views
        FROM events.page_views
        WHERE page IS NOT NULL
        GROUP BY substr(page, 1, 200)
    """
'''

_FILES = {"weft.toml": _SETTINGS, "my_streams.py": _STREAMS, "my_pipelines.py": _PIPELINES}
_IGNORED = ".weft/"


@click.command()
@click.argument("directory", default=".", metavar="[DIR]", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite weft.toml, my_streams.py and my_pipelines.py where they exist.")
@unused_module_option
def init(directory: Path, force: bool) -> None:
    """Start a project in DIR (here, if none is given): settings, a first stream and pipeline, and .gitignore."""
    present = [name for name in _FILES if (directory / name).exists()]
    if present and not force:
        verb = "exist" if len(present) > 1 else "exists"
        raise DeclarationError(
            f"{' and '.join(str(directory / name) for name in present)} {verb} already; nothing was written.",
            hint="Choose another folder, or overwrite with --force.",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            (directory / name).write_text(text, encoding="utf-8")
            click.echo(f"wrote {directory / name}")
        _ignore(directory / ".gitignore")
    except OSError as error:
        raise DeclarationError(f"{error.filename} cannot be written: {error.strerror}.") from None
    click.echo("\nNext:")
    if directory.resolve() != Path.cwd():
        click.echo(f"  cd {directory}")
    click.echo("""  weft streams publish page_views --data '{"user_id": "u_123", "page": "/"}'""")
    click.echo("  weft streams tail page_views")
    click.echo("  weft run views_by_page")
    click.echo("  weft status")


def _ignore(file: Path) -> None:
    """Add the folder of the embedded database to .gitignore, unless it is there."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if _IGNORED in text.split():
        return
    gap = "\n" if text and not text.endswith("\n") else ""
    file.write_text(f"{text}{gap}{_IGNORED}\n", encoding="utf-8")
    click.echo(f"added {_IGNORED} to {file}")
