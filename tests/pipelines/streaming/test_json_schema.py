"""The JSON Schema of a pipeline's TOML file is the one in the docs; it takes and refuses what the parser does."""

from __future__ import annotations

import json
import tomllib

import jsonschema
import pytest

from pipelines.streaming.test_toml import LEAST, SOURCE, TARGET
from weft.errors import WeftError
from weft.pipelines.streaming.json_schema import schema, text
from weft.pipelines.streaming.toml import parse
from weft.systems.base import systems

pytestmark = pytest.mark.usefixtures("local")

FILES = f"{SOURCE}[target]\nkind='object_store_local'\npath='/d'\nformat='csv'\nprefix='x'\n"

TAKEN = [
    LEAST,
    'pipeline_name = "p"\n[source]\nquery = "a"\n[target]\nstream = "b"',
    f"mode='merge'\nkeys=['id']\nevery='1s'\nidle_pause_ms=5\non_drift='fail'\nprofile='low_latency'\n{LEAST}",
    f"keys='id'\nmode='merge'\ndeduplicate_by=['at']\ncheckpoint='/x'\ndelivery='at_least_once'\ndescription='d'\n{LEAST}",
    f"dead_letter_table='a.b'\ndead_letter_connection='x'\n{LEAST}",
    f"dead_letter_table={{name='b'}}\ndead_letter_connection={{kind='sqlite',path='x'}}\n{LEAST}",
    f"{LEAST}[transform]\nsql='SELECT 1'\non_error='drop'\n[lookups.users]\nconnection='x'\ntable='u'\nschema='s'",
    f"{LEAST}[transform]\nsql='SELECT 1'\n[lookups.users]\nkind='mysql'\nurl='mysql://h/d'\nquery='SELECT 1'",
    FILES,
    f"{FILES}csv_delimiter=';'\n[target.read_options.csv]\nhas_header=true",
    f"{FILES}csv_delimiter=59\ncsv_header=false",
    f"{SOURCE}[target]\nconnection='lake'\nprefix='a'\nparquet_compression='zstd'",
    f"{SOURCE}[[targets]]\nconnection='a'\nstream='x'\n[[targets]]\nconnection='b'\n[[targets.table]]\nname='x'",
    f"{SOURCE}[target]\nkind='delta_s3'\nbucket='lake'\nprefix='a'\nregion='r'\nname='n'",
    f"pipeline_name='p'\n[[sources]]\nconnection='a'\nquery='x'\nstart='latest'\nmax_rows=5\n[[sources]]\nquery='b'\n{TARGET}",
]
REFUSED = [
    LEAST.replace("pipeline_name", "pipline_name"),
    LEAST.replace('pipeline_name = "p"', ""),
    LEAST.replace('name = "events"', "nmae = 'x'"),
    LEAST.replace("path =", "pth ="),
    LEAST.replace('"events.db"', "5"),
    LEAST.replace('kind = "sqlite"\n', ""),
    LEAST.replace("sqlite", "sqlte"),
    LEAST.replace("sqlite", "duckdb"),
    LEAST.replace("[target.table]", "connection = 'x'\n[target.table]"),
    LEAST.replace(TARGET, ""),
    LEAST + "[[targets]]\nconnection = 'x'",
    f"mode='truncate'\n{LEAST}",
    f"keys=[1]\n{LEAST}",
    f"idle_pause_ms=0\n{LEAST}",
    f"dead_letter_connection={{url='x'}}\n{LEAST}",
    f"{LEAST}[transform]\nsql='x'\non_error='dlqq'",
    f"{LEAST}[transform]\nsqll='x'",
    f"{LEAST}[transform.window]\nkind='session'",
    f"{LEAST}[state_store]\nkind='postgres'",
    f"{LEAST}[lookups]\nusers='x'",
    f"{LEAST}[lookups.users]\ntabel='x'",
    f"{FILES}csv_header='yes'",
    f"{FILES}[target.read_options.xml]",
    LEAST.replace("sqlite", "pubsub"),
    f"{SOURCE}[target]\nkind='delta_s3'\nprefix='a'",
]
if "kafka" in systems():
    KAFKA = "[source]\nkind='kafka'\nbootstrap_servers='localhost:9092'\n"
    TAKEN.append(f"pipeline_name='p'\nsource_query='a'\n{KAFKA}group_id='g'\ndead_letter_topic='f'\n{TARGET}")
    REFUSED.append(f"pipeline_name='p'\nsource_query='a'\n{KAFKA}group='g'\n{TARGET}")
    REFUSED.append(f"pipeline_name='p'\nsource_query='a'\n[source]\nkind='kafka'\n{TARGET}")


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert json.loads(text())["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize("file", TAKEN)
def test_both_take_it(file: str) -> None:
    parse(file)
    jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(file))


@pytest.mark.parametrize("file", REFUSED)
def test_both_refuse_it(file: str) -> None:
    with pytest.raises(WeftError):
        parse(file)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(file))
