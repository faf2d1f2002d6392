"""Changes in PostgreSQL appear in a Delta table: PostgreSQL → Debezium → Kafka → Weft → Delta.

    python examples/cdc_delta/run.py

It starts private servers of PostgreSQL and Kafka, and Debezium's engine, and ends them. Elsewhere these are your own:
then `weft consume mirror.toml` is all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from debezium_process import Debezium  # noqa: E402 - of the tests, as are the servers
from kafka_server import KafkaServer  # noqa: E402
from servers import PostgresServer, wait_until  # noqa: E402

TOPIC = "dbz.public.customers"


def main() -> None:
    kafka, postgres = KafkaServer(), PostgresServer()
    kafka.start()
    postgres.start()
    kafka.create_topic(name=TOPIC)
    source_url = postgres.create_database("shop")
    source = postgres.connect("shop")
    source.execute("CREATE TABLE customers (id int PRIMARY KEY, name text, credit numeric(10,2), since timestamptz)")
    source.execute("INSERT INTO customers VALUES (1, 'Ada', 12.5, '2026-01-31'), (2, 'Ben', NULL, now())")

    debezium = Debezium(kafka.bootstrap)
    schemas = {"value.converter.schemas.enable": "true"}  # so that numeric and timestamptz arrive as such
    debezium.capture("dbz", source_url, ["public.customers"], **schemas)
    debezium.start()

    with tempfile.TemporaryDirectory() as project:
        settings = {**os.environ, "KAFKA": kafka.bootstrap, "LAKE": f"{project}/lake"}
        Path(project, "weft.toml").write_text(f'[connections.lake]\nkind = "delta_local"\npath = "{project}/lake"\n')

        def weft(*command: str) -> None:
            subprocess.run([sys.executable, "-m", "weft.cli", *command], cwd=project, env=settings, check=True)

        for changes, messages in (
            ("SELECT 1", 2),
            ("UPDATE customers SET credit = 99.99 WHERE id = 2; DELETE FROM customers WHERE id = 1", 5),
        ):
            source.execute(changes)
            wait_until(lambda wanted=messages: len(kafka.messages(TOPIC)) >= wanted, "Debezium's messages")
            weft("consume", str(HERE / "mirror.toml"), "--once")
            weft("sql", "SELECT * FROM lake.default.customers")


if __name__ == "__main__":
    main()
