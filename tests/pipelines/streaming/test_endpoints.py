"""What streaming pipelines take on a system is said by that system, also by one that Weft has never heard of."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest

import weft
from weft import DeclarationError, Lookup, Source, SQLiteConnection, Target
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.json_schema import schema
from weft.pipelines.streaming.toml import parse, to_toml
from weft.systems import Connection, System, base
from weft.systems.endpoint import Endpoint, endpoint_of, endpoints

PIPELINES = Path(weft.__file__).parent / "pipelines"


@dataclass(frozen=True)
class PigeonConnection(Connection):
    kind = "pigeon"
    loft: str


class PigeonEndpoint(Endpoint):
    is_source = True
    start_forms: ClassVar = {**Endpoint.start_forms, r"@\d+": "a flight of pigeons"}
    places = ("stream",)
    dead_letters = ("topic",)
    options: ClassVar = {"feed": str, "wind": int | None}
    holds = "pigeons"

    def parse_start(self, start: str, connection: Connection, query: str) -> str:
        return super().parse_start(start, connection, query).removeprefix("@")

    def check_options(self, connection: Connection, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options.get("feed") == "stones":
            raise DeclarationError("pigeons eat no stones.")
        return super().check_options(connection, options)


LOFT = PigeonConnection("roof", name="loft")
EVENTS = SQLiteConnection("events.db", name="events")


@pytest.fixture(autouse=True)
def pigeons(local: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point in the group `weft.systems`."""
    monkeypatch.setitem(sys.modules, "weft_pigeon", sys.modules[__name__])
    system = System(kind="pigeon", connection="weft_pigeon:PigeonConnection", endpoint="weft_pigeon:PigeonEndpoint")
    monkeypatch.setattr(base, "_third_party", lambda: ({"pigeon": system}, {}))


def test_a_source_of_another_package() -> None:
    source = Source(connection=LOFT, query="mail", start="@12", max_rows=5, options={"feed": "corn"})
    assert (source.start, source.options) == ("12", {"feed": "corn"})
    with pytest.raises(DeclarationError, match="max_files is not a limit of pigeon"):
        Source(connection=LOFT, query="mail", max_files=5)
    with pytest.raises(DeclarationError, match="'0:5' is offsets of partitions, which Kafka has, and this is a pigeon"):
        Source(connection=LOFT, query="mail", start="0:5")
    with pytest.raises(DeclarationError, match="'@5' is a flight of pigeons, and this is a sqlite connection"):
        Source(connection=EVENTS, query="mail", start="@5")
    assert Source(connection="later", query="mail", start="@5").start == "@5"


def test_its_options_are_its_own() -> None:
    with pytest.raises(DeclarationError, match=r"Target mail: feed is an option of pigeons, and this is a sqlite con"):
        Target(connection=EVENTS, stream="mail", options={"feed": "corn"})
    with pytest.raises(DeclarationError, match=r"Target mail: pigeons eat no stones\."):
        Target(connection=LOFT, stream="mail", options={"feed": "stones"})
    with pytest.raises(DeclarationError, match=r"no option 'fed'\.\n  Did you mean 'feed'"):
        Target(connection=LOFT, stream="mail", options={"fed": "corn"})
    with pytest.raises(DeclarationError, match="Target mail: csv_header is an option of files, and this is a pigeon"):
        Target(connection=LOFT, stream="mail", options={"csv_header": True})


def test_a_target_and_dead_letters_of_another_package() -> None:
    pipeline = make(
        name="p",
        source=LOFT,
        source_query="mail",
        target=Target(connection=LOFT, stream="answers", options={"feed": "corn"}),
        dead_letter_topic="lost",
    )
    assert pipeline.dead_letters is not None and pipeline.dead_letters.connection is LOFT
    with pytest.raises(DeclarationError, match="a pigeon connection is written by stream"):
        Target(connection=LOFT, table="t")
    with pytest.raises(DeclarationError, match="a pigeon connection holds no dead_letter_table"):
        make(name="p", source=LOFT, source_query="m", target=Target(connection=LOFT, stream="a"),
             dead_letter_table="t", dead_letter_connection=LOFT)  # fmt: skip
    with pytest.raises(DeclarationError, match="a pigeon connection, which holds no tables"):
        make(name="p", source=LOFT, source_query="m", target=Target(connection=LOFT, stream="a"),
             transform_sql="SELECT 1", lookups={"x": Lookup(connection=LOFT, table="x")})  # fmt: skip


FILE = """
pipeline_name = "p"
[source]
kind = "pigeon"
loft = "roof"
query = "mail"
start = "@7"
feed = "corn"
[target]
connection = "somewhere"
stream = "answers"
wind = 3
"""


def test_a_file_with_its_connection_and_its_options() -> None:
    pipeline = parse(FILE)
    (source,), (target,) = pipeline.sources, pipeline.targets
    assert (source.connection, source.start) == (PigeonConnection("roof"), "7")
    assert (source.options, target.options) == ({"feed": "corn"}, {"wind": 3})
    again = parse(to_toml(pipeline))
    assert (again.sources, again.targets) == (pipeline.sources, pipeline.targets)
    with pytest.raises(DeclarationError, match=r"\[source\]: unknown key 'lofft'\.\n  Did you mean 'loft'"):
        parse(FILE.replace("loft =", "lofft ="))


def test_the_json_schema_has_its_fields_and_options() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    validator.validate(tomllib.loads(FILE))
    for wrong in (FILE.replace("loft =", "lofft ="), FILE.replace('"corn"', "5"), FILE.replace('loft = "roof"\n', "")):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(tomllib.loads(wrong))


def test_a_broken_package_does_not_break_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = System(kind="broken", connection="weft_pigeon:PigeonConnection", endpoint="not_there:Endpoint")
    monkeypatch.setattr(base, "_third_party", lambda: ({"broken": broken}, {}))
    assert "broken" not in endpoints()
    assert Source(connection=EVENTS, query="clicks").start == "earliest"


def test_a_system_that_names_no_endpoint_has_what_it_holds() -> None:
    assert endpoint_of(EVENTS).places == endpoint_of(EVENTS).dead_letters == ("table", "stream")
    tables = System(kind="paper", connection="a:B", tables="a:C").load_endpoint()
    assert (tables.is_source, tables.places) == (False, ("table",))


def test_pipelines_know_no_system_by_name() -> None:
    folders = {each.parent.name for each in (Path(base.__file__).parent).glob("*/__init__.py")}
    for file in PIPELINES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not folders & set((node.module or "").split(".")), f"{file}: {node.module}"
            if isinstance(node, ast.Constant):
                assert node.value not in base.systems(), f"{file}, line {node.lineno}: {node.value}"


def test_endpoints_load_neither_spark_nor_clients() -> None:
    program = (
        "import sys, weft.systems.endpoint as e; e.endpoints(); print(*{n.partition('.')[0] for n in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"pyspark", "pyarrow", "confluent_kafka", "redis", "hiredis", "psycopg", "pymysql", "duckdb"}
    assert heavy.isdisjoint(done.stdout.split())
