"""The pages, in a real browser: they work offline and by keyboard, and show what comes from events as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, Request, expect

import warm_python
from browser import PATIENCE
from operations_project import failed_activity
from servers import free_port, wait_until
from weft.engine.streaming.lock import Lock

STREAMS = """
from typing import Annotated
from weft import pk
from weft.types import BigInt

@weft.stream(description="What people click")
def clicks(): ...

@weft.stream
def orders(): ...

@weft.stream
def quiet(): ...

@weft.stream(fields={"n": "int64"}, on_schema_drift="quarantine", tags=["odd"])
def strict(): ...

@weft.table
class Totals:
    id: Annotated[BigInt, pk()]

@weft.pipeline(target=Totals, mode="append", schedule="0 2 * * *")
def nightly(conn):
    return "SELECT 1 AS id"
"""


def tail_of(page: Page, stream: str) -> Any:
    """Follow a stream; what is shown of it."""
    page.locator("#tail-stream").select_option(stream)
    expect(page.locator("#tail-status")).to_contain_text(f"Following {stream}")
    return page.locator("#tail > li")


def offsets(page: Page) -> list[int]:
    return [int(text) for text in page.locator("#tail .offset").all_text_contents()]


@pytest.mark.full
def test_json_is_indented_as_it_was_written(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url)
    numbers = '{"a":[1e400,12345678901234567890.10],"a":-0,"b":"\\u00e9\\" {, ","c":{ },"d":[{"e":null}]}'
    page.evaluate("text => import('./static/api.js').then((api) => (window.shown = api.indented(text)))", numbers)
    shown = page.evaluate("window.shown")
    assert shown == msgspec.json.format(numbers.encode(), indent=2).decode()
    for text in ('{"a": NaN}', '{"a": [1, ', ""):
        page.evaluate("text => import('./static/api.js').then((api) => (window.shown = api.indented(text)))", text)
        assert page.evaluate("window.shown") == text


def test_streams_and_pipelines_are_shown(service: Any, open_page: Callable[..., Page]) -> None:
    service.publish("orders", [{"n": n} for n in range(1200)])
    service.client.post("/api/v1/streams/orders/consume", json={"consumer": "billing", "batch_size": 200})
    page = open_page(service.url)
    row = page.locator("#streams tr", has_text="orders")
    expect(row.locator("td").nth(2)).to_have_text("1,200")
    expect(row.locator("td").nth(4)).to_have_text("1,000")
    expect(page.locator("#tile-lag-note")).to_have_text("billing, on orders")
    expect(page.locator("#pipelines tr", has_text="nightly")).to_contain_text("never ran")
    expect(page.locator("#live-text")).to_have_text("Live")
    # A new value appears without a reload.
    service.publish("orders", {"n": 1})
    expect(row.locator("td").nth(2)).to_have_text("1,201")


STANDS = """
from typing import Annotated
from weft import pk
from weft.types import BigInt

@weft.stream(fields={"n": "int64"})
def clicks(): ...

@weft.table
class Target:
    id: Annotated[BigInt, pk()]

@weft.pipeline(target=Target, mode="merge")
def never(conn):
    return "SELECT 1 AS id"

@weft.pipeline(target=Target, mode="merge", schedule="0 0 1 1 *")
def yearly(conn):
    return "SELECT 1 AS id"

@weft.pipeline(target=Target, mode="merge", schedule="0 0 1 * *")
def monthly(conn):
    return "SELECT 1 AS id"

@weft.streaming_pipeline(source=clicks, target="default", target_table="loaded")
def loader(): ...
"""
SUCCEED = """
from weft.operate.runlog import open_run_log

with open_run_log() as log:
    for _ in range(60):
        log.finish(log.claim("never", resume=False), "succeeded")
"""
LEAVE = """
from weft.operate.runlog import open_run_log

with open_run_log() as log:
    log.attend("process:scheduler:1")
"""


# What the line of the header says from now on.
TOLD = """() => {
  window.told = [];
  const note = () => window.told.push(document.querySelector("#live-text").textContent);
  new MutationObserver(note).observe(document.querySelector("#live-text"), { childList: true });
}"""


def test_the_first_page_says_how_all_stands(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    """No pipeline that never ran is well; what is late is named, with the two consumers of one stream."""
    served = server(STANDS)
    served.publish("clicks", [{"n": n} for n in range(2000)])
    for consumer, number in (("slow", 10), ("slower", 1), ("quick", 1100)):
        taken = {"consumer": consumer, "batch_size": number, "lease": 600}
        served.client.post("/api/v1/streams/clicks/consume", json=taken).raise_for_status()
    page = open_page(served.url, allowed="503")
    expect(page.locator("#tile-runs")).to_have_text("none ran yet")
    expect(page.locator("#tile-runs-note")).to_have_text("3 pipelines")
    expect(page.locator("#tile-lag")).to_have_text("1,999")
    expect(page.locator("#tile-lag-note")).to_have_text("slower, on clicks")
    # A scheduler that ends without a word, as one that is killed.
    warm_python.run([sys.executable, "-c", LEAVE], cwd=served.folder, check=True)
    # One whose first batch failed has read nothing.
    checkpoint = served.folder / ".weft" / "checkpoints" / "loader"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id": "7"}')
    (checkpoint / "activity.json").write_text(failed_activity("The target is away."))
    wrong = page.get_by_role("region", name="Needs attention").get_by_role("listitem")
    expect(wrong).to_have_count(6, timeout=15_000)
    expect(wrong.nth(0)).to_contain_text(re.compile("loader failing *The target is away."))
    expect(wrong.nth(1)).to_contain_text(re.compile(r"scheduler silent *\S+, process \d+: last heard of"))
    expect(wrong.nth(2)).to_contain_text(re.compile("2 pipelines overdue *No scheduler started them: yearly, monthly"))
    expect(wrong.nth(3)).to_contain_text(re.compile("loader behind *2,000 events behind, not running"))
    expect(wrong.nth(4)).to_contain_text(re.compile("clicks behind *slower: 1,999 events behind"))
    expect(wrong.nth(5)).to_contain_text(re.compile("clicks behind *slow: 1,990 events behind"))
    expect(page.locator("#tile-lag-note")).to_have_text("loader, not running")
    changed = page.get_by_role("region", name="Changed within a day").get_by_role("listitem")
    expect(changed.last).to_contain_text(re.compile(r"service started *[\w ]+: \S+, process"))
    warm_python.run([sys.executable, "-c", SUCCEED], cwd=served.folder, check=True)
    # One that tries again fails as much, until a batch is done.
    expect(page.locator("#tile-runs")).to_have_text("1 failing")
    expect(page.locator("#tile-runs-note")).to_have_text("3 pipelines, 2 never ran")
    held = Lock("loader", checkpoint.with_name("loader~lock"), str(checkpoint))
    held.take()
    try:
        for view in ("processes", "streaming", "graph"):
            page.goto(f"{served.url}/#/{view}")
            expect(page.locator("#view .bad", has_text=re.compile(r"✕\sfailing")).first).to_be_visible()
        # One reading has its rates, since when it fails, and how often it did.
        page.goto(f"{served.url}/#/streaming")
        expect(page.get_by_role("row", name="loader").locator("td.number").first).to_have_text("0.1")
        page.goto(f"{served.url}/#/streaming/loader")
        expect(page.locator("#error + .note")).to_have_text(
            re.compile("^3 failures since 12/3[01]/2025, .*, the last .* ago$")
        )
        for name in ("Trigger", "when the last batch is done"):
            expect(page.locator("#view .facts").first).to_contain_text(name)
        page.goto(f"{served.url}/#/")
        expect(wrong.first).to_contain_text("loader failing")
        expect(page.get_by_role("region", name="Running now")).to_have_count(0)
    finally:
        held.release()
    # On a phone there is no room for 50 runs: the newest is seen.
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{served.url}/#/pipelines/never")
    newest: Any = page.locator("#view .timeline a").first.bounding_box()
    assert newest["x"] + newest["width"] < 360
    page.goto(f"{served.url}/#/pipelines/yearly")
    expect(page.locator("#view .facts").first).to_contain_text(re.compile(r"due since \d+ d ago"))
    page.goto(f"{served.url}/#/schedule")
    expect(page.locator("#queue + .note")).to_have_text("2, and no scheduler that starts them")
    # What one request is refused for is said until it is answered again, though others are.
    away = {"detail": "A source does not answer.", "hint": "Look: weft status."}
    page.route("**/api/v1/streaming", lambda route: route.fulfill(status=503, json=away))
    page.goto(f"{served.url}/#/")
    expect(page.locator("#banner")).to_have_text("A source does not answer. Look: weft status.")
    page.evaluate(TOLD)
    for _ in range(2):
        with page.expect_response("**/api/v1/overview"):
            pass
    assert page.evaluate("window.told") == []
    expect(page.locator("#live-text")).to_have_text("Refused")
    page.unroute("**/api/v1/streaming")
    expect(page.locator("#live-text")).to_have_text("Live")
    expect(page.locator("#banner")).to_be_hidden()


def test_what_comes_from_events_is_text(service: Any, open_page: Callable[..., Page]) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    service.publish("clicks", {"note": hostile, hostile: {"deep": [hostile]}})
    service.client.post("/api/v1/streams/clicks/consume", json={"consumer": hostile})
    page = open_page(service.url)
    first = tail_of(page, "clicks").first
    expect(first.locator(".fields")).to_contain_text(f"note{hostile}")
    first.locator("button").click()
    expect(first.locator("pre")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("#main img, #main script, #main iframe").count() == 0


@pytest.mark.full
def test_numbers_of_64_bits_are_whole(service: Any, open_page: Callable[..., Page]) -> None:
    service.publish("clicks", {"id": 9223372036854775807, "deep": {"n": [-9007199254740993, 0.1]}})
    page = open_page(service.url)
    first = tail_of(page, "clicks").first
    expect(first.locator(".fields")).to_contain_text("9223372036854775807")
    first.locator("button").click()
    for text in ("9223372036854775807", "-9007199254740993", "0.1"):
        expect(first.locator("pre")).to_contain_text(text)


def test_the_tail_filters_and_pauses(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url)
    page.get_by_label("Only where").fill("kind=b")
    shown = tail_of(page, "quiet")
    service.publish("quiet", [{"kind": kind, "n": n} for n, kind in enumerate("abab")])
    expect(shown).to_have_count(2)
    shown.first.locator("time").hover()
    expect(shown.first.locator("time")).to_have_attribute("title", re.compile(r"^[\d-]+ [\d:]+ UTC$"))
    page.get_by_role("button", name="Pause").click()
    service.publish("quiet", {"kind": "b", "n": 9})
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(shown).to_have_count(2)
    page.get_by_role("button", name="Resume").click()
    expect(shown).to_have_count(3)


@pytest.mark.full
def test_a_filter_looks_far_back_and_says_what_is_wrong_with_it(service: Any, open_page: Callable[..., Page]) -> None:
    service.publish("quiet", [{"kind": "rare"}, *({"kind": "common"} for _ in range(100))])
    page = open_page(service.url)
    tail_of(page, "quiet")
    where, status = page.get_by_label("Only where"), page.locator("#tail-status")
    for wrong in ("kind", "=rare"):
        where.fill(wrong)
        where.press("Enter")
        expect(status).to_have_text("Only where needs a field and its value, such as action=click.")
    where.fill("kind=rare")
    where.press("Enter")
    expect(page.locator("#tail > li")).to_have_count(1)
    where.fill("kind=none")
    where.press("Enter")
    expect(status).to_contain_text("None of the last 10,000 events has kind=none")


@pytest.mark.full
def test_tags_and_what_was_put_aside(service: Any, open_page: Callable[..., Page]) -> None:
    service.publish("strict", [{"n": 1}, {"n": "two"}, {"n": "three"}])
    page = open_page(service.url)
    expect(page.locator("#streams tr", has_text="strict")).to_contain_text("2 quarantined")
    expect(page.locator("#streams tr", has_text="orders").locator(".chip.warn")).to_be_hidden()
    page.get_by_label("Tag").select_option("odd")
    expect(page.locator("#streams tr")).to_have_count(1)
    page.get_by_label("Tag").select_option("All")
    expect(page.locator("#streams tr")).to_have_count(4)
    # Numbers have no more digits than people read.
    shown = page.evaluate(
        "import('./static/dom.js').then((dom) =>"
        " [dom.rate(123.456), dom.rate(1.26), ...[0.1234, 3600, 3540, 3661].map(dom.duration)])"
    )
    assert shown == ["123", "1.3", "123 ms", "1 h", "59 min", "1 h 1 min"]


@pytest.mark.full
def test_a_sum_has_every_stream(service: Any, open_page: Callable[..., Page]) -> None:
    """Streams are not sampled at the same moments. One of which nothing is known any more is left out."""
    page = open_page(service.url)
    shown = page.evaluate(
        """async () => {
            const { sum } = await import('./static/chart.js');
            const series = (...points) => ({ points: () => points });
            return sum([series([10, 5], [20, 6], [30, 7]), series([12, 1], [22, 2])]);
        }"""
    )
    assert shown == [[10, 5], [12, 6], [20, 7], [22, 8], [30, 9]]
    shown = page.evaluate(
        """async () => {
            const { sum } = await import('./static/chart.js');
            return sum([{ points: () => [[10, 5]] }, { points: () => [[22, 1], [24, 2]] }]);
        }"""
    )
    assert shown == [[10, 5], [22, 6], [24, 2]]
    # What is sampled and what the page asks for may be moments apart, of which a rate says nothing.
    shown = page.evaluate(
        """async () => {
            const { Series } = await import('./static/chart.js');
            const series = new Series();
            for (const [at, published] of [[0, 0], [10, 100], [10.2, 100], [12, 120]]) series.add(at, published);
            return series.points();
        }"""
    )
    assert shown == [[10, 10], [12, 10]]


@pytest.mark.full
def test_hidden_streams_are_said_to_be_hidden(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    served = server(STREAMS + '\n@weft.stream(auth={"type": "bearer", "token": "s3cret"})\ndef closed(): ...\n')
    page = open_page(served.url)
    expect(page.locator("#streams-note")).to_have_text("More streams are hidden: another key may show them.")


@pytest.mark.full
@pytest.mark.timing
def test_a_page_goes_on_after_the_service_restarts(server: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    port = str(free_port())
    served = server(STREAMS, "--port", port)
    served.publish("clicks", [{"n": 1}, {"n": 2}])
    page = open_page(served.url, allowed="ERR_")
    shown = tail_of(page, "clicks")
    expect(shown).to_have_count(2)
    # What the browser itself does, without a word of ours.
    page.evaluate(
        """() => {
            window.ids = [];
            const source = new EventSource("api/v1/streams/clicks/subscribe?since=start");
            source.addEventListener("stream.event", (event) => window.ids.push(Number(event.lastEventId)));
        }"""
    )
    # Not wait_for_function: it evaluates a string, which the policy of the page forbids.
    wait_until(lambda: page.evaluate("window.ids.length") == 2, "the browser to have both events")
    served.stop()
    expect(page.locator("#banner")).to_contain_text("does not answer")
    served = server(STREAMS, "--port", port, folder=served.folder)
    served.publish("clicks", [{"n": 3}, {"n": 4}, {"n": 5}])
    expect(shown).to_have_count(5)
    assert offsets(page) == [5, 4, 3, 2, 1]
    wait_until(lambda: page.evaluate("window.ids.length") >= 5, "the browser to have the others")
    assert page.evaluate("window.ids") == [1, 2, 3, 4, 5]
    expect(page.locator("#banner")).to_be_hidden(timeout=PATIENCE)


def test_a_key_is_asked_for_and_a_ticket_opens_the_tail(
    server: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    served = server(STREAMS)
    served.publish("clicks", {"n": 1})
    create = [sys.executable, "-m", "weft", "apikey", "create", "--scope", "read"]
    key = warm_python.run(create, cwd=served.folder, check=True, capture_output=True, text=True).stdout.strip()
    wait_until(lambda: served.client.get("/api/v1/streams").status_code == 401, "the service to know the key")
    page = open_page(served.url, allowed="401")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.clock.install()
    wrong = []

    def note(request: Request) -> None:
        if "wrong" in request.headers.get("authorization", ""):
            wrong.append(request.url)

    page.on("request", note)
    page.get_by_label("Key of the service").fill(key + "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-text")).to_contain_text("opens no stream")
    page.clock.fast_forward(60_000)
    assert len(wrong) == 1  # the service locks out who comes with wrong ones again and again
    page.get_by_label("Key of the service").fill(key)
    page.keyboard.press("Enter")
    shown = tail_of(page, "clicks")
    expect(shown).to_have_count(1)
    assert key not in page.content()
    assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
    # The key is there after a reload of the tab, and not in another one.
    page.reload()
    expect(page.locator("#streams tr")).to_have_count(4)
    another = open_page(served.url, allowed="401")
    expect(another.locator("#key-dialog")).to_be_visible()
    expect(another.locator("#streams tr")).to_have_count(0)
    # The other page asks in the same way, and forgets.
    page.get_by_role("link", name="API").click()
    expect(page.locator("details.operation").first).to_be_visible()
    page.get_by_role("button", name="Key").click()
    expect(page.locator("#key-text")).to_have_text("A key is in use in this tab.")
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#key-text")).to_contain_text("This needs a key")
    assert page.evaluate("sessionStorage.length") == 0
    expect(page.get_by_role("button", name="Forget it")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()


@pytest.mark.full
@pytest.mark.timing
def test_a_browser_that_had_no_event_yet_misses_none(
    server: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    """It remembers where it began, and how far a filter took it."""
    port = str(free_port())
    served = server(STREAMS, "--port", port, toml="[server]\nkeep_alive_seconds = 0.2\n")
    served.publish("quiet", {"n": 1})
    page = open_page(served.url, allowed="ERR_")
    page.evaluate(
        """() => {
            window.got = [];
            for (const query of ["", "?where=n=3"]) {
                const source = new EventSource("api/v1/streams/quiet/subscribe" + query);
                source.addEventListener("stream.event", (event) => window.got.push(query + event.lastEventId));
                source.onopen = () => (window.opened = (window.opened || 0) + 1);
            }
        }"""
    )
    wait_until(lambda: page.evaluate("window.opened") == 2, "it to subscribe")
    served.stop()
    code = "import weft, served_streams; weft.publish_sync('quiet', [{'n': 2}, {'n': 3}])"
    warm_python.run([sys.executable, "-c", code], cwd=served.folder, check=True)
    server(STREAMS, "--port", port, folder=served.folder)
    wait_until(lambda: page.evaluate("window.got.length") >= 3, "what was published meanwhile")
    assert sorted(page.evaluate("window.got")) == ["2", "3", "?where=n=33"]


@pytest.mark.full
def test_everything_can_be_reached_by_keyboard(service: Any, open_page: Callable[..., Page]) -> None:
    service.publish("quiet", {"kind": "a"})
    page = open_page(service.url)
    expect(page.locator("#streams tr")).to_have_count(4)
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
                const at = document.activeElement;
                const name = at.getAttribute("aria-label") || at.id || at.innerText;
                return [at === document.body ? "" : name.trim(), getComputedStyle(at).outlineStyle];
            }"""
        )
        if not name:
            break
        assert outline != "none", f"{name} does not show that it has the focus"
        reached.append(name)
        if name == "Follow quiet live":
            break
    assert reached[0] == "Skip to the content"
    assert {"Overview", "API", "key-button", "chart-stream", "Follow clicks live"} <= set(reached)
    page.keyboard.press("Enter")
    expect(page.locator("#tail-stream")).to_have_value("quiet")
    expect(page.locator("#tail")).to_be_focused()
    expect(page.locator("#tail > li").first).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#tail button[aria-expanded=true] + pre").first).to_contain_text("_weft_rowid")


@pytest.mark.full
def test_light_dark_and_narrow(service: Any, open_page: Callable[..., Page]) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        page = open_page(service.url, color_scheme=scheme, viewport={"width": 360, "height": 740})
        expect(page.locator("#streams tr")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


@pytest.mark.full
def test_a_request_is_tried_from_the_page_of_the_api(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service.url + "/")
    page.get_by_role("link", name="API").click()
    box = page.locator("details.operation", has_text="Publish to quiet")
    box.locator("summary").first.click()
    box.get_by_label("Body").fill('{"kind": "tried"}')
    expect(box.locator("pre").first).to_contain_text("curl")
    box.get_by_role("button", name="Send").click()
    expect(box.locator(".answer")).to_contain_text("202")
    expect(box.locator(".answer")).to_contain_text('"status": "accepted"')
    assert service.events("quiet")[-1]["kind"] == "tried"


def test_files_of_the_pages(service: Any) -> None:
    client = service.client
    for path in ("/", "/docs", "/static/dashboard.js", "/static/weft.css", "/static/icon.svg"):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    for path in ("/static/app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/", "/static/%00"):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-type"] == "application/problem+json"
