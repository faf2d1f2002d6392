"""Make the pictures of the page for the docs: a demo project under load, each view in both schemes.

    .venv/bin/python -m tools.docs_pictures                     the pictures of docs/dashboard.md
    .venv/bin/python -m tools.docs_pictures --folder shots --all   every view, in four widths, to look at

It needs Chromium and Java.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SHOP = """
import weft
from typing import Annotated
from weft import pk
from weft.types import BigInt, Double, Text


@weft.stream(
    fields={"id": "int64", "city": "string", "total": "float64", "at": "timestamp"},
    description="What customers order.", tags=["sales"], on_schema_drift="quarantine", max_deliveries=3,
)
def orders(): ...


@weft.stream(
    fields={"user_id": "int64", "amount": "int64", "at": "timestamp"},
    description="Clicks of the shop's pages.", tags=["web"],
)
def clicks(): ...


@weft.stream(
    fields={"op": "string", "before": "json", "after": "json", "source": "json"},
    description="Changes of the table customers.", tags=["cdc"],
)
def changes(): ...


@weft.table
class Rates:
    city: Annotated[Text, pk()]
    rate: Double


@weft.pipeline(target=Rates, mode="merge", schedule="0 * * * *", description="Tax rates by city, each hour.")
def rates(conn):
    return "SELECT 'Oslo' AS city, 0.25 AS rate UNION ALL SELECT 'Bergen', 0.25 UNION ALL SELECT 'Tromsø', 0.15"


@weft.table
class Ledger:
    id: Annotated[BigInt, pk()]
    total: Double


@weft.pipeline(
    target=Ledger, mode="append", schedule="0 2 * * *", depends_on=["rates"], description="The ledger, each night.",
)
def ledger(conn):
    return "SELECT 1 AS id, 2.5 AS total"


@weft.pipeline(
    target="refunds", schedule="30 2 * * *", expectations=[weft.expectations.range("amount", min=0)],
    on_quality_failure="quarantine", description="What customers got back.",
)
def refunds():
    return [{"order": number, "amount": 12 - number} for number in range(16)]


@weft.streaming_pipeline(
    source=orders, target="default", target_table="clean_orders", description="Orders with a known tax.",
    transform_sql="SELECT id, upper(city) AS city, CAST(100 / (id % 97 - 5) AS DOUBLE) AS tax, at FROM source",
    transform_on_error="dlq", dead_letter_table="orders_failed",
)
def clean_orders(): ...


@weft.streaming_pipeline(
    source=clicks, target="default", target_table="clicks_per_minute", description="Clicks of each user by minute.",
    watermark=weft.Watermark(lateness_ms=5000),
    window=weft.Window(
        kind="tumbling", duration_ms=60_000, group_by=("user_id",), event_time_column="at",
        aggregations=[weft.Aggregation(agg="count", as_="n"), weft.Aggregation(agg="sum", column="amount")],
    ),
)
def clicks_per_minute(): ...


@weft.streaming_pipeline(
    source=changes, target="default", target_table="customers", description="A mirror of the table customers.",
    cdc=weft.CDC(envelope="debezium", key_field="after.id"),
)
def customers_mirror(): ...


@weft.streaming_pipeline(
    source=orders, target="default", target_table="shipments", description="What is to be sent.",
    transform_sql="SELECT id, CAST(100 / (id % 7 - 3) AS DOUBLE) AS boxes FROM source",
)
def shipments(): ...
"""
# A scheduler that ends without a word, as one that is killed.
KILLED = """
from weft.operate.runlog import open_run_log
from weft.project import Project, use

with use(Project()), open_run_log() as log:
    log.attend("process:scheduler:1")
"""
MODELS = {
    "revenue": """-- What each city has bought.
-- tags: sales
SELECT city, sum(total) AS revenue, count(*) AS orders
FROM events.orders
GROUP BY city
""",
    "best_cities": """-- The cities that bought most, with their tax.
-- tags: sales
SELECT city, round(revenue * 0.25, 2) AS tax, revenue / orders AS mean
FROM revenue
WHERE revenue > 100
""",
}
# By the name of a picture: the address of the view, and what is there once all of it is.
VIEWS = {
    "overview": ("", "Live tail"),
    "stream": ("#/streams/orders", "The last day"),
    "pipelines": ("#/pipelines", "ledger"),
    "pipeline": ("#/pipelines/ledger", "Why it failed"),
    "quarantine": ("#/pipelines/refunds", "Quarantined rows"),
    "model": ("#/pipelines/best_cities", "where they come from"),
    "streaming": ("#/streaming", "Held by"),
    "streaming-window": ("#/streaming/clicks_per_minute", "Open windows"),
    "streaming-cdc": ("#/streaming/customers_mirror", "Change data capture"),
    "schedule": ("#/schedule", "Due next"),
    "streaming-failed": ("#/streaming/shipments", "Why it failed"),
    "processes": ("#/processes", "silent"),
    "streaming-pipeline": ("#/streaming/clean_orders", "The last day"),
    "graph": ("#/graph", "A click opens a node"),
    "graph-columns": ("#/graph/best_cities", "orders.total"),
    "run": ("#/runs/RUN", "Attempt"),
    "letters": ("#/letters", "refunds"),
    "letters-pipeline": ("#/letters/clean_orders", "By error"),
    "audit": ("#/audit", "Ann"),
    "api": ("docs", "/api/v1/streams"),
}
DOCS = ("overview", "streaming-pipeline", "graph")
WIDTHS = (360, 768, 1440, 2560)


@contextmanager
def demo(folder: Path) -> Iterator[str]:
    """Make the demo project in a folder, with what ran in it; yield the address of its service while events come."""
    (folder / "models").mkdir(parents=True)
    (folder / "shop.py").write_text(SHOP)
    (folder / "weft.toml").write_text('modules = ["shop"]\nmodels = ["models"]\n')
    for name, text in MODELS.items():
        (folder / "models" / f"{name}.sql").write_text(text)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    import weft
    from weft.project import Project, use

    with use(Project(root=folder)) as project:
        project.load_modules(())
        _fill(weft)
        weft_command = [sys.executable, "-m", "weft"]
        subprocess.run([*weft_command, "run", "refunds"], check=True, stdout=subprocess.DEVNULL)
        for pipeline in ("clicks_per_minute", "customers_mirror"):
            subprocess.run([*weft_command, "consume", pipeline, "--once"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, "-c", KILLED], check=True)
        failing = [*weft_command, "consume", "shipments", "--restart-on-error", "--min-backoff-ms", "20000"]
        running: list[subprocess.Popen[Any]] = [
            subprocess.Popen([*weft_command, "consume", "clean_orders"], stdout=subprocess.DEVNULL),
            subprocess.Popen([*weft_command, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True),
            subprocess.Popen(failing, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        ]
        stopped = threading.Event()
        publishing = threading.Thread(target=_publish, args=(weft, stopped), daemon=True)
        publishing.start()
        try:
            yield _address(running[1])
        finally:
            stopped.set()
            publishing.join(10)
            for process in running:
                process.terminate()
                process.wait(60)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{") and "url" in (said := json.loads(line)):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # so that it never waits for a reader
            return str(said["url"])
    raise SystemExit("the service did not start")


CITIES = ("Oslo", "Bergen", "Tromsø", "Bodø", "Ålesund")


def _order(number: int) -> dict[str, Any]:
    city = CITIES[number % len(CITIES)]
    return {"id": number, "city": city, "total": round(5 + number * 7.3 % 95, 2), "at": datetime.now(UTC)}


def _fill(weft: Any) -> None:
    from weft.operate.runlog import open_run_log
    from weft.server.history_table import STREAMING, STREAMS, Flow, HistoryTable, Values

    now = datetime.now(UTC)
    weft.publish_sync("orders", [_order(number) for number in range(400)])
    weft.publish_sync("orders", [{"id": "seven"}, {"id": 8, "colour": "red"}, {"id": 9, "colour": "blue"}])
    clicks = [
        {"user_id": number % 7, "amount": number, "at": now - timedelta(seconds=400 - number)} for number in range(400)
    ]
    weft.publish_sync("clicks", clicks)
    changes = []
    for number in range(40):
        source = {"lsn": number, "ts_ms": int(time.time() * 1000)}
        row = {"id": number % 12, "name": f"Customer {number % 12}"}
        operation = "c" if number < 12 else "d" if number % 9 == 0 else "u"
        ends = (row, None) if operation == "d" else (None, row)
        changes.append({"op": operation, "before": ends[0], "after": ends[1], "source": source})
    weft.publish_sync("changes", changes)
    chance = random.Random(1)
    with open_run_log() as log:
        for number in range(16):
            for name in ("rates", "ledger", "revenue", "best_cities"):
                failed = name == "ledger" and number in (6, 15)
                claimed: Any = log.claim(name, resume=False)
                time.sleep(0.002 + chance.random() * 0.02)
                counts = {"rows_read": 400 + number * 30, "inserted": 200 + number * 12, "updated": number}
                error = "The check not_null(total) found 3 rows; the target is as it was." if failed else None
                status = "failed" if failed else "succeeded"
                log.finish(claimed, status, counts=None if failed else counts, error=error)
    streams, flows = HistoryTable(STREAMS, 7), HistoryTable(STREAMING, 7)
    published, rows, batches, busy = 0, 0, 0, 0
    for step in range(288, 0, -1):
        minute = (now - timedelta(minutes=5 * step)).replace(second=0, microsecond=0)
        day = 1 + math.sin(step / 288 * 2 * math.pi) * 0.6
        more = int(300 * 24 * day * (0.85 + chance.random() * 0.3))
        published, rows, batches = published + more, rows + more - chance.randrange(40), batches + 60
        busy += int(60 * (180 + 60 * day + chance.random() * 40))
        lag = int(max(0, 900 * (day - 1.35)) + chance.random() * 40)
        streams.write(minute, {"orders": Values(published, lag, 0, 3 if step < 60 else 0)})
        flows.write(minute, {"clean_orders": Flow(rows, rows - 20, batches, busy, (288 - step) // 40, lag)})


def _publish(weft: Any, stopped: threading.Event) -> None:
    number = 1000
    while not stopped.wait(0.25):
        weft.publish_sync("orders", [_order(number + each) for each in range(12)])
        number += 12
        events = weft.consume_sync("orders", "billing", batch_size=13, lease=600)
        weft.ack_sync("orders", "billing", events)
        weft.publish_sync("clicks", [{"user_id": number % 7, "amount": 1, "at": datetime.now(UTC)}] * 5)


def take(url: str, folder: Path, *, everything: bool, only: str | None = None) -> None:
    """Take the pictures, after the service has sampled for a while."""
    import httpx
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    run = httpx.get(f"{url}/api/v1/pipelines/ledger").raise_for_status().json()["runs"][0]["run_id"]
    key = _acted(url) if everything else None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in WIDTHS if everything else (1280,):
                size = {"width": width, "height": 820}
                context = browser.new_context(color_scheme=scheme, viewport=size, bypass_csp=everything)
                if key is not None:
                    kept = f"sessionStorage.setItem('weft.key', {key!r})"
                    context.add_init_script(f"location.protocol === 'about:' || {kept}")
                page = context.new_page()
                page.on("console", lambda message: print(message.type, message.text))
                page.on("pageerror", lambda error: print("error", error))
                for name, (address, text) in VIEWS.items():
                    if (not everything and name not in DOCS) or (only and not re.search(only, name)):
                        continue
                    page.goto("about:blank")
                    page.goto(f"{url}/{address.replace('RUN', run)}")
                    page.locator("main").get_by_text(text).first.wait_for(timeout=60_000)
                    page.wait_for_timeout(1_500 if everything else 12_000)
                    if everything:  # what is below the window is not drawn otherwise
                        page.add_style_tag(content=".tail li { content-visibility: visible }")
                    file = folder / (f"{name}-{scheme}-{width}.png" if everything else f"{name}-{scheme}.png")
                    page.screenshot(path=file, full_page=everything)
                context.close()
        browser.close()


def _acted(url: str) -> str:
    """Make a key, and do something with it: for the audit log, and buttons that are on."""
    import httpx

    said = subprocess.run(
        [sys.executable, "-m", "weft", "apikey", "create", "--name", "Ann", "--scope", "admin", "--format", "json"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    key = str(json.loads(said)["key"])
    ends = time.monotonic() + 60
    while httpx.get(f"{url}/api/v1/pipelines").status_code != 401 and time.monotonic() < ends:
        time.sleep(1)  # until the service knows it
    for action in ("ledger/pause", "ledger/resume", "refunds/pause"):
        path = f"{url}/api/v1/pipelines/{action}"
        httpx.post(path, headers={"authorization": f"Bearer {key}"}).raise_for_status()
    return key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where the pictures go")
    parser.add_argument("--all", action="store_true", help="every view, in four widths, as it is in full")
    parser.add_argument("--only", help="the views whose names match this expression")
    options = parser.parse_args()
    folder = options.folder.absolute()
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as temporary, demo(Path(temporary) / "shop") as url:
        time.sleep(0 if options.all else 100)  # five minutes would fill the chart
        take(url, folder, everything=options.all, only=options.only)


if __name__ == "__main__":
    main()
