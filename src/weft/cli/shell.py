"""`weft shell`: queries at a prompt, with history and completion of names."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import click

from weft.cli import show_error
from weft.cli.common import module_option, print_table
from weft.cli.sql import SHOWN_ROWS, planned, show
from weft.errors import WeftError
from weft.project import current

HISTORY = "shell_history"
_HISTORY_LINES = 10_000
_CANCEL_SECONDS = 30.0
_HELP = r"""A query ends with a semicolon, and may have several lines.
  \d         list the tables
  \d NAME    list the columns of a table
  \q         end; so does Ctrl-D
Ctrl-C stops the query that runs, or forgets the lines that were typed."""
_WORDS = re.findall(
    r"\w+",
    "SELECT FROM WHERE JOIN LEFT RIGHT FULL INNER CROSS ON USING GROUP BY ALL HAVING ORDER LIMIT DISTINCT UNION EXCEPT "
    "INTERSECT WITH AS AND OR NOT IN IS NULL BETWEEN LIKE CASE WHEN THEN ELSE END COUNT SUM MIN MAX AVG DESC ASC",
)
# The names behind FROM and JOIN.
_TABLE = re.compile(r'\b(?:FROM|JOIN)\s+((?:"[^"]*"|`[^`]*`|\w+)(?:\s*\.\s*(?:"[^"]*"|`[^`]*`|\w+))*)', re.IGNORECASE)
_DELIMITERS = " \t\n()[],;=<>+-*/%|&!"


@click.command()
@click.option("--connection", metavar="C", help="Where tables are that are named without one; else the default one.")
@module_option
def shell(connection: str | None) -> None:
    """Type queries, as `weft sql` takes them, at a prompt that keeps Spark running.

    \b
      weft> SELECT city, count(*) FROM events.orders GROUP BY city;
      weft> \\d warehouse.public.orders
    """
    current().connection(connection)  # an unknown one is an error before the prompt
    is_terminal = sys.stdin.isatty()
    prompt = Shell(connection)
    if is_terminal:
        # Also where what started it ignores Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        click.echo(r"\? shows help, \q ends. A query ends with a semicolon.", err=True)
        _start_spark()
    with _edited_lines(prompt.complete) if is_terminal else nullcontext():
        prompt.run(is_terminal)
    if prompt.failed and not is_terminal:
        sys.exit(1)


class Shell:
    """The prompt."""

    def __init__(self, connection: str | None) -> None:
        self.connection = connection
        self.failed = False
        self._typed = ""
        self._names_on = cache(_names_on)
        self._columns_of = cache(_columns_of)

    def run(self, is_terminal: bool) -> None:
        """Read lines until the end, and run what they hold."""
        while True:
            prompt = "" if not is_terminal else "....> " if self._typed else "weft> "
            try:
                line = input(prompt)
            except EOFError:
                if is_terminal:
                    click.echo()
                if self._typed.strip():
                    self._attempt(partial(self._query, self._typed))
                return
            except KeyboardInterrupt:
                click.echo()
                self._typed = ""
                continue
            if not self.take(line):
                return

    def take(self, line: str) -> bool:
        """Take a line; return whether to go on."""
        from weft.engine import queries

        if not self._typed.strip() and (word := line.strip()).startswith("\\"):
            if word in ("\\q", "\\quit"):
                return False
            self._attempt(partial(self._command, word))
            return True
        if not self._typed.strip() and line.strip().rstrip(";").lower() in ("exit", "quit"):
            return False
        complete, self._typed = queries.statements(f"{self._typed}{line}\n")
        self._typed += "\n" if self._typed else ""
        for statement in complete:
            if statement != ";":
                self._attempt(partial(self._query, statement))
        return True

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do something; no error ends the shell, nor does Ctrl-C.

        In a thread: a call that waits for Spark would wait on after Ctrl-C, for jobs that come after those which were
        cancelled."""
        errors: list[BaseException] = []
        ended = threading.Event()  # a thread whose join is interrupted counts as ended

        def attempt() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()

        try:
            threading.Thread(target=attempt, name="weft-shell", daemon=True).start()
            ended.wait()
        except KeyboardInterrupt:
            _stop(ended)
            click.echo("\nstopped", err=True)
            return
        for error in errors:
            self.failed = True
            if isinstance(error, WeftError):
                show_error(error.what, error.hint)
            else:
                show_error(f"{type(error).__name__}: {error}")

    def _query(self, text: str) -> None:
        with planned(text, None, self.connection) as result:
            show(result, SHOWN_ROWS)

    def _command(self, text: str) -> None:
        from weft.engine import relations

        command, _, name = text.partition(" ")
        name = name.strip().rstrip(";").strip()
        if command == "\\d" and name:
            schema = relations.schema_of(relations.find(name, self.connection))
            print_table([{"column": each.name, "type": str(each.type)} for each in schema], ("column", "type"))
        elif command == "\\d":
            self._names_on.cache_clear()
            self._columns_of.cache_clear()
            rows = [{"name": name, "kind": kind} for name, kind in sorted(relations.declared_names().items())]
            for info in current().describe_connections():
                names = [] if info.problem else self._names_on(info.name)
                connection = relations.quoted_part(info.name)
                rows += [{"name": f"{connection}.{each}", "kind": f"{info.kind} table"} for each in names]
                if not names:
                    rows.append({"name": f"{connection}.…", "kind": info.problem or str(info.kind)})
            print_table(rows, ("name", "kind"))
        else:
            click.echo(_HELP)

    # ------------------------------------------------------------------------------------------------------ completion

    def complete(self, word: str, state: int) -> str | None:
        """Return one of the names that a word may become, as readline asks for them."""
        with suppress(Exception):  # a database that does not answer must not disturb who types
            import readline

            words = self.completions(word, self._typed + readline.get_line_buffer())
            return words[state] if state < len(words) else None
        return None

    def completions(self, word: str, text: str) -> list[str]:
        """Return the names that a word may become in a text: of connections, streams, tables, columns, and of SQL."""
        from weft.engine import relations

        project, before = current(), word.rpartition(".")[0]
        names = {*relations.declared_names()}
        names |= {name.rpartition(".")[2] for name in names}
        names |= {f"{relations.quoted_part(name)}." for name in project.connection_names()}
        first = relations.parts_of(before)[0] if before else project.connection(self.connection).name or ""
        if project.has_connection(first):
            names |= {f"{relations.quoted_part(first)}.{each}" if before else each for each in self._names_on(first)}
        # Behind an alias too: which table it stands for matters little to who types.
        columns = {column for name in _TABLE.findall(text) for column in self._columns_of(name, self.connection)}
        names |= {f"{before}.{column}" if before else column for column in map(relations.quoted_part, columns)}
        if not before:
            names |= {each if word.isupper() else each.lower() for each in _WORDS}
        return sorted(name for name in names if name.lower().startswith(word.lower()) and name != word)


def _names_on(connection: str) -> list[str]:
    from weft.engine import relations

    try:
        return relations.names_on(current().connection(connection))
    except WeftError:
        return []


def _columns_of(name: str, connection: str | None) -> list[str]:
    from weft.engine import inputs, relations, session

    try:
        relation = relations.find(name, connection)
        if isinstance(relation.data, inputs.Files) and session.running() is None:
            return []  # nobody who presses Tab waits for Spark
        return list(relations.schema_of(relation).names)
    except WeftError:
        return []


# ------------------------------------------------------------------------------------------------ terminal and Spark


@contextmanager
def _edited_lines(complete: Callable[[str, int], str | None]) -> Iterator[None]:
    """Have lines edited and completed, and kept for the next time."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    history = Path(current().root) / ".weft" / HISTORY
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    readline.set_completer(complete)
    readline.set_completer_delims(_DELIMITERS)
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            # Queries may hold what not everybody should read.
            os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(history)


def _start_spark() -> None:
    """Start Spark while the first query is typed. What fails is said by that query."""

    def start() -> None:
        from weft.engine import session

        with suppress(Exception):
            session.spark()

    threading.Thread(target=start, name="weft-shell-spark", daemon=True).start()


def _stop(ended: threading.Event) -> None:
    """Cancel Spark's jobs until a query has ended. A second Ctrl-C does not wait for that."""
    end = time.monotonic() + _CANCEL_SECONDS
    with suppress(KeyboardInterrupt):
        while not ended.is_set() and time.monotonic() < end:
            _cancel_jobs()
            ended.wait(0.2)


def _cancel_jobs() -> None:
    from weft.engine import session

    running: Any = session.running()
    if running is not None:
        with suppress(Exception):  # its JVM may be gone
            running.sparkContext.cancelAllJobs()
