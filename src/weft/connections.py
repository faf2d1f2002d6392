"""Connections and what belongs to them, under one name: `from weft.connections import format_from_path`."""

from weft.project import connect, connection, get_connection, register_connection, registered_connections
from weft.systems.base import Connection
from weft.systems.delta.connection import DeltaLocalConnection, DeltaS3Connection
from weft.systems.duckdb.connection import DuckDBConnection
from weft.systems.kafka.connection import KafkaConnection
from weft.systems.kinesis.connection import KinesisConnection
from weft.systems.mysql.connection import MySQLConnection
from weft.systems.objects.connection import ObjectStoreLocalConnection, ObjectStoreS3Connection
from weft.systems.objects.formats import format_from_path
from weft.systems.postgres.connection import PostgresConnection
from weft.systems.pubsub.connection import PubSubConnection
from weft.systems.rabbitmq.connection import RabbitMQConnection
from weft.systems.redis.connection import RedisConnection
from weft.systems.schema_registry.connection import SchemaRegistryConnection
from weft.systems.sqlite.connection import SQLiteConnection

__all__ = [
    "Connection",
    "DeltaLocalConnection",
    "DeltaS3Connection",
    "DuckDBConnection",
    "KafkaConnection",
    "KinesisConnection",
    "MySQLConnection",
    "ObjectStoreLocalConnection",
    "ObjectStoreS3Connection",
    "PostgresConnection",
    "PubSubConnection",
    "RabbitMQConnection",
    "RedisConnection",
    "SQLiteConnection",
    "SchemaRegistryConnection",
    "connect",
    "connection",
    "format_from_path",
    "get_connection",
    "register_connection",
    "registered_connections",
]
