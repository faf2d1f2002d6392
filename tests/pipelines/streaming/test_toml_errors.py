"""Every error of a pipeline's TOML file names file, table and key."""

from __future__ import annotations

import pytest

import weft
from pipelines.streaming.test_toml import LEAST, SOURCE, TARGET, at_top
from weft import (
    DeclarationError,
    ObjectStoreLocalConnection,
    WeftError,
)
from weft.pipelines.streaming.toml import parse
from weft.pipelines.streaming.toml_tables import TABLES, connection_hints
from weft.systems.base import systems

pytestmark = pytest.mark.usefixtures("local")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pipeline_name = 'p'\nsource = [", r"^pipeline\.toml is not valid TOML.*line 2"),
        ("pipeline_name = 'p'\npipeline_name = 'q'", r"^pipeline\.toml is not valid TOML.*line 2"),
        (
            LEAST.replace("pipeline_name", "pipline_name"),
            r": unknown key 'pipline_name'\.\n  Did you mean 'pipeline_name'",
        ),
        (LEAST.replace('pipeline_name = "p"', ""), r"^pipeline\.toml: pipeline_name is missing"),
        (LEAST.replace('"p"', "5"), r": pipeline_name must be a text, not a number"),
        (LEAST.replace('"p"', '"a/b"'), r"^pipeline\.toml: pipeline_name cannot hold a slash"),
        (
            LEAST.replace('name = "events"', "nmae = 'x'"),
            r": \[target\.table\]: unknown key 'nmae'\.\n  Did you mean 'name'",
        ),
        (LEAST.replace('\nname = "events"', ""), r": \[target\.table\]: name is missing"),
        (
            LEAST.replace("pipeline", "xx", 0).replace("[target.table]", "[target.tabel]"),
            r"\[target\]: unknown key 'tabel'",
        ),
        (LEAST.replace("path =", "pth ="), r": \[source\]: unknown key 'pth'\.\n  Did you mean 'path'"),
        (LEAST.replace('"events.db"', "5"), r": \[source\]: SQLiteConnection: path must be str, not int"),
        (LEAST.replace('kind = "sqlite"\n', ""), r": \[source\]: unknown key 'path'\.\n.*kind = 'sqlite'"),
        (LEAST.replace("sqlite", "sqlte"), r": \[source\]: There is no kind .*'sqlte'\.\n  Did you mean 'sqlite'"),
        (LEAST.replace('"sqlite"', "5"), r": \[source\]: a kind is a text"),
        (LEAST.replace("sqlite", "duckdb"), r": \[source\]: Source 'clicks': a duckdb connection cannot be the source"),
        (LEAST.replace("[target.table]", "connection = 'x'\n[target.table]"), r": \[target\]: connection names one"),
        (LEAST.replace('source_query = "clicks"', ""), r": \[source\]: query is missing"),
        (LEAST.replace("path =", "query = 'x'\npath ="), r": source_query is for \[source\] without a query"),
        (LEAST.replace("[source]", "[[sources]]"), "source_query is for"),
        (LEAST.replace(TARGET, ""), r": \[target\] or \[\[targets\]\] is needed, and there is neither"),
        (LEAST + "[[targets]]\nconnection = 'x'", "and there is both"),
        (
            "source = 'postgres://u:hidden@h/d'\npipeline_name = 'p'",
            r"^(?!.*hidden).*source must be a table, not a text",
        ),
        (
            f"{SOURCE}[[targets]]\nconnection='a'\nstream='x'\n[[targets]]\nmoed='b'",
            r": \[\[targets\]\] no\. 2: unknown key",
        ),
        (
            f"{SOURCE}[[targets]]\nconnection='a'\n[targets.table]\nnaem='x'",
            r": \[targets\.table\]: unknown key 'naem'",
        ),
        (f"{SOURCE}[target]\nconnection='a'", r": \[target\]: Target names no place"),
        (
            f"{SOURCE}[target]\nconnection='a'\nprefix='x'\ntable={{name='t'}}",
            r": \[target\]: Target takes one of table",
        ),
        (
            LEAST + "[target.read_options.csv]\nhas_header = true",
            r": \[target\]: Target public\.events: csv_read_options is",
        ),
        (at_top("mode = 'truncate'"), r"^pipeline\.toml: mode is 'truncate'"),
        (at_top("mode = 'merge'"), r"^pipeline\.toml, target public\.events: the mode 'merge' needs keys"),
        (at_top("on_drift = 'evolv'"), r": on_drift is 'evolv'\.\n  Did you mean 'evolve'"),
        (at_top("every = '10 parsecs'"), r"^pipeline\.toml: every is '10 parsecs'"),
        (at_top("idle_pause_ms = true"), r": idle_pause_ms must be a whole number of at least 1, not a flag"),
        (
            at_top("idle_pause_ms = 99999999999999999999"),
            r"^pipeline\.toml: idle_pause_ms must be a whole number from 1 to",
        ),
        (at_top("every = '0.1ms'"), r"^pipeline\.toml: every is '0.1ms'"),
        (at_top("every = '99999999h'"), r"^pipeline\.toml: every is '99999999h'"),
        (at_top("every = ''"), r": every must be a text, not an empty text"),
        (
            LEAST.replace("path =", "max_rows = 99999999999\npath ="),
            r": \[source\]: Source.*: max_rows must be a whole num",
        ),
        (LEAST.replace("path =", "name = 5\npath ="), r": \[source\]: name must be a string, not int"),
        (
            LEAST.replace("[target.table]", "update_columns = 'a'\n[target.table]"),
            r", target public\.events: update_columns is an option of the mode 'merge', not of 'append'",
        ),
        (LEAST + "[transform]\nsql = '/* SELECT */ DROP TABLE source'", r": \[transform\] sql is not a SELECT"),
        (at_top("checkpoint = 2026-01-01"), r": checkpoint must be a text, not a time"),
        (at_top("keys = [1]"), ": keys must be a text or a list of texts, not a list"),
        (
            LEAST + "[transform]\nsql = 'SELECT 1'\non_error = 'dlqq'",
            r": \[transform\]: on_error is 'dlqq'\.\n  Did you mean 'dlq'",
        ),
        (
            LEAST + "[transform]\nsql = 'SELECT 1'\non_error = 'dlq'",
            r": \[transform\] on_error is 'dlq', and there is no place",
        ),
        (LEAST + "[transform]\nsqll = 'x'", r": \[transform\]: unknown key 'sqll'"),
        (LEAST + "[transform]\non_error = 'drop'", r": \[transform\] on_error is for \[transform\] sql"),
        (LEAST + "[lookups.users]\ntable = 'x'", r": \[lookups\] is for \[transform\] sql"),
        (
            LEAST + "[lookups.users]\ntabel = 'x'",
            r": \[lookups\.users\]: unknown key 'tabel'\.\n  Did you mean 'table'",
        ),
        (LEAST + "[lookups.users]\nconnection = 'x'", r": \[lookups\.users\]: Lookup needs a table or a query"),
        (LEAST + "[lookups]\nusers = 'x'", ": lookups must be a table of tables, not a table"),
        (LEAST + "[transform]\nsql = 'SELECT 1'\n[lookups.source]\ntable = 'x'", "a lookup cannot be called 'source'"),
        (at_top("dead_letter_table = {nmae = 'x'}"), r": \[dead_letter_table\]: unknown key 'nmae'"),
        (at_top("dead_letter_connection = {url = 'x'}"), r": \[dead_letter_connection\]: unknown key 'url'"),
        (at_top("dead_letter_topic = 'x'"), "no source has topics"),
        (at_top("profile = 'fast'"), ": profile is 'fast'"),
        (
            LEAST.replace("[target.table]", "primary_key = 'a'\n[target.table]\nprimary_key = 'b'"),
            "primary_key is said here and",
        ),
    ],
)
def test_refused(text: str, said: str) -> None:
    with pytest.raises(WeftError, match=said) as caught:
        parse(text)
    assert caught.value.what.startswith("pipeline.toml")


FILES = f"{SOURCE}[target]\nkind='object_store_local'\npath='/d'\nformat='csv'\nprefix='x'\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "parquet_compression = 'zstd'",
            r": \[target\]: ObjectStoreLocalConnection: parquet_compression is an option of",
        ),
        (
            "[target.read_options.csv]\ndelimeter = 44",
            r": \[target\.read_options\]: csv_read_options has no option 'deli",
        ),
        ("[target.read_options.xml]", r": \[target\.read_options\]: unknown key 'xml'"),
        ("csv_read_options = {}\n[target.read_options.csv]", r": \[target\]: csv_read_options and .* say the same"),
        ("mode = 'merge'\nprimary_key = 'id'", r": \[target\]: Target x: the mode 'merge' is for tables"),
        ("[target.table]\nname = 't'", r": \[target\]: Target t names a table, and an object_store_local"),
    ],
)
def test_files_refused(text: str, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        parse(FILES + text)


def test_files_of_a_named_connection_refused() -> None:
    weft.register_connection(ObjectStoreLocalConnection("/data", name="lake", format="csv"))
    with pytest.raises(
        DeclarationError, match=r"^pipeline\.toml: \[target\]: Target a: parquet_compression is an option"
    ):
        parse(f"{SOURCE}[target]\nconnection = 'lake'\nprefix = 'a'\nparquet_compression = 'zstd'")


def test_no_key_hides_a_field_of_a_connection() -> None:
    """Its fields stand beside the keys of the table. A prefix is told apart by whether there is a table. The stream of
    a target is also the one that a connection to Kinesis checks."""
    for kind in systems():
        for name in ("source", "target", "lookup", "dead_letter_connection"):
            both = set(connection_hints(kind)) & set(TABLES[name])
            assert both <= ({"stream"} if kind == "kinesis" else {"prefix"}), (kind, name)
