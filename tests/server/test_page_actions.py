"""What people do on the page, in a real browser, while the service is under load: every action, by keyboard too, every
view, and what may go wrong meanwhile."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

import warm_python
from browser import broken_words, findings
from servers import wait_until

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
LONG = "n" * 200
STREAMS = f"""
import logging, pathlib, time
from typing import Annotated
from weft import pk
from weft.types import BigInt

@weft.stream(fields={{"id": "int64", "note": "string?", "paid": "bool", "big": "int64?"}}, on_schema_drift="reject")
def orders(): ...

@weft.stream(fields={{"n": "int64"}}, on_schema_drift="quarantine")
def visits(): ...

@weft.stream()
def bin(): ...

@weft.stream(fields={{"n": "int64"}}, on_schema_drift="quarantine", max_deliveries=1, dead_letter="bin")
def calls(): ...

@weft.table
class Totals:
    id: Annotated[BigInt, pk()]

@weft.pipeline(target=Totals, mode="append", engine="pushdown", schedule="0 2 * * *")
def nightly(conn):
    return "SELECT 1 AS id"

@weft.pipeline(target="lines", expectations=[weft.expectations.range("n", min=0, on_failure="quarantine")])
def lines():
    return [{{"n": n}} for n in (-2, -1, 0)]

@weft.stream(fields={{"n": "int64", "text": "string"}})
def busy(): ...

@weft.pipeline(target="slow")
def slow():
    while True:
        logging.getLogger("weft.runner").info("still at it")
        time.sleep(0.2)

@weft.pipeline(target="fragile")
def fragile():
    if not pathlib.Path("mended").exists():
        raise ValueError({HOSTILE!r})
    return [{{"n": 1}}]

@weft.model(trigger="manual", materialise="merge", key="n")
def sums(visits):
    return "SELECT n FROM visits"

@weft.streaming_pipeline(source=orders, target="default", target_table="clean", dead_letter_table="failed")
def loader(): ...

@weft.streaming_pipeline(
    name={LONG!r}, source=orders, target="default", target_table="others", dead_letter_table="failed"
)
def others(): ...
"""
CONSTANTS = {"weft.server.keys.CACHED_SECONDS": 1.0, "weft.server.keys._REFRESH_SECONDS": 0.5}
LETTERS = f"""
import served_streams
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.pipelines.streaming.declare import find
from weft.systems.dead_letter_store import DeadLetter
for name in ("loader", {LONG!r}):
    box = DeadLetterBox(find(name))
    for number in (1, 2):
        letter = DeadLetter("store", "the disk is full", "orders", '{{"id": %d}}' % number, target="clean")
        box.put([letter], BatchId(name[:9], number), "store")
    box.put([DeadLetter("read", {HOSTILE!r}, "orders", {HOSTILE!r}, "7")], BatchId(name[:9], 3), "read")
"""
# 500 events a second, and a consumer of them.
LOAD = """
import time
import served_streams, weft
while True:
    weft.publish_sync("busy", [{"n": n, "text": "some text"} for n in range(25)])
    weft.ack_sync("busy", "reader", weft.consume_sync("busy", "reader", batch_size=25))
    time.sleep(0.05)
"""
# Each takes a start of Python, on a machine that may be busy.
ENDS = 180_000


def weft(service: Any, *words: str) -> str:
    done = warm_python.run(
        [sys.executable, "-m", "weft", *words], cwd=service.folder, check=True, capture_output=True, text=True
    )
    return str(done.stdout).strip()


def new_key(service: Any, scope: str, name: str) -> str:
    return weft(service, "apikey", "create", "--scope", scope, "--name", name)


@pytest.fixture(scope="module")
def key(service: Any) -> str:
    """A key for everything, and dead letters."""
    warm_python.run([sys.executable, "-c", LETTERS], cwd=service.folder, check=True)
    token = new_key(service, "admin", "Ann")
    wait_until(lambda: service.client.get("/api/v1/pipelines").status_code == 401, "the service to know the key")
    return token


@pytest.fixture(scope="module", autouse=True)
def load(service: Any) -> Iterator[None]:
    with warm_python.Popen([sys.executable, "-c", LOAD], cwd=service.folder) as process:
        yield
        assert process.poll() is None, "the load ended"
        process.terminate()


@pytest.fixture
def show(service: Any, open_page: Callable[..., Page]) -> Callable[..., Page]:
    """`show(address, key)`: a view of the page in a tab with that key."""

    def show_(address: str, key: str | None, **options: Any) -> Page:
        page = open_page(service.url, allowed="Failed to load resource", **options)
        if key is not None:
            page.evaluate("key => sessionStorage.setItem('weft.key', key)", key)
        page.goto(f"{service.url}/{address}")
        page.reload()
        return page

    return show_


def act(page: Page, button: Locator, label: str, says: str) -> None:
    """Press a button, read its dialog, and confirm it."""
    button.click()
    dialog = page.get_by_role("dialog", name=label)
    expect(dialog).to_contain_text(says, timeout=ENDS)
    dialog.get_by_role("button", name=label, exact=True).click()
    expect(dialog).to_be_hidden()


@pytest.mark.full
def test_dead_letters_are_replayed_and_purged(service: Any, key: str, show: Callable[..., Page]) -> None:
    page = show("#/letters", key)
    page.get_by_role("link", name="loader", exact=True).click()
    errors = page.get_by_role("group", name="Dead letters by error")
    group = errors.get_by_role("row", name="the disk is full")
    expect(group).to_contain_text("2")
    # Nothing is done that was not confirmed.
    group.get_by_role("button", name="Purge").click()
    dialog = page.get_by_role("dialog", name="Purge")
    expect(dialog).to_contain_text("2 letters are removed from table failed")
    expect(dialog).to_contain_text("cannot be undone")
    expect(dialog).to_contain_text("weft dlq purge loader --group ")
    dialog.get_by_role("button", name="Leave it", exact=True).click()
    act(
        page,
        group.get_by_role("button", name="Replay"),
        "Replay",
        "2 letters run through loader as it is now, into clean",
    )
    notice = page.locator(".notice")
    expect(notice).to_contain_text("replayed 2 letters; 0 failed again.", timeout=ENDS)
    expect(page.locator("tbody", has_text="the disk is full")).to_have_count(0)
    with closing(sqlite3.connect(service.folder / ".weft" / "weft.db")) as database:
        assert sorted(database.execute("SELECT id FROM clean")) == [(1,), (2,)]
    notice.get_by_role("button").click()
    # The hostile one is a text wherever it is.
    page.locator("details summary").first.click()
    expect(page.locator("details pre").first).to_have_text(HOSTILE)
    page.get_by_role("group", name="The newest dead letters").get_by_role("link").first.click()
    expect(page.locator("#view .bad-text")).to_have_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    act(page, page.get_by_role("button", name="Purge", exact=True), "Purge", "1 letter is removed")
    expect(page.locator(".notice")).to_contain_text("removed 1 letter", timeout=ENDS)
    page.goto(f"{service.url}/#/letters/loader")
    expect(page.locator("#view")).to_contain_text("There are no dead letters.")


@pytest.mark.full
def test_rejected_events_of_a_stream_are_replayed_and_purged(service: Any, key: str, show: Callable[..., Page]) -> None:
    headers = {"authorization": f"Bearer {key}"}
    service.publish("calls", [{"n": 1}, {"n": "two"}, {"n": 3, "new": True}], **headers)
    for count in (1, 0):  # then it was delivered once too often
        asked = {"consumer": "worker", "member": "a"}
        events = service.client.post("/api/v1/streams/calls/consume", json=asked, headers=headers).json()["events"]
        assert len(events) == count
    page = show("#/streams/calls", key)
    panel = page.locator("section[aria-labelledby=rejected]")
    # One reason alone.
    row = panel.get_by_role("row", name="the stream has no such field")
    act(page, row.get_by_role("button", name="Purge"), "Purge", "1 event of calls is removed from calls__quarantine")
    notice = page.locator(".notice")
    expect(notice).to_contain_text("removed 1 event from calls__quarantine", timeout=ENDS)
    notice.get_by_role("button").click()
    expect(row).to_have_count(0, timeout=ENDS)
    row = panel.get_by_role("row", name="it must be int64")
    said = "what still does not fit is put back"
    act(page, row.get_by_role("button", name="Replay"), "Replay", said)
    expect(notice).to_contain_text("replayed 0 events of calls__quarantine; 1 still does not fit", timeout=ENDS)
    notice.get_by_role("button").click()
    act(
        page,
        panel.get_by_role("button", name="Replay all bin"),
        "Replay all",
        "1 event of bin is published to calls again",
    )
    expect(notice).to_contain_text("replayed 1 event of bin; 0 still do not fit", timeout=ENDS)
    assert [event["n"] for event in service.events("calls", **headers)] == [1, 1]
    expect(panel.get_by_role("button", name="Replay all bin")).to_have_count(0)
    notice.get_by_role("button").click()
    page.goto(f"{service.url}/#/letters")
    row = page.get_by_role("row", name="calls__quarantine")
    act(page, row.get_by_role("button", name="Replay"), "Replay", "what still does not fit is put back")
    expect(notice).to_contain_text("replayed 0 events of calls__quarantine; 1 still does not fit", timeout=ENDS)
    notice.get_by_role("button").click()
    # The same in the view of the place, to which no people publish.
    row.get_by_role("link", name="calls__quarantine").click()
    place = page.locator("section[aria-labelledby=holds]")
    expect(place).to_contain_text("of calls, whose views have the reasons")
    expect(page.locator("main")).to_contain_text("Live tail")
    expect(page.locator("main")).not_to_contain_text("Publish a test event")
    act(page, place.get_by_role("button", name="Purge"), "Purge", "1 event of calls is removed from calls__quarantine")
    expect(notice).to_contain_text("removed 1 event from calls__quarantine", timeout=ENDS)
    expect(place).to_have_count(0)
    page.goto(f"{service.url}/#/streams/bin")
    expect(page.locator("main")).to_contain_text("Live tail")
    expect(page.locator("main")).not_to_contain_text("Publish a test event")
    actions = service.client.get("/api/v1/audit", headers=headers).json()["actions"]
    assert [each["action"] for each in actions[:5]] == [
        "streams purge",
        "streams replay",
        "streams replay",
        "streams replay",
        "streams purge",
    ]


@pytest.mark.full
def test_rows_of_a_pipeline_are_replayed_and_purged(service: Any, key: str, show: Callable[..., Page]) -> None:
    page = show("#/pipelines/lines", key)
    act(page, page.get_by_role("button", name="Run now", exact=True), "Run now", "It writes to lines")
    row = page.get_by_role("row", name="expectation range(n, min=0)")
    expect(row).to_contain_text("2", timeout=ENDS)
    notice = page.locator(".notice", has_text="Replay lines")
    act(page, row.get_by_role("button", name="Replay"), "Replay", "2 rows are loaded into lines once more")
    expect(notice).to_contain_text("loaded 0 rows; 2 failed again", timeout=ENDS)
    page.goto(f"{service.url}/#/letters")
    row = page.get_by_role("row", name="lines__quarantine")
    act(page, row.get_by_role("button", name="Purge"), "Purge", "2 rows are removed from lines__quarantine")
    expect(page.locator(".notice", has_text="Purge lines")).to_contain_text("removed 2 rows", timeout=ENDS)
    expect(row).to_have_count(0, timeout=ENDS)
    actions = service.client.get("/api/v1/audit", headers={"authorization": f"Bearer {key}"}).json()["actions"]
    assert [each["action"] for each in actions[:2]] == ["quarantine purge", "quarantine replay"]


@pytest.mark.full
def test_a_test_event_is_published(service: Any, key: str, show: Callable[..., Page]) -> None:
    page = show("#/streams/orders", key)
    form = page.locator("form.form")
    form.get_by_label("id int64").fill("many")
    form.get_by_role("button", name="Publish", exact=True).click()
    expect(form.get_by_role("alert")).to_contain_text("field 'id'")
    form.get_by_label("id int64").fill(str(2**53 + 1))
    form.get_by_label("note string").fill(HOSTILE)
    form.get_by_label("paid bool").select_option("true")
    form.get_by_label("Other fields").fill("[1]")
    form.get_by_role("button", name="Publish", exact=True).click()
    expect(form.get_by_role("alert")).to_contain_text("must be a JSON object")
    form.get_by_label("Other fields").fill('{"big": 1, "big": 2}')
    form.get_by_role("button", name="Publish", exact=True).click()
    expect(form.get_by_role("alert")).to_contain_text("twice in one object")
    form.get_by_label("Other fields").fill('{"big": 9223372036854775807}')
    expect(form.locator(".command code")).to_contain_text(
        'weft streams publish orders --data \'{"id": 9007199254740993'
    )
    form.get_by_role("button", name="Publish", exact=True).click()
    expect(form.get_by_role("status")).to_contain_text("Published, with the offset")
    (event,) = service.events("orders", authorization=f"Bearer {key}")
    assert (event["id"], event["note"], event["paid"], event["big"]) == (2**53 + 1, HOSTILE, True, 2**63 - 1)
    expect(page.locator("#view .tail")).to_contain_text(HOSTILE)
    reader = show("#/streams/orders", new_key(service, "read", "reader"))
    expect(reader.locator("form.form")).to_contain_text("this needs write")
    expect(reader.locator("form.form").get_by_role("button", name="Publish", exact=True)).to_be_disabled()


@pytest.mark.full
def test_a_model_is_run_and_built_again(service: Any, key: str, show: Callable[..., Page]) -> None:
    page = show("#/pipelines/sums", key)
    expect(page.locator("section[aria-labelledby=plan]")).to_contain_text("created")
    act(page, page.get_by_role("button", name="Run now", exact=True), "Run now", "It writes to sums")
    expect(page.locator("#view .title .chip")).to_contain_text("succeeded", timeout=ENDS)
    expect(page.locator("section[aria-labelledby=plan]")).to_contain_text("Nothing", timeout=ENDS)
    page.get_by_role("button", name="Backfill", exact=True).click()
    dialog = page.get_by_role("dialog", name="Backfill")
    dialog.get_by_label("Published since").fill("2020-01-01T00:00:00")
    dialog.get_by_label("Published since").blur()
    expect(dialog).to_contain_text("of visits")
    expect(dialog).to_contain_text("merged into sums by its key")
    dialog.get_by_label("Until (by default now)").fill("2019-01-01T00:00:00")
    dialog.get_by_label("Until (by default now)").blur()
    expect(dialog.get_by_role("alert")).to_contain_text("until must be after since")
    expect(dialog.get_by_role("button", name="Backfill", exact=True)).to_be_disabled()
    dialog.get_by_label("Until (by default now)").fill("")
    dialog.get_by_label("Until (by default now)").blur()
    dialog.get_by_role("button", name="Backfill", exact=True).click()
    expect(page.locator(".notice", has_text="Backfill")).to_contain_text("read", timeout=ENDS)


@pytest.mark.full
def test_a_run_is_cancelled_and_another_one_retried(service: Any, key: str, show: Callable[..., Page]) -> None:
    page = show("#/pipelines/slow", key)
    act(page, page.get_by_role("button", name="Run now", exact=True), "Run now", "It writes to slow")
    page.goto(f"{service.url}/#/")
    page.get_by_role("region", name="Running now").get_by_role("link", name="slow").click(timeout=ENDS)
    log = page.get_by_role("group", name="Log", exact=True)
    expect(log).to_contain_text("still at it", timeout=ENDS)
    lines = log.inner_text()
    expect(log).not_to_have_text(lines)  # it goes on
    act(page, page.get_by_role("button", name="Cancel", exact=True), "Cancel", "It ends within 20 seconds")
    expect(page.locator("#view .title .chip")).to_contain_text("cancelled", timeout=ENDS)
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_have_count(0)
    page.goto(f"{service.url}/#/pipelines/fragile")
    act(page, page.get_by_role("button", name="Run now", exact=True), "Run now", "It writes to fragile")
    # What failed says so above every view, with the command to copy, and leads to its log.
    notice = page.locator(".notice.bad", has_text="Run now fragile")
    expect(notice).to_contain_text(HOSTILE, timeout=ENDS)
    expect(notice.get_by_role("button", name="Copy weft run fragile")).to_be_visible()
    page.get_by_role("link", name="The run and its log").click()
    expect(log).to_contain_text(HOSTILE)
    (service.folder / "mended").touch()
    act(page, page.get_by_role("button", name="Retry", exact=True), "Retry", "A process of the service's machine runs")
    expect(page.locator(".notice.good", has_text="Retry fragile")).to_be_visible(timeout=ENDS)
    expect(page.locator("#view .title .chip")).to_contain_text("succeeded", timeout=ENDS)
    assert page.locator("main img, main script").count() == 0


def focus(page: Page, wanted: Locator) -> None:
    """Come to an element by the Tab key alone."""
    expect(wanted).to_be_visible()
    for _ in range(120):
        if wanted.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {wanted}")


@pytest.mark.full
def test_by_keyboard_alone(service: Any, key: str, show: Callable[..., Page]) -> None:
    page = show("#/", key)

    def press(wanted: Locator) -> None:
        focus(page, wanted)
        page.keyboard.press("Enter")

    press(page.locator("#views").get_by_role("link", name="Pipelines"))
    press(page.locator("#view").get_by_role("link", name="nightly", exact=True))
    for label, is_paused in (("Pause", True), ("Resume", False)):
        press(page.get_by_role("button", name=label, exact=True))
        dialog = page.get_by_role("dialog", name=label)
        press(dialog.get_by_role("button", name=label, exact=True))
        expect(dialog).to_be_hidden()
        expect(page.locator("#view .title .chip.warn")).to_have_count(int(is_paused))
    press(page.locator("#views").get_by_role("link", name="Dead letters"))
    press(page.get_by_role("link", name=LONG))
    press(page.get_by_role("button", name="Purge all", exact=True))
    expect(page.get_by_role("dialog", name="Purge all")).to_contain_text("3 letters")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    press(page.locator("#views").get_by_role("link", name="Audit"))
    expect(page.locator("#view h1")).to_have_text("Audit log")
    expect(page.locator("#view tbody")).to_contain_text("pause")
    focus(page, page.get_by_label("Action", exact=True))
    page.keyboard.type("resume")
    page.keyboard.press("Tab")
    expect(page.locator("#view tbody tr")).to_have_count(1)
    expect(page.locator("#view tbody")).to_contain_text("Ann")
    # The schedule, with what was paused at a terminal.
    weft(service, "pause", "nightly", "--module", "served_streams")
    press(page.locator("#views").get_by_role("link", name="Schedule"))
    paused = page.get_by_role("group", name="Paused").get_by_role("row", name="nightly")
    expect(paused.get_by_role("cell").first).to_have_text("–")
    press(paused.get_by_role("button", name="Resume nightly"))
    press(page.get_by_role("dialog", name="Resume").get_by_role("button", name="Resume", exact=True))
    expect(paused).to_have_count(0)
    press(page.locator("#views").get_by_role("link", name="Processes"))
    expect(page.locator("#view tbody")).to_contain_text("service")
    press(page.locator("#views").get_by_role("link", name="Streaming"))
    press(page.locator("#view").get_by_role("link", name="loader", exact=True).first)
    expect(page.locator("#view")).to_contain_text("Lag by source")
    press(page.locator("#views").get_by_role("link", name="Graph"))
    press(page.get_by_role("link", name="Columns of sums"))
    expect(page.locator("#view")).to_contain_text("Columns of sums")
    # A stream: an event is typed and sent, and the tail is filtered and paused.
    press(page.locator("#views").get_by_role("link", name="Overview"))
    press(page.locator("#streams").get_by_role("link", name="visits", exact=True))
    focus(page, page.get_by_label("n int64"))
    page.keyboard.type("1234")
    page.keyboard.press("Enter")
    expect(page.locator("form.form").get_by_role("status")).to_contain_text("Published, with the offset")
    focus(page, page.locator("#view").get_by_label("Only where"))
    page.keyboard.type("n=1234")
    page.keyboard.press("Enter")
    expect(page.locator("#view .tail li")).to_contain_text(["n1234"])
    press(page.get_by_role("button", name="Pause", exact=True))
    expect(page.get_by_role("button", name="Resume", exact=True)).to_be_focused()
    press(page.get_by_role("button", name="Key", exact=True))
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()


@pytest.mark.full
def test_every_object_opens_by_its_address_alone(
    service: Any, key: str, show: Callable[..., Page], count: Callable[..., int]
) -> None:
    header = {"authorization": f"Bearer {key}"}
    letters = service.client.get(f"/api/v1/dead-letters/{LONG}", headers=header).json()["letters"]
    read = next(each["letter_id"] for each in letters if each["stage"] == "read")
    weft(service, "run", "nightly", "--module", "served_streams")
    run = service.client.get("/api/v1/runs?pipeline=nightly", headers=header).json()["runs"][0]["run_id"]
    views = {
        "": "busy",
        "#/streams/busy": "reader",
        "#/pipelines": "sums",
        "#/pipelines/nightly": "Code",
        f"#/runs/{run}": "Attempt",
        "#/schedule": "Due next",
        "#/processes": "service",
        "#/graph": "A click opens a node",
        "#/graph/sums": "Columns of sums",
        "docs": "/api/v1/streams",
        "#/letters": LONG,
        f"#/letters/{LONG}": "By error",
        f"#/letters/{LONG}/{read}": HOSTILE,
        f"#/streaming/{LONG}": "Lag by source",
        "#/audit": "Audit log",
        "#/audit/nightly": "Audit log",
        "#/pipelines/sums": "Plan",
        "#/streams/orders": "Publish a test event",
        "#/streaming": LONG,
    }
    found = []
    for scheme, width in (("light", 1280), ("dark", 360))[-count(2, 1) :]:
        page = show("#/", key, color_scheme=scheme, viewport={"width": width, "height": 740})
        for address, text in views.items():
            page.goto(f"{service.url}/{address}")
            page.reload()
            expect(page.locator("main")).to_contain_text(text)
            for each in (360, 620, 1000, 2560, width):
                page.set_viewport_size({"width": each, "height": 740})
                assert page.evaluate("document.documentElement.scrollWidth") <= each, (address, each)
                assert broken_words(page) == [], (address, each)
            assert page.locator("main img, main script").count() == 0, address
            found += [(address, scheme, each) for each in findings(page)]
        page.goto(f"{service.url}/#/letters/{LONG}")
        page.get_by_role("button", name="Purge all").click()
        expect(page.get_by_role("dialog", name="Purge all")).to_contain_text("cannot be undone")
        found += [("dialog", scheme, each) for each in findings(page)]
    assert found == []


@pytest.mark.full
def test_a_key_that_is_revoked_or_not_enough(service: Any, key: str, show: Callable[..., Page]) -> None:
    reader = show("#/pipelines/nightly", new_key(service, "read", "reader"))
    pause = reader.get_by_role("button", name="Pause", exact=True)
    expect(pause).to_be_disabled()
    expect(reader.locator(".off")).to_contain_text("has the scope read; this needs admin")
    expect(reader.locator(".off")).to_contain_text("weft pause nightly")

    page = show("#/pipelines/nightly", new_key(service, "admin", "Bob"))
    pause = page.get_by_role("button", name="Pause", exact=True)
    expect(pause).to_be_enabled()
    pause.click()
    keys = json.loads(weft(service, "apikey", "list", "--format", "json"))
    weft(service, "apikey", "revoke", next(each["id"] for each in keys if each["name"] == "Bob"))
    expect(page.locator("#key-text")).to_contain_text("revoked", timeout=ENDS)
    page.get_by_label("Key of the service").fill(key)
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Pause").get_by_role("button", name="Leave it", exact=True).click()
    expect(page.locator("#live-text")).to_have_text("Live")
    expect(pause).to_be_enabled()


@pytest.mark.full
def test_the_service_is_restarted_underneath(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    served = server(STREAMS)
    token, port = new_key(served, "admin", "Ann"), str(served.port)
    wait_until(lambda: served.client.get("/api/v1/pipelines").status_code == 401, "the service to know the key")
    page = open_page(served.url, allowed="Failed to load resource")
    page.evaluate("key => sessionStorage.setItem('weft.key', key)", token)
    page.goto(f"{served.url}/#/pipelines/nightly")
    page.reload()
    pause = page.get_by_role("button", name="Pause", exact=True)
    expect(pause).to_be_enabled()
    served.stop()
    expect(page.locator("#banner")).to_contain_text("does not answer")
    pause.click()
    dialog = page.get_by_role("dialog", name="Pause")
    dialog.get_by_role("button", name="Pause", exact=True).click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    server(STREAMS, "--port", port, folder=served.folder)
    expect(page.locator("#live-text")).to_have_text("Live", timeout=ENDS)
    expect(page.locator("#banner")).to_be_hidden()
    dialog.get_by_role("button", name="Leave it", exact=True).click()
    act(page, pause, "Pause", "not followed until somebody resumes it")
    expect(page.locator("#view .title .chip.warn")).to_contain_text("paused")
