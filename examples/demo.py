"""`make demo`: the main job end to end, on the embedded default: SQLite in a temporary folder. No server, no root.

Every step checks its own result; the first that is wrong ends the demo with exit code 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from textwrap import indent
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.markup import escape

import weft
from weft.streams.runtime import open_stream

console = Console(highlight=False, soft_wrap=True)
numbers = count(1)


@weft.stream(
    fields={"payment_id": "string", "amount": "decimal(10,2)", "paid_at": "timestamp?"},
    validate_schema=True,
    max_deliveries=3,
)
def payments() -> None:
    """Never called: it stands for the stream."""


def step(title: str) -> None:
    console.print(f"\n[bold cyan]{next(numbers)}. {title}[/]")


def say(text: str) -> None:
    console.print(escape(indent(text, "   ")))


def check(right: object, expected: str) -> None:
    """The demo's assertion: says what was expected, and fails loudly."""
    if not right:
        console.print(f"   [bold red]✗ wrong:[/] expected {escape(expected)}")
        sys.exit(1)
    console.print(f"   [green]✓[/] {escape(expected)}")


def payment(number: int) -> dict[str, object]:
    return {"payment_id": f"p_{number}", "amount": Decimal(number) / 100}


def in_another_process(what: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, __file__, what], check=False)


def publish_events() -> None:
    step("Publish: one event, a list, and one that does not fit")
    first = {"payment_id": "p_1", "amount": "12.50", "paid_at": "2026-01-31T12:00:00+01:00"}
    result = weft.publish_sync("payments", first)
    for key in ("status", "rows_received", "first_rowid", "publish_id"):
        say(f"{key}: {result[key]}")
    weft.publish_sync(payments, [payment(2), payment(3)])
    try:
        weft.publish_sync("payments", [payment(4), {"payment_id": "p_5", "amount": "a lot"}])
        check(False, "the list with a bad event to be refused")
    except weft.SchemaError as error:
        say(f"SchemaError: {error}")
        check((error.index, error.field) == (1, "amount"), "the error names the event and the field")
    check(open_stream(payments).log.count() == 3, "three events are stored, nothing of the refused list")


async def publish_from_64() -> None:
    step("64 publishers at once, one event a call, each acknowledged after its commit")
    each, before = 20, open_stream(payments).log.head()

    async def publisher(number: int) -> None:
        for i in range(each):
            await weft.publish(payments, payment(1000 * number + i))

    began = time.perf_counter()
    await asyncio.gather(*(publisher(number) for number in range(64)))
    seconds = time.perf_counter() - began
    stored = await weft.consume(payments, "counter", batch_size=10_000)
    moments = {event["_weft_published_at"] for event in stored if event["_weft_rowid"] > before}
    say(f"{64 * each:,} publishes in {seconds:.2f} s, {64 * each / seconds:,.0f} a second, in {len(moments)} commits")
    check(len(stored) == before + 64 * each, "every event is there")
    check(len(moments) < 64 * each / 4, "publishers share commits")


def share_the_work() -> None:
    step("Two workers under one consumer's name")
    took: dict[str, list[int]] = {"ann": [], "bob": []}

    def work(member: str) -> None:
        while events := weft.consume_sync(payments, "billing", batch_size=100, member=member):
            took[member] += [event["_weft_rowid"] for event in events]
            weft.ack_sync(payments, "billing", events)
            time.sleep(0.01)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, took))
    say(f"ann took {len(took['ann'])} events, bob {len(took['bob'])}")
    check(took["ann"] and took["bob"], "both had a share")
    everything = list(range(1, open_stream(payments).log.head() + 1))
    check(sorted(took["ann"] + took["bob"]) == everything, "together every event, each exactly once")


def take_over() -> None:
    step("A worker dies; another takes over when its lease ends")
    weft.publish_sync(payments, [payment(number) for number in range(5)])
    died = in_another_process("worker")
    check(died.returncode == -signal.SIGKILL, "a worker with a lease of 3 seconds was killed (-9) in the middle")
    check(weft.consume_sync(payments, "billing") == [], "its events are not given to others while the lease lasts")
    events = weft.consume_sync(payments, "billing", wait=20)
    check(len(events) == 5, "then all 5 come back")
    weft.ack_sync(payments, "billing", events)


def give_up_on_one() -> None:
    step("An event that nobody can process goes to the dead letters")
    weft.publish_sync(payments, {"payment_id": "p_poison", "amount": 0})
    attempts = 0
    while events := weft.consume_sync(payments, "billing"):
        attempts += 1
        weft.nack_sync(payments, "billing", events, reason="division by zero")
    letter = weft.consume_sync("payments__dead_letter", "operator")[0]
    say(f"dead letter: {letter['event']}, because of {letter['reason']!r}, after {letter['deliveries']} deliveries")
    check(attempts == 3 and letter["event"]["payment_id"] == "p_poison", "it was tried 3 times, then set aside")


async def follow() -> None:
    step("Subscribe: another process publishes, this one sees it at once")
    live = weft.subscribe(payments)
    other = asyncio.create_task(asyncio.to_thread(in_another_process, "publisher"))
    event = await asyncio.wait_for(anext(live), 20)
    delay = datetime.now(UTC) - event["_weft_published_at"]
    say(f"{event['payment_id']} arrived {delay.total_seconds() * 1000:.0f} ms after it was published")
    check(event["payment_id"] == "p_live", "the other process's event arrived")
    await other


def serve_over_http() -> None:
    step("Serve the streams over HTTP: closed without a key, followed live by Server-Sent Events")
    key = weft_command("apikey", "create", "--scope", "read", "--scope", "write", "--name", "demo").split()[0]
    with serving() as (service, address):
        url, opened_by = f"{address}/api/v1/streams/payments", {"Authorization": f"Bearer {key}"}
        say(f"$ weft serve --module demo    answers at {address}")
        body = json.dumps({"payment_id": "p_http", "amount": "7.00"}).encode()
        json_body = {"Content-Type": "application/json"}
        try:
            urlopen(Request(url, body, json_body))
            check(False, "a publish without a key to be refused")
        except HTTPError as error:
            check(error.code == 401, f"401 without a key: {json.load(error)['detail']}")
        with urlopen(Request(f"{url}/subscribe", headers=opened_by), timeout=20) as live:
            live.readline()  # a comment: it is subscribed
            with urlopen(Request(url, body, json_body | opened_by)) as answer:
                check(answer.status == 202, "202 once the event is stored")
            told = next(line for line in live if line.startswith(b"data:"))
            say(told.decode().strip())
            check(b"p_http" in told, "the subscriber has it")
            service.send_signal(signal.SIGTERM)
            check(b"event: stream.closing\n" in live.readlines(), "stopped by SIGTERM, it tells its subscribers")
        check(service.wait(20) == 0, "and ends in order")


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`weft serve` in another process, and where it answers."""
    command = [sys.executable, "-m", "weft", "serve", "--module", "demo", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stderr
            yield service, next(json.loads(line)["url"] for line in service.stderr if '"url"' in line)
        finally:
            service.terminate()


def fall_behind() -> None:
    step("Retention removes old events; a consumer that had not read them is told")
    weft.ack_sync(payments, "slow", weft.consume_sync(payments, "slow", batch_size=1))
    total = open_stream(payments).log.count()
    weft.trim_sync(payments, max_rows=100)
    try:
        weft.consume_sync(payments, "slow")
        check(False, "the slow consumer to be told")
    except weft.EventsLostError as error:
        say(f"EventsLostError: {error}")
        check(error.lost == total - 100 - 1, "it is told exactly how many it lost")
    check(len(weft.consume_sync(payments, "slow", batch_size=1000)) == 100, "and goes on with the 100 that are left")


def read_arrow() -> None:
    step("Read a range as Arrow")
    import pyarrow as pa
    import pyarrow.compute as pc

    log = open_stream(payments).log
    table = pa.Table.from_batches(log.read_arrow(log.floor(), log.head(), columns=["payment_id", "amount"]))
    columns = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
    say(f"{table.num_rows} rows of {columns}; the amounts add up to {pc.sum(table['amount'])}")
    check(table.num_rows == 100, "the range has the events that are left")


def load_into_a_table(folder: str) -> None:
    step("Load the stream into a table of another database; again, and nothing changes")
    warehouse = weft.SQLiteConnection(f"{folder}/warehouse.db", name="warehouse")
    for expected in ((100, 0), (0, 100)):
        result = weft.load(payments, target="payments", connection=warehouse, mode="merge", keys=["_weft_rowid"])
        say(
            f"{result.engine}: {result.rows_read} read in {result.seconds:.1f} s, {result.inserted} inserted, "
            f"{result.updated} updated, {result.unchanged} unchanged"
        )
        check((result.inserted, result.unchanged) == expected, f"{expected[0]} new rows, {expected[1]} unchanged")

    step("Keep the history of what changes (scd2): a late event is put where it belongs")
    plans = [("basic", 1), ("gold", 3)], [("silver", 2)]
    for events in plans:
        rows = [{"customer": 7, "plan": plan, "since": datetime(2026, month, 1, tzinfo=UTC)} for plan, month in events]
        weft.load(
            rows, target="plans", connection=warehouse, mode="scd2", keys=["customer"], event_timestamp_column="since"
        )
    with closing(sqlite3.connect(f"{folder}/warehouse.db")) as database:
        found = database.execute(
            "SELECT plan, valid_from, valid_to, is_current FROM plans ORDER BY valid_from"
        ).fetchall()
    for plan, since, until, current in found:
        say(f"{plan:<7} {since[:10]} to {(until or 'now')[:10]}{'  (current)' if current else ''}")
    check([row[0] for row in found] == ["basic", "silver", "gold"], "silver stands between basic and gold")
    check([row[3] for row in found] == [0, 0, 1], "one version is current")


CUSTOMERS = """
from typing import Annotated

import weft
from weft import pk
from weft.expectations import range
from weft.normalize import lower, trim
from weft.types import BigInt, Integer, String, Text


@weft.table(schema="analytics")
class Customers:
    customer_id: Annotated[BigInt, pk()]
    email: Annotated[String[256] | None, lower(), trim()]
    age: Integer | None


@weft.table(schema="analytics")
class Ages:
    decade: Annotated[BigInt, pk()]
    customers: BigInt


@weft.pipeline(
    target=Customers,
    mode="merge",
    schedule="*/5 * * * *",
    incremental_column="changed",
    column_map={"customer_id": "id"},
    on_drift="ignore",
    expectations=[range("age", min=0, max=130, on_failure="quarantine")],
)
def sync_customers(conn):
    return "SELECT id, email, age, changed FROM crm"


@weft.pipeline(target=Ages, mode="merge", schedule="@daily", depends_on=["sync_customers"])
def ages(conn):
    return 'SELECT age / 10 * 10 AS decade, count(*) AS customers FROM "analytics.customers" GROUP BY 1'
"""


def declare_pipelines() -> None:
    step("Declare tables and pipelines in a file; run what is due, in order, each slot once")
    with open("my_pipelines.py", "w") as file:
        file.write(CUSTOMERS)
    crm = [
        {"id": 1, "email": " Ada@Example.org", "age": 36, "changed": 1},
        {"id": 2, "email": "GRACE@example.org ", "age": 45, "changed": 2},
        {"id": 3, "email": "nobody@example.org", "age": 999, "changed": 3},
    ]
    weft.load(crm, target="crm")
    first = weft_command("run-due", "--module", "my_pipelines")
    check("3 read, 2 inserted, 1 quarantined" in first, "two customers were merged, the one of 999 years was put aside")
    check("succeeded ages" in first, "what depends on them ran after them, without Spark")
    check("Nothing is due" in weft_command("run-due", "ages", "--module", "my_pipelines"), "a slot runs once")

    step("Preview a run: what would change is found out and rolled back")
    weft.load([{"id": 2, "email": "hopper@example.org", "age": 46, "changed": 4}], target="crm")
    preview = weft_command("preview", "sync_customers", "--module", "my_pipelines")
    check("1 read, 1 updated" in preview, "one customer would be updated")
    weft_command("run", "sync_customers", "--module", "my_pipelines")
    with closing(sqlite3.connect(".weft/weft.db")) as reader:
        found = reader.execute('SELECT customer_id, email FROM "analytics.customers" ORDER BY 1').fetchall()
    say("\n".join(f"{number}  {email}" for number, email in found))
    check(found == [(1, "ada@example.org"), (2, "hopper@example.org")], "the table has what the pipeline made of it")
    weft_command("status", "--module", "my_pipelines")


SHOP = """
import weft


@weft.stream(fields={"order_id": "int64", "country": "string", "total": "string"})
def orders():
    pass


@weft.streaming_pipeline(
    source=weft.Source(query=orders, max_rows=1000),
    target="default",
    target_table=(None, "clean_orders"),
    mode="merge",
    keys=["order_id"],
    transform_sql=\"\"\"
        SELECT s.order_id, c.name AS country, CAST(trim(s.total) AS DECIMAL(10, 2)) AS total
        FROM source s LEFT JOIN countries c ON upper(trim(s.country)) = c.code
    \"\"\",
    lookups={"countries": weft.Lookup(connection="default", table="countries")},
    transform_on_error="dlq",
    dead_letter_stream="orders_failed",
)
def clean():
    pass
"""
PUBLISHER = """
import sys

import my_shop
import weft

first = int(sys.argv[1])
for number in range(first, first + 1000, 50):
    rows = [
        {"order_id": each, "country": " nl" if each % 2 else "BE ", "total": f" {each}.50"}
        for each in range(number, number + 50)
    ]
    weft.publish_sync(my_shop.orders, rows)
"""


def stream_into_a_table() -> None:
    step(
        "A streaming pipeline on Spark, with the Java that its package brings: clean, enrich and merge events as they "
        "come, and be killed in the middle"
    )
    Path("my_shop.py").write_text(SHOP)
    Path("publisher.py").write_text(PUBLISHER)
    weft.load([{"code": "NL", "name": "Netherlands"}, {"code": "BE", "name": "Belgium"}], target="countries")
    consume = [sys.executable, "-m", "weft", "consume", "--module", "my_shop", "clean"]
    say("$ weft consume --module my_shop clean")
    with open("consume.log", "w") as log:
        daemon = subprocess.Popen(consume, stdout=log, stderr=log)
        try:
            publishers = [subprocess.Popen([sys.executable, "publisher.py", str(1000 * each)]) for each in range(4)]
            say("four processes publish a thousand orders each")
            patiently(lambda: 0 < orders_stored() < 4000, "some orders are in the table")
            daemon.kill()
            daemon.wait()
            check(True, f"killed (-9) in the middle, with {orders_stored():,} orders in the table")
            check([each.wait() for each in publishers] == [0] * 4, "the publishers did not notice")
            sys.path.insert(0, os.getcwd())
            import my_shop  # type: ignore[import-not-found]

            weft.publish_sync(my_shop.orders, {"order_id": 4000, "country": "NL", "total": "a lot"})
            daemon = subprocess.Popen(consume, stdout=log, stderr=log)
            patiently(lambda: orders_stored() == 4000, "started again, it goes on where it was")
            letters = weft.consume_sync(dead_letters(), "operator", wait=60)
            daemon.terminate()
            check(daemon.wait(60) == 0, "stopped by SIGTERM, it ends in order")
        finally:
            daemon.kill()
    with closing(sqlite3.connect(".weft/weft.db")) as reader:
        rows = reader.execute("SELECT count(*), count(DISTINCT order_id), sum(total) FROM clean_orders").fetchone()
        first = reader.execute("SELECT order_id, country, total FROM clean_orders ORDER BY 1 LIMIT 2").fetchall()
    say("\n".join(f"{number}  {country:<12} {total}" for number, country, total in first))
    check(rows[:2] == (4000, 4000), "nothing is lost, and nothing is there twice")
    check(abs(rows[2] - sum(number + 0.5 for number in range(4000))) < 0.01, "the totals add up")
    say(f"dead letter: {letters[0]['payload']}: {letters[0]['error'][:90]}…")
    check(len(letters) == 1 and "a lot" in letters[0]["payload"], "the one that is no number is in the dead letters")


def count_by_the_minute() -> None:
    step("A window: count clicks by the minute; one that comes late changes what was counted")
    clicks = weft.stream(name="clicks", fields={"user": "string", "at": "timestamp"})(lambda: None)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)

    def counted(*seconds: int) -> list[tuple[str, int]]:
        """Publish clicks of so many seconds after noon, run the pipeline over them, and read its table."""
        weft.publish_sync(clicks, [{"user": "ann", "at": noon + timedelta(seconds=each)} for each in seconds])
        weft.run_streaming_pipeline(
            name="clicks_per_minute",
            source=clicks,
            target="default",
            target_table="clicks_per_minute",
            mode="merge",
            keys=["user", "window_start"],
            window=weft.Window(
                kind="tumbling",
                duration_ms=60_000,
                group_by=("user",),
                event_time_column="at",
                aggregations=[weft.Aggregation(agg="count", as_="n")],
                late_data="reopen",
                allowed_lateness_ms=60_000,
            ),
            once=True,
        )
        with closing(sqlite3.connect(".weft/weft.db")) as reader:
            return reader.execute("SELECT substr(window_start, 12, 5), n FROM clicks_per_minute ORDER BY 1").fetchall()

    check(counted(1, 20, 61) == [("12:00", 2)], "the minute of 12:00 closed with 2 clicks; that of 12:01 is open")
    check(counted(30) == [("12:00", 3)], "a click of 12:00:30 comes late: it has 3")
    check(counted(120) == [("12:00", 3), ("12:01", 1)], "and 12:01 closes with 1")


def orders_stored() -> int:
    with closing(sqlite3.connect(".weft/weft.db")) as reader:
        try:
            return int(reader.execute("SELECT count(*) FROM clean_orders").fetchone()[0])
        except sqlite3.OperationalError:  # there is no such table yet
            return 0


def dead_letters() -> object:
    return weft.stream(name="orders_failed", fields={"payload": "string", "error": "string"})(lambda: None)


def patiently(condition: Callable[[], bool], expected: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            say(Path("consume.log").read_text()[-2000:])
            check(False, expected)
        time.sleep(0.05)
    check(True, expected)


def weft_command(*arguments: str) -> str:
    """Run a command as a user would, and show what it prints."""
    say(f"$ weft {' '.join(arguments)}")
    done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, check=False)
    say("\n".join(part for part in (done.stdout.rstrip(), done.stderr.rstrip()) if part))
    check(done.returncode == 0, "exit code 0")
    return done.stdout


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        # Before any setting of the user's own: the demo must not write into their database.
        os.chdir(folder)
        os.environ["WEFT_DSN_DEFAULT"] = f"sqlite:///{folder}/.weft/weft.db"
        console.print(f"[bold]Weft {weft.__version__}[/], on SQLite in {folder} (removed at the end)")
        publish_events()
        asyncio.run(publish_from_64())
        share_the_work()
        take_over()
        give_up_on_one()
        asyncio.run(follow())
        serve_over_http()
        fall_behind()
        read_arrow()
        load_into_a_table(folder)
        declare_pipelines()
        stream_into_a_table()
        count_by_the_minute()
        weft.streams.close()
    console.print(f"\n[bold green]All of it worked[/], in {time.perf_counter() - began:.1f} seconds.")


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        weft.consume_sync(payments, "billing", lease=3)
        os.kill(os.getpid(), signal.SIGKILL)
    elif sys.argv[1:] == ["publisher"]:
        weft.publish_sync(payments, {"payment_id": "p_live", "amount": 1})
    else:
        main()
