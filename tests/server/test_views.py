"""The views of the page, in a real browser: each opens by its address, and its actions are done and undone."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

import warm_python
from browser import broken_words, findings, uneven_rows
from operations_project import failed_activity
from servers import wait_until

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
STREAMS = f"""
from typing import Annotated
from weft import pk
from weft.types import BigInt

HOSTILE = {HOSTILE!r}

@weft.stream(fields={{"n": "int64"}}, description=HOSTILE, on_schema_drift="quarantine", max_deliveries=1)
def orders(): ...

@weft.table
class Totals:
    id: Annotated[BigInt, pk()]

@weft.pipeline(target=Totals, mode="append", schedule="0 2 * * *", description=HOSTILE)
def nightly(conn):
    return "SELECT 1 AS id"

@weft.model(trigger="manual")
def revenue(orders):
    return "SELECT count(*) AS n FROM orders"

@weft.streaming_pipeline(source=orders, target="default", target_table="clean", description=HOSTILE)
def loader(): ...
"""
RUNS = f"""
import logging
from weft.operate.logs import captured
from weft.operate.runlog import open_run_log
from weft.project import current

with open_run_log() as log:
    log.finish(log.claim("nightly"), "succeeded", counts={{"rows_read": 7, "inserted": 5}})
    claimed = log.claim("nightly", resume=False)
    with captured(current().root, claimed.run_id, 1):
        logging.getLogger("weft.runner").info("what the log says")
    log.finish(claimed, "failed", error={HOSTILE!r})
    print(claimed.run_id)
"""


@pytest.fixture(scope="module")
def run_id(service: Any) -> str:
    """A run that failed; and events of which two do not fit."""
    service.publish("orders", [{"n": 1}, {"n": "two"}, {"n": "three"}])
    done = warm_python.run([sys.executable, "-c", RUNS], cwd=service.folder, check=True, capture_output=True, text=True)
    return str(done.stdout).strip()


VIEWS = {
    "": "Events per second",
    "#/pipelines": "nightly",
    "#/pipelines/nightly": "Why it failed",
    "#/pipelines/revenue": "Columns and where they come from",
    "#/runs/RUN": "what the log says",
    "#/streaming": "loader",
    "#/streaming/loader": "Lag by source",
    "#/letters": "orders__quarantine",
    "#/schedule": "Due next",
    "#/processes": "service",
    "#/graph": "A click opens a node",
    "#/graph/revenue": "Columns of revenue",
    "#/streams/orders": "Rejected events",
    "#/streams/orders__quarantine": "Live tail",
    "#/nowhere": "Events per second",
    "#/%E0%A4%A": "Events per second",
}

TOO_WIDE = """() => [...document.querySelectorAll(".panel:not(.graph) .scroll, nav")]
  .map((each) => [each.scrollWidth, each.clientWidth])
  .filter(([needed, there]) => needed > there)"""


def opened(page: Page, service: Any, address: str, text: str) -> None:
    page.goto(f"{service.url}/{address}")
    expect(page.locator("main")).to_contain_text(text)
    expect(page.locator("#live-text")).to_have_text("Live")


def test_each_view_has_an_address(
    service: Any, run_id: str, open_page: Callable[..., Page], count: Callable[..., int]
) -> None:
    for scheme, width in (("light", 1280), ("dark", 360))[-count(2, 1) :]:
        page = open_page(service.url, color_scheme=scheme, viewport={"width": width, "height": 740})
        for address, text in VIEWS.items():
            opened(page, service, address.replace("RUN", run_id), text)
            # What comes from outside is a text.
            assert page.locator("main img, main script, main iframe").count() == 0, address
            for each in (width, 1000, 2560) if width > 360 else (width, 620):
                page.set_viewport_size({"width": each, "height": 740})
                assert page.evaluate("document.documentElement.scrollWidth") <= each, address
                # On a phone the menu alone scrolls sideways.
                assert page.evaluate(TOO_WIDE if each >= 1000 else TOO_WIDE.replace(", nav", "")) == [], (address, each)
                assert broken_words(page) == [], address
                assert uneven_rows(page) == [], address


@pytest.mark.full
def test_axe_finds_nothing(service: Any, run_id: str, open_page: Callable[..., Page]) -> None:
    found = []
    for scheme, width in (("light", 1280), ("dark", 360)):
        page = open_page(service.url, color_scheme=scheme, viewport={"width": width, "height": 740})
        for address, text in VIEWS.items():
            opened(page, service, address.replace("RUN", run_id), text)
            found += [(address, scheme, each) for each in findings(page)]
        page.goto(f"{service.url}/docs")
        expect(page.locator("main")).to_contain_text("/api/v1/streams")
        found += [("docs", scheme, each) for each in findings(page)]
    assert found == []


@pytest.mark.full
def test_from_a_pipeline_to_its_run_and_back(service: Any, run_id: str, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url)
    page.locator("#views").get_by_role("link", name="Pipelines").click()
    expect(page.locator("#views a[aria-current]")).to_have_text("Pipelines")
    page.locator("#view").get_by_role("link", name="nightly", exact=True).click()
    expect(page.locator("#view h1")).to_have_text("nightly")
    expect(page.locator("#view .code").first).to_have_text(HOSTILE)
    expect(page.locator("#view")).to_contain_text("SELECT 1 AS id")
    page.locator("#view .timeline a").first.click()
    expect(page).to_have_url(re.compile(f"#/runs/{run_id}$"))
    expect(page.locator("#view")).to_contain_text("what the log says")
    assert page.title() == f"{run_id} · Weft"
    page.go_back()
    expect(page.locator("#view h1")).to_have_text("nightly")


ACTIVITY = """
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from weft.engine.streaming.activity import Activity
from weft.engine.streaming.checkpoint import Checkpoint
from weft.pipelines.streaming.declare import find
from weft.pipelines.streaming.execution import Report
from weft.project import current
from weft.server.history_table import STREAMING, STREAMS, Flow, HistoryTable, Values

current().load_modules(["served_streams"])
checkpoint = Checkpoint.of(find("loader"))
checkpoint.path.mkdir(parents=True)
done = Activity(checkpoint)
with done.kept(SimpleNamespace(now=dict)):
    done.note(Report("loader", 7, 1200, {"clean": 1100}, 100, False, 0.25, datetime.now(UTC)))
    done.note_failure("The target is away.\\nTo begin again: weft checkpoints reset loader. Or so: weft run $(x)")
table, now = HistoryTable(STREAMING, 7), datetime.now(UTC).replace(second=0, microsecond=0)
for minute in range(60, 0, -1):
    read = now - timedelta(minutes=minute + 4)
    flow = Flow(1200 - minute, 1100 - minute, 60 - minute, 9, 1, minute, 5, int(read.timestamp() * 1000))
    table.write(now - timedelta(minutes=minute), {"loader": flow})
streams = HistoryTable(STREAMS, 7)
for minute in (3, 2):
    streams.write(now - timedelta(minutes=minute), {"orders__quarantine": Values(100 - minute, 0, 5 - minute, 0)})
"""


# Of no declared stream: the service samples those.
FEW = "#/streams/orders__quarantine"
DRAWN = """() => {
  const arc = Path2D.prototype.arc;
  window.drawnPoints = 0;
  Path2D.prototype.arc = function (...more) {
    window.drawnPoints++;
    return arc.apply(this, more);
  };
  const fill = CanvasRenderingContext2D.prototype.fillText;
  window.drawnTexts = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
    window.drawnTexts.push(text);
    return fill.call(this, text, ...more);
  };
}"""


@pytest.mark.full
def test_a_chart_is_looked_at_closer(service: Any, open_page: Callable[..., Page]) -> None:
    """The last day of a streaming pipeline: a value under the pointer, and a part of it after a drag."""
    run = [sys.executable, "-c", ACTIVITY]
    warm_python.run(run, cwd=service.folder, check=True)
    page = open_page(service.url, timezone_id="Asia/Kolkata")
    page.evaluate(DRAWN)
    page.goto(f"{service.url}/#/streaming/loader")
    expect(page.locator("#view .tiles")).to_contain_text("250 ms")
    expect(page.locator("#view .tiles")).to_contain_text("1,200 in all")
    expect(page.locator("#view")).to_contain_text("Why it failed")
    expect(page.locator("#view pre.bad-text")).to_contain_text("The target is away.\nTo begin again")
    # What the command line says, with the commands to copy.
    failed = page.locator("section[aria-labelledby=error]")
    for command in ("weft consume loader", "weft checkpoints reset loader"):
        expect(failed.get_by_role("button", name=f"Copy {command}", exact=True)).to_be_visible()
    expect(failed.get_by_role("button")).to_have_count(2)  # none for what a shell would take for more than words
    chart = page.locator("#view .charts .chart").first
    drawn = chart.get_by_role("img", name=re.compile("Rows per second over the last day; now In"))
    expect(drawn.locator("canvas")).to_be_visible()
    area: Any = chart.locator(".u-over").bounding_box()
    x, y = area["x"] + area["width"] - 6, area["y"] + area["height"] / 2
    page.mouse.move(x, y)
    expect(chart.locator(".tip")).to_have_text(re.compile(r"^In .* at .* \d\d:\d\d, \d\d:\d\d:\d\d UTC$"))
    shape = chart.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    page.mouse.move(x - 60, y)
    page.mouse.down()
    page.mouse.move(x, y, steps=4)
    page.mouse.up()
    assert chart.locator("canvas").evaluate("(canvas) => canvas.toDataURL()") != shape
    # What is side by side is at one height, and axes have numbers that people count by.
    sides: Any = [page.locator("#view .charts .chart").nth(number).bounding_box() for number in (0, 1)]
    assert (sides[0]["y"], sides[0]["x"] < sides[1]["x"]) == (sides[1]["y"], True)
    drawn_texts = set(page.evaluate("window.drawnTexts"))
    assert {"2 min", "4 min"} <= drawn_texts
    assert {each for each in drawn_texts if "." in each} == set()
    # An hour of it fills the chart: it has marks between hours.
    assert [each for each in drawn_texts if re.fullmatch(r"\d\d:(?!00|30)\d\d", each)]
    # One point is seen too.
    page.evaluate("window.drawnPoints = 0")
    page.goto(f"{service.url}/{FEW}")
    expect(page.get_by_role("img", name="Rejected events over the last day; now Dead letters 3")).to_be_visible()
    wait_until(lambda: page.evaluate("window.drawnPoints") > 0, "the one rate to be drawn")


BEHIND = """
@weft.stream(fields={"n": "int64", "at": "timestamp"})
def clicks(): ...

@weft.streaming_pipeline(
    source=clicks, target="default", target_table="clicks_per_minute", watermark=weft.Watermark(lateness_ms=5000),
    window=weft.Window(
        kind="tumbling", duration_ms=60_000, group_by=("n",), event_time_column="at",
        aggregations=[weft.Aggregation(agg="count", as_="number")],
    ),
)
def clicks_per_minute(): ...
"""


@pytest.mark.full
def test_what_does_not_run_is_behind(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    """On a phone: on the first page, in the list, in the view of its stream and in the graph."""
    served = server(BEHIND)
    served.publish("clicks", [{"n": n, "at": "2026-01-01T00:00:00Z"} for n in range(1300)])
    checkpoint = served.folder / ".weft" / "checkpoints" / "clicks_per_minute"
    for name, text in (("metadata", '{"id": "7"}'), ("offsets/0", 'v1\n{}\n{"offset": 50}'), ("commits/0", "v1\n{}")):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(text)
    page = open_page(served.url, viewport={"width": 360, "height": 740})
    expect(page.locator("#tile-lag")).to_have_text("1,250")
    expect(page.locator("#tile-lag-note")).to_have_text("clicks_per_minute, not running")
    page.goto(f"{served.url}/#/streaming")
    row = page.get_by_role("row", name="clicks_per_minute").first
    expect(row.locator("td.loud")).to_have_text("1,250")
    assert broken_words(page) == []
    lines: Any = row.locator("td .chip").bounding_box()
    assert lines["height"] < 50  # two
    assert page.locator(".scroll").first.evaluate("(table) => table.scrollWidth <= table.clientWidth")
    for width in (360, 768):
        page.set_viewport_size({"width": width, "height": 740})
        assert set(page.get_by_role("row").get_by_role("link").first.evaluate(ENDS_OF_LINES)) <= set("_")
    # On a tablet the reason of a failure leaves room for the lag, and the names of all views are seen.
    (checkpoint / "activity.json").write_text(
        failed_activity("Spark could not run the batch of clicks_per_minute. " * 5)
    )
    expect(row).to_contain_text("Spark could not run")
    for width in (768, 901, 1000, 1100, 1181, 1280):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate(TOO_WIDE) == [], width
    page.set_viewport_size({"width": 768, "height": 740})
    page.goto(f"{served.url}/#/graph")
    node = page.locator("a", has_text="clicks_per_minute").first
    expect(node).to_contain_text("✕ failing · lag 1,250")
    (checkpoint / "activity.json").unlink()
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{served.url}/#/streams/clicks")
    expect(page.get_by_role("row", name="clicks_per_minute").locator("td.loud")).to_have_text("1,250")
    page.goto(f"{served.url}/#/graph")
    expect(node).to_contain_text("not running · lag 1,250")
    _skip_to(served, 61_299)
    page.goto(f"{served.url}/#/streaming")
    expect(row.locator("td.loud")).to_have_text("61,250")
    assert page.locator(".scroll").first.evaluate("(table) => table.scrollWidth <= table.clientWidth")
    page.goto(f"{served.url}/#/graph")
    # More digits than there is room for beside what it is: its lag is shown in full.
    _skip_to(served, 1_234_567_889)
    expect(page.locator("svg .node-note", has_text="not running")).to_have_text("not running · lag 1,234,567,840")


def _skip_to(served: Any, offset: int) -> None:
    """Publish one event after an offset that no event has."""
    with closing(sqlite3.connect(served.folder / ".weft/weft.db")) as database, database:
        database.execute("UPDATE sqlite_sequence SET seq = ?", (offset,))
    served.publish("clicks", [{"n": 1, "at": "2026-01-01T00:00:00Z"}])


@pytest.mark.full
def test_the_list_of_processes_fits_a_phone(service: Any, open_page: Callable[..., Page]) -> None:
    """With the longest times, and a name that is not broken."""
    page = open_page(service.url, viewport={"width": 360, "height": 740})
    process = {"lives": True, "host": "h", "pid": 7, "since": "2026-01-01T00:00:00Z", "heard": "2026-01-01T00:00:00Z"}
    processes = [process | {"kind": "streaming", "pipeline": name} for name in ("shipments", "clean_orders")]
    answer = {"at": "2026-01-01T00:59:00Z", "processes": processes, "problem": None}
    page.route("**/api/v1/processes", lambda route: route.fulfill(json=answer))
    page.goto(f"{service.url}/#/processes")
    expect(page.locator("#view tbody")).to_contain_text("59 min ago")
    assert page.evaluate(TOO_WIDE.replace(", nav", "")) == []
    assert broken_words(page) == []


@pytest.mark.full
def test_sessions_and_mirrors_on_a_phone(service: Any, open_page: Callable[..., Page]) -> None:
    """Sessions are not called windows, and the name of a mirror is not broken."""
    page = open_page(service.url, viewport={"width": 360, "height": 740})
    at = "2026-01-01T00:00:00Z"
    answer = service.client.get("/api/v1/streaming/loader").json() | {
        "step": "session",
        "state": {"windows": 230, "rows": 400},
        "watermark": {
            "watermark": at,
            "lateness_ms": 0,
            "held_by": ["orders"],
            "next_window_ends": at,
            "sources": {"orders": at},
        },
        "waiting": [{"window_start": None, "window_end": at, "rows": 3}],
        "verified": [{"target": "customers_eu", "at": at, "rows": 99, "differ": 3, "mended": 1}],
    }
    page.route("**/api/v1/streaming/loader", lambda route: route.fulfill(json=answer))
    page.goto(f"{service.url}/#/streaming/loader")
    for text in ("230 sessions open", "Next session ends", "Open sessions, the oldest 1 of 230", "3 rows differ"):
        expect(page.locator("#view")).to_contain_text(text)
    expect(page.locator("#view")).not_to_contain_text("window")
    held_by = page.locator(".facts dt:has-text('Held by') + dd")
    expect(held_by).to_have_text("orders" if answer["running"] else "the pipeline, which is not running")
    answer["running"] = None
    expect(held_by).to_have_text("the pipeline, which is not running")
    assert broken_words(page) == []


@pytest.mark.full
@pytest.mark.usefixtures("run_id")
def test_long_texts_have_a_line_of_their_own_on_a_phone(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url, viewport={"width": 360, "height": 740})
    page.goto(f"{service.url}/#/streams/orders")
    reason = page.get_by_role("row", name="field 'n'").get_by_role("rowheader")
    box: Any = reason.bounding_box()
    assert box["width"] > 300
    expect(page.get_by_role("cell", name="2 events")).to_be_visible()
    page.goto(f"{service.url}/docs")
    for each in page.locator(".operation > summary").all()[:40]:
        method, path = each.locator(".method").bounding_box(), each.locator("code").bounding_box()
        assert method is not None
        assert path is not None
        assert abs(method["y"] - path["y"]) < 6, each.inner_text()


ENDS_OF_LINES = """(element) => {
  const ends = [];
  let last;
  for (const text of element.childNodes) {
    for (let index = 0; index < (text.data ?? "").length; index++) {
      const range = document.createRange();
      range.setStart(text, index);
      range.setEnd(text, index + 1);
      const character = { text: text.data[index], top: Math.round(range.getBoundingClientRect().top) };
      if (last && last.top !== character.top) ends.push(last.text);
      last = character;
    }
  }
  return ends;
}"""


@pytest.mark.full
def test_the_graph_leads_to_its_nodes(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url)
    page.locator("#views").get_by_role("link", name="Graph").click()
    nodes = page.locator("svg .node-name")
    expect(nodes).to_have_count(6)
    assert set(nodes.all_text_contents()) == {"orders", "nightly", "revenue", "loader", "totals", "clean"}
    assert page.locator("svg .edge").count() == 4
    page.get_by_role("link", name="Columns of revenue").click()
    expect(page.get_by_role("table")).to_contain_text("no column")  # a count of rows comes from none
    expect(page.locator("svg .node.chosen .node-name")).to_have_text(["orders", "revenue"])
    assert page.locator("svg .edge.chosen").count() == 1
    page.get_by_role("link", name="Close").click()
    expect(page.locator("svg .chosen")).to_have_count(0)
    # By keyboard.
    page.get_by_role("link", name=re.compile("^loader")).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#view h1")).to_have_text("loader")


@pytest.mark.full
def test_what_is_not_there_is_said_so(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url, allowed="404")
    for address in ("pipelines/nightl", "runs/none", "streaming/none", "streams/order"):
        page.goto(f"{service.url}/#/{address}")
        expect(page.locator("#view")).to_contain_text("There is no")
    expect(page.locator("#view")).to_contain_text("orders")  # the nearest name


def test_an_action_is_done_and_undone(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    served = server(STREAMS)
    page = open_page(f"{served.url}", allowed="401")
    page.goto(f"{served.url}/#/pipelines/nightly")
    # Without a key the buttons are off, and there is the command.
    expect(page.locator("#view .off")).to_contain_text("weft pause nightly")
    expect(page.locator(".action > button", has_text="Pause")).to_be_disabled()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy = page.get_by_role("button", name="Copy weft pause nightly")
    copy.click()
    expect(copy).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "weft pause nightly"
    # Over plain HTTP from another machine there is no clipboard.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    copy.click()
    assert page.evaluate("getSelection().toString()") == "weft pause nightly"
    create = [sys.executable, "-m", "weft", "apikey", "create", "--scope", "admin", "--name", "Ann"]
    key = warm_python.run(create, cwd=served.folder, check=True, capture_output=True, text=True).stdout.strip()
    wait_until(lambda: served.client.get("/api/v1/streams").status_code == 401, "the service to know the key")
    page.get_by_label("Key of the service").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    pause, resume = (page.locator(".action > button", has_text=text) for text in ("Pause", "Resume"))
    expect(pause).to_be_enabled()
    pause.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Pause")
    expect(dialog).to_contain_text("not followed until somebody resumes it")
    page.keyboard.press("Escape")  # nothing is done
    expect(dialog).to_be_hidden()
    pause.click()
    dialog.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("#view .chip.warn")).to_contain_text("paused")
    # Who did it is beside it.
    page.goto(f"{served.url}/#/schedule")
    paused = page.get_by_role("group", name="Paused").get_by_role("row", name="nightly")
    expect(paused.get_by_role("link", name="Ann")).to_have_attribute("href", "#/audit/nightly")
    # As soon as it is known that the key may see it, also before the schedule is read again.
    asked: list[Any] = []
    page.route("**/api/v1/scheduler", lambda route: asked.append(route) or (len(asked) == 1 and route.continue_()))
    page.reload()
    expect(paused.get_by_role("link", name="Ann")).to_be_visible()
    page.unroute("**/api/v1/scheduler")
    page.go_back()
    resume.click()
    page.get_by_role("dialog", name="Resume").get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator("#view .chip.warn")).to_have_count(0)
    actions = served.client.get("/api/v1/audit", headers={"authorization": f"Bearer {key}"}).json()["actions"]
    assert [each["action"] for each in actions] == ["resume", "pause"]


def test_the_page_is_small(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url)
    expect(page.locator("#chart canvas")).to_be_visible()
    page.locator("#views").get_by_role("link", name="Graph").click()
    expect(page.locator("svg .node-name").first).to_be_visible()
    loaded = page.evaluate("performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)")
    names = {"/", *(name for name in loaded if not name.startswith("/api/"))}
    assert {"/static/weft.css", "/static/dashboard.js", "/static/dagre.js", "/static/uplot.js"} < names
    assert sum(len(service.client.get(name).content) for name in names) < 300_000


def test_files_of_others_are_as_they_were_published() -> None:
    static = files("weft.server").joinpath("static")
    lines = [line.split() for line in static.joinpath("VENDORED.txt").read_text().splitlines()[2:]]
    assert [line[0] for line in lines] == ["preact.js", "htm.js", "dagre.js", "uplot.js", "uplot.css"]
    for name, _, _, checksum in lines:
        assert sha256(static.joinpath(name).read_bytes()).hexdigest() == checksum, name
        assert static.joinpath(f"LICENSE.{name.partition('.')[0]}.txt").is_file()


MANY = """
for number in range(1000):
    weft.stream(name=f"stream_{number:04}", fields={"n": "int64"}, tags=[f"tag{number % 10}"])(lambda: None)
"""


@pytest.mark.full
def test_a_thousand_streams(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    served = server(MANY)
    served.publish("stream_0999", [{"n": 1}])
    assert served.client.get("/api/v1/streams").json()["count"] == 1000
    page = open_page(served.url)
    rows = page.locator("#streams tr")
    expect(rows).to_have_count(1000)
    expect(page.locator("#tile-rows-note")).to_have_text("in 1,000 streams")
    expect(rows.last.locator("td").nth(2)).to_have_text("1")
    page.locator("#tag").select_option("tag7")
    expect(rows).to_have_count(100)
    page.goto(f"{served.url}/#/graph")
    expect(page.locator("svg .node-name")).to_have_count(1000)
    page.goto(f"{served.url}/#/streams/stream_0999")
    expect(page.locator("#view h1")).to_have_text("stream_0999")


NAME = "</a><img src=x onerror=alert(1)> $(x) ".ljust(200, "m")
WIDE = f"""
@weft.stream(fields={{"w" * 60: "string", "n": "int64"}}, on_schema_drift="quarantine", tags=["t" * 60])
def wide(): ...

@weft.pipeline(name={NAME!r}, target="m" * 60)
def failing():
    raise ValueError("<img src=x onerror=alert(1)>" * 20)
"""


@pytest.mark.full
def test_wide_names(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    """Nothing is under something else, beyond its frame, or beyond the window."""
    served = server(WIDE)
    served.publish("wide", [{"n": 1}, {"n": "one"}, {"e" * 100: 1}])
    served.client.post("/api/v1/streams/wide/consume", json={"consumer": NAME}).raise_for_status()
    failing = f"#/pipelines/{quote(NAME, safe='')}"
    command = [sys.executable, "-m", "weft", "run", NAME, "--module", "served_streams"]
    warm_python.run(command, cwd=served.folder, check=False, capture_output=True)
    page = open_page(served.url)
    for address, text in {"": "failed", "#/streams/wide": "Publish a test event", failing: "Why it failed"}.items():
        page.goto(f"{served.url}/{address}")
        expect(page.locator("main")).to_contain_text(text)
        for width in (360, 768, 1440, 2560):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (address, width)
            assert page.evaluate(BEYOND) == [], (address, width)
        assert page.locator("main img").count() == 0
        expect(page.locator("main")).to_contain_text(NAME)
    expect(page.locator("#view .command code").first).to_have_text(f"weft run '{NAME}'")
    page.goto(f"{served.url}/#/graph")
    expect(page.locator("svg .node-name").first).to_be_visible()
    for node in page.locator("svg .node").all():
        frame: Any = node.locator("rect").first.bounding_box()
        for text in node.locator("text").all():
            box: Any = text.bounding_box()
            assert box["x"] + box["width"] <= frame["x"] + frame["width"]


BEYOND = """() => [...document.querySelectorAll(".list li > a, .inputs label > *")].filter((each) => {
  const [box, frame] = [each.getBoundingClientRect(), each.parentElement.getBoundingClientRect()];
  return box.right > frame.right + 1;
}).map((each) => each.textContent.slice(0, 40))"""
