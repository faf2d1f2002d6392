"""Weft: durable streams of events on the database you already have, and the tables made from them.

Every public name is imported when it is first used, so that `import weft` costs next to nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft import hooks

if TYPE_CHECKING:
    import weft as weft
    from weft import config as config
    from weft import connections as connections
    from weft import errors as errors
    from weft import expectations as expectations
    from weft import normalize as normalize
    from weft import patterns as patterns
    from weft import project as project
    from weft import settings as settings
    from weft import streaming as streaming
    from weft import streams as streams
    from weft import systems as systems
    from weft import testing as testing
    from weft import transforms as transforms
    from weft import types as types
    from weft.consumers.consumer import Consumer as Consumer
    from weft.consumers.consumer import GroupConsumer as GroupConsumer
    from weft.dataframes.hashes import write_hashes as write_hashes
    from weft.dataframes.iterating import iter_stream as iter_stream
    from weft.dataframes.iterating import iter_stream_async as iter_stream_async
    from weft.dataframes.querying import sql as sql
    from weft.dataframes.reading import ack_entries as ack_entries
    from weft.dataframes.reading import read_stream as read_stream
    from weft.dataframes.scanning import read_streams as read_streams
    from weft.dataframes.scanning import scan_stream as scan_stream
    from weft.dataframes.scanning import scan_streams as scan_streams
    from weft.engine.frames import read as read
    from weft.engine.load import LoadResult as LoadResult
    from weft.engine.load import load as load
    from weft.engine.load import load_async as load_async
    from weft.engine.session import spark as spark
    from weft.errors import BusyError as BusyError
    from weft.errors import ConnectionFailedError as ConnectionFailedError
    from weft.errors import CycleError as CycleError
    from weft.errors import DeclarationError as DeclarationError
    from weft.errors import EventsLostError as EventsLostError
    from weft.errors import LeaseLostError as LeaseLostError
    from weft.errors import LoadRefusedError as LoadRefusedError
    from weft.errors import MissingExtraError as MissingExtraError
    from weft.errors import NotFoundError as NotFoundError
    from weft.errors import SchemaError as SchemaError
    from weft.errors import SettingsError as SettingsError
    from weft.errors import StorageError as StorageError
    from weft.errors import WeftError as WeftError
    from weft.pipelines.declare import pipeline as pipeline
    from weft.pipelines.declare import target as target
    from weft.pipelines.models import model as model
    from weft.pipelines.streaming.cdc import CDC as CDC
    from weft.pipelines.streaming.declare import streaming_pipeline as streaming_pipeline
    from weft.pipelines.streaming.joins import Join as Join
    from weft.pipelines.streaming.spec import Lookup as Lookup
    from weft.pipelines.streaming.spec import Source as Source
    from weft.pipelines.streaming.spec import Target as Target
    from weft.pipelines.streaming.windows import Aggregation as Aggregation
    from weft.pipelines.streaming.windows import StateStore as StateStore
    from weft.pipelines.streaming.windows import Watermark as Watermark
    from weft.pipelines.streaming.windows import Window as Window
    from weft.pipelines.table import natural_key as natural_key
    from weft.pipelines.table import pk as pk
    from weft.pipelines.table import table as table
    from weft.project import connect as connect
    from weft.project import connection as connection
    from weft.project import get_connection as get_connection
    from weft.project import register_connection as register_connection
    from weft.project import registered_connections as registered_connections
    from weft.streaming import run_pipeline as run_pipeline
    from weft.streaming import run_streaming_pipeline as run_streaming_pipeline
    from weft.streams import ack as ack
    from weft.streams import ack_sync as ack_sync
    from weft.streams import consume as consume
    from weft.streams import consume_sync as consume_sync
    from weft.streams import delete_stream as delete_stream
    from weft.streams import delete_stream_sync as delete_stream_sync
    from weft.streams import groups as groups
    from weft.streams import groups_sync as groups_sync
    from weft.streams import nack as nack
    from weft.streams import nack_sync as nack_sync
    from weft.streams import publish as publish
    from weft.streams import publish_sync as publish_sync
    from weft.streams import reset as reset
    from weft.streams import reset_sync as reset_sync
    from weft.streams import stream as stream
    from weft.streams import subscribe as subscribe
    from weft.streams import trim as trim
    from weft.streams import trim_sync as trim_sync
    from weft.systems.delta.connection import DeltaLocalConnection as DeltaLocalConnection
    from weft.systems.delta.connection import DeltaS3Connection as DeltaS3Connection
    from weft.systems.duckdb.connection import DuckDBConnection as DuckDBConnection
    from weft.systems.kafka.connection import KafkaConnection as KafkaConnection
    from weft.systems.kinesis.connection import KinesisConnection as KinesisConnection
    from weft.systems.mysql.connection import MySQLConnection as MySQLConnection
    from weft.systems.objects.connection import ObjectStoreLocalConnection as ObjectStoreLocalConnection
    from weft.systems.objects.connection import ObjectStoreS3Connection as ObjectStoreS3Connection
    from weft.systems.objects.formats import format_from_path as format_from_path
    from weft.systems.postgres.connection import PostgresConnection as PostgresConnection
    from weft.systems.pubsub.connection import PubSubConnection as PubSubConnection
    from weft.systems.rabbitmq.connection import RabbitMQConnection as RabbitMQConnection
    from weft.systems.redis.asyncio_clients import Redis as Redis
    from weft.systems.redis.asyncio_clients import RedisCluster as RedisCluster
    from weft.systems.redis.connection import RedisConnection as RedisConnection
    from weft.systems.schema_registry.connection import SchemaRegistryConnection as SchemaRegistryConnection
    from weft.systems.sqlite.connection import SQLiteConnection as SQLiteConnection
    from weft.udfs import udaf as udaf
    from weft.udfs import udf as udf

    __version__: str

_NAMES_OF_MODULES = {
    "weft.consumers.consumer": "Consumer GroupConsumer",
    "weft.dataframes.hashes": "write_hashes",
    "weft.dataframes.iterating": "iter_stream iter_stream_async",
    "weft.dataframes.querying": "sql",
    "weft.dataframes.reading": "ack_entries read_stream",
    "weft.dataframes.scanning": "read_streams scan_stream scan_streams",
    "weft.engine.frames": "read",
    "weft.engine.load": "LoadResult load load_async",
    "weft.engine.session": "spark",
    "weft.errors": "BusyError ConnectionFailedError CycleError DeclarationError EventsLostError LeaseLostError "
    "LoadRefusedError MissingExtraError NotFoundError SchemaError SettingsError StorageError WeftError",
    "weft.pipelines.declare": "pipeline target",
    "weft.pipelines.models": "model",
    "weft.pipelines.streaming.cdc": "CDC",
    "weft.pipelines.streaming.declare": "streaming_pipeline",
    "weft.pipelines.streaming.spec": "Lookup Source Target",
    "weft.pipelines.streaming.joins": "Join",
    "weft.pipelines.streaming.windows": "Aggregation StateStore Watermark Window",
    "weft.pipelines.table": "natural_key pk table",
    "weft.project": "connect connection get_connection register_connection registered_connections",
    "weft.streaming": "run_pipeline run_streaming_pipeline",
    "weft.streams": "ack ack_sync consume consume_sync delete_stream delete_stream_sync groups groups_sync nack "
    "nack_sync publish publish_sync reset reset_sync stream subscribe trim trim_sync",
    "weft.systems.delta.connection": "DeltaLocalConnection DeltaS3Connection",
    "weft.systems.duckdb.connection": "DuckDBConnection",
    "weft.systems.kafka.connection": "KafkaConnection",
    "weft.systems.kinesis.connection": "KinesisConnection",
    "weft.systems.rabbitmq.connection": "RabbitMQConnection",
    "weft.systems.mysql.connection": "MySQLConnection",
    "weft.systems.objects.connection": "ObjectStoreLocalConnection ObjectStoreS3Connection",
    "weft.systems.objects.formats": "format_from_path",
    "weft.systems.postgres.connection": "PostgresConnection",
    "weft.systems.pubsub.connection": "PubSubConnection",
    "weft.systems.redis.asyncio_clients": "Redis RedisCluster",
    "weft.systems.redis.connection": "RedisConnection",
    "weft.systems.schema_registry.connection": "SchemaRegistryConnection",
    "weft.systems.sqlite.connection": "SQLiteConnection",
    "weft.udfs": "udaf udf",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}
# Reached as attributes too, without an import of their own: `weft.testing.…`.
_SUBMODULES = (
    "config",
    "connections",
    "errors",
    "expectations",
    "normalize",
    "patterns",
    "project",
    "settings",
    "streaming",
    "streams",
    "systems",
    "testing",
    "transforms",
    "types",
)

__all__ = sorted(_MODULE_OF)


# Hidden from type checkers, which would take any name for an attribute of the package.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        value: object
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        elif name in _SUBMODULES:
            return import_module(f"weft.{name}")
        elif name == "weft":  # `from weft import weft`, as a namespace for `@weft.stream`
            value = sys.modules[__name__]
        elif name == "__version__":
            from importlib.metadata import version

            value = version("weft")
        else:
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        globals()[name] = value
        return value


def _open_consumer(client: Any, *streams: Any, **options: Any) -> Any:
    from weft.consumers.consumer import xconsumer

    return xconsumer(client, *streams, **options)


def _triggered_models(stream: Any) -> tuple[str, ...]:
    from weft.pipelines.models import triggered_by
    from weft.project import current

    def left_out(name: str, error: Any) -> None:
        # The events are stored: a publish does not fail by a model.
        import logging

        logging.getLogger("weft.streams").warning("%s cannot be read, and is not named: %s", name, error.what)

    current().read_models(left_out)
    return triggered_by(stream)


def _load_models(*arguments: Any) -> None:
    from weft.pipelines.model_files import load_folder

    load_folder(*arguments)


def _find_connection(connection: Any) -> Any:
    from weft.project import current

    return current().connection(connection)


def _open_store(connection: Any) -> Any:
    from weft.streams.runtime import open_hub

    return open_hub(connection).store


hooks.find_connection = _find_connection
hooks.open_store = _open_store
hooks.open_consumer = _open_consumer
hooks.triggered_models = _triggered_models
hooks.load_models = _load_models


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES, "__version__"})
