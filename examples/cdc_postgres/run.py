"""Changes in one PostgreSQL appear in another: PostgreSQL → Debezium → Kafka → Weft → PostgreSQL.

    python examples/cdc_postgres/run.py

It starts private servers of PostgreSQL and Kafka, and Debezium's engine, and ends them. Elsewhere these are your own:
then `weft consume mirror.toml` is all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from debezium_process import Debezium  # noqa: E402 - of the tests, as are the servers
from kafka_server import KafkaServer  # noqa: E402
from servers import PostgresServer, wait_until  # noqa: E402

CUSTOMERS = "CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL, credit numeric(10,2), since timestamptz)"


def main() -> None:
    kafka, postgres = KafkaServer(), PostgresServer()
    kafka.start()
    postgres.start()
    source_url, target_url = postgres.create_database("shop"), postgres.create_database("mirror")
    source, target = postgres.connect("shop"), postgres.connect("mirror")
    source.execute(CUSTOMERS)
    target.execute(CUSTOMERS)
    source.execute("INSERT INTO customers VALUES (1, 'Ada', 12.5, now()), (2, 'Ben', NULL, now())")

    kafka.create_topic(name="dbz.public.customers")
    debezium = Debezium(kafka.bootstrap)
    schemas = {"value.converter.schemas.enable": "true"}  # so that numeric and timestamptz arrive as such
    debezium.capture("dbz", source_url, ["public.customers"], **schemas)
    debezium.start()

    def rows(connection: Any) -> Any:
        return connection.execute("SELECT * FROM customers ORDER BY id").fetchall()

    def arrived() -> bool:
        assert pipeline.poll() is None, "the pipeline has ended"
        return bool(rows(source) == rows(target))

    settings = {**os.environ, "KAFKA": kafka.bootstrap, "TARGET_URL": target_url, "SHOP_URL": source_url}
    with tempfile.TemporaryDirectory() as project:
        Path(project, "weft.toml").write_text('[connections.shop]\nkind = "postgres"\nurl = "${SHOP_URL}"\n')
        weft = [sys.executable, "-m", "weft.cli"]
        pipeline = subprocess.Popen([*weft, "consume", str(HERE / "mirror.toml")], cwd=project, env=settings)
        try:
            wait_until(arrived, "the first rows in the mirror", seconds=120)
            print("copied: ", rows(target))
            source.execute("UPDATE customers SET credit = 99.99 WHERE id = 2")
            source.execute("DELETE FROM customers WHERE id = 1")
            source.execute("INSERT INTO customers VALUES (3, 'Cem', 0, now())")
            wait_until(arrived, "the changes in the mirror", seconds=120)
            print("changed:", rows(target))
            verify = [*weft, "cdc", "verify", str(HERE / "mirror.toml"), "--source", "shop"]
            subprocess.run(verify, cwd=project, env=settings, check=True, stderr=subprocess.STDOUT)
        finally:
            pipeline.send_signal(signal.SIGTERM)
            pipeline.wait(60)


if __name__ == "__main__":
    main()
