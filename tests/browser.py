"""A real browser for tests of the pages: `browser` and `open_page` are fixtures of tests/server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 30_000
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (sudo apt-get install --no-install-recommends chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


AXE = Path(__file__).parent.parent / ".cache" / "servers" / "node_modules" / "axe-core" / "axe.min.js"
_FINDINGS = """async () => (await axe.run()).violations.map(
    ({ id, help, nodes }) => `${id}: ${help}: ${nodes.slice(0, 3).map((node) => node.html.slice(0, 200)).join(" | ")}`
)"""


def findings(page: Page) -> list[str]:
    """Return what axe finds wrong with a page as it is now."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (tools/setup-servers installs it by npm)")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    return list(page.evaluate(_FINDINGS))


_BROKEN = r"""() => {
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    if (node.parentElement.closest("pre, code, [hidden]")) continue;
    for (const { 0: word, index } of node.data.matchAll(/(?<!\S)[\w:,.]{1,12}(?!\S)/g)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      if (new Set([...range.getClientRects()].map((each) => Math.round(each.top))).size > 1) found.push(word);
    }
  }
  return found;
}"""


def broken_words(page: Page) -> list[str]:
    """Return the short words that do not stand on one line."""
    return list(page.evaluate(_BROKEN))


_UNEVEN = r"""() => {
  const found = [];
  for (const row of document.querySelectorAll("main tr")) {
    const cells = [...row.cells].filter((each) => each.offsetWidth > 0);
    if (!cells.length) continue;
    const [start, end] = [getComputedStyle(cells[0]).paddingLeft, getComputedStyle(cells.at(-1)).paddingRight];
    if (start !== end) found.push(`${start} ${end} ${row.innerText.slice(0, 60)}`);
  }
  return found;
}"""


def uneven_rows(page: Page) -> list[str]:
    """Return the rows of tables whose first and last cells do not stand equally far from the edges."""
    return list(page.evaluate(_UNEVEN))


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`open_page(url, …)`: a page that must not complain, nor ask anybody else. `allowed`: a complaint that it may
    have, because the test takes its service away."""
    contexts, complaints, asked = [], [], []

    def open_(url: str, *, allowed: str | None = None, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)

        def complain(text: str) -> None:
            if allowed is None or allowed not in text:
                complaints.append(text)

        def request(request: Request) -> None:
            if not request.url.startswith(url):
                asked.append(request.url)

        page.on("console", lambda message: complain(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.on("request", request)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
    assert asked == []
