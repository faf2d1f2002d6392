"""The page of the service with 200 streams and 200 pipelines: `python -m bench.page [--seconds 20] [--page]`.

How soon the overview is answered, what watchers cost the service with all that their pages ask for, and in Chromium
how soon the page is painted, how large it is, and how long its own work takes with a live tail of 500 events a second,
which a process of its own publishes; how many really came is printed. Times of the page's work are processor time of
its thread, so that other work on the machine does not count: of a task, and of all tasks within a frame of 16.7 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

STREAMS, PIPELINES, RUNS = 200, 200, 10
WATCHERS = 50
# What the first page asks for, each after so many seconds.
ASKED = {"overview": 2.0, "streaming": 6.0, "processes": 10.0, "dead-letters": 20.0, "changes": 30.0}
TAIL_RATE, FRAME_MS = 500, 1000 / 60
PROJECT = f"""
import weft
from typing import Annotated
from weft import pk
from weft.types import BigInt

for number in range({STREAMS}):
    weft.stream(name=f"stream_{{number:03}}", fields={{"n": "int64", "text": "string"}})(lambda: None)

@weft.table
class Target:
    id: Annotated[BigInt, pk()]

def load(conn):
    return "SELECT 1 AS id"

for number in range({PIPELINES}):
    weft.pipeline(target=Target, mode="merge", name=f"pipeline_{{number:03}}", schedule="0 2 * * *")(load)
"""
RUN = f"""
from weft.operate.runlog import open_run_log
from weft.project import current

current().load_modules(["project"])
with open_run_log() as log:
    for number in range({RUNS}):
        for name in current().pipelines:
            log.finish(log.claim(name, resume=False), "succeeded", counts={{"rows_read": number}})
"""
BARS = {
    "overview, median": (50.0, "ms"),
    "processor time for one watcher": (5.0, "% of a core"),
    f"{WATCHERS} watchers, of that of one": (2.0, "times"),
    "first paint": (300.0, "ms"),
    "size of the page": (300.0, "KB"),
    f"longest task with a tail of {TAIL_RATE} events/s": (16.0, "ms"),
    f"work in a frame with a tail of {TAIL_RATE} events/s, 99th percentile": (16.0, "ms"),
}


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Yield the address and the process id of a service."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        Path(folder, "project.py").write_text(textwrap.dedent(PROJECT))
        Path(folder, "weft.toml").write_text('modules = ["project"]\n')
        subprocess.run([sys.executable, "-c", RUN], cwd=folder, check=True)
        command = [sys.executable, "-m", "weft", "serve", "--port", "0"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                url = next(json.loads(line)["url"] for line in process.stderr if '"url"' in line)
                threading.Thread(target=process.stderr.read, daemon=True).start()
                for number in range(STREAMS):
                    events = [{"n": each, "text": "some text"} for each in range(50)]
                    httpx.post(f"{url}/api/v1/streams/stream_{number:03}", json=events).raise_for_status()
                yield url, process.pid
            finally:
                process.terminate()


def spent(pid: int) -> float:
    """Return the processor time of a process and its children, in seconds."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + sum(spent(int(child)) for child in children)


async def watch(url: str, watchers: int, seconds: float) -> list[float]:
    """Ask as so many first pages do, and return how long the overview took."""
    took: list[float] = []
    ends = time.monotonic() + seconds

    async def one(client: httpx.AsyncClient, number: int, path: str, every: float) -> None:
        await asyncio.sleep(every * number / watchers)
        while time.monotonic() < ends:
            began = time.perf_counter()
            (await client.get(f"{url}/api/v1/{path}")).raise_for_status()
            if path == "overview":
                took.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(max(0.0, min(every, ends - time.monotonic())))

    async with httpx.AsyncClient(timeout=60) as client:
        asks = [one(client, number, *each) for number in range(watchers) for each in ASKED.items()]
        await asyncio.gather(*asks)
    return took


def measured(url: str, pid: int, watchers: int, seconds: float) -> tuple[float, list[float]]:
    """Return the percent of a core that the service took, and the times of its answers."""
    before, began = spent(pid), time.monotonic()
    took = asyncio.run(watch(url, watchers, seconds)) if watchers else []
    if not watchers:
        time.sleep(seconds)
    return (spent(pid) - before) / (time.monotonic() - began) * 100, took


def in_browser(url: str, seconds: float) -> dict[str, float]:
    """Open the page and follow a stream."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        print("Chromium is not installed: its part is left out")
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = context.new_page()
        paints = []
        for _ in range(5):
            page.goto("about:blank")
            page.goto(url)
            page.locator("#streams tr").first.wait_for()
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        page.locator("#chart canvas").wait_for()
        page.goto(f"{url}/#/graph")
        page.locator("svg .node-name").first.wait_for()
        page.evaluate("document.fonts.ready")
        names = "performance.getEntriesByType('resource').map((each) => each.name)"
        files = {each for each in page.evaluate(names) if "/api/" not in each} | {f"{url}/"}
        size = sum(len(httpx.get(each).content) for each in files)
        page.goto(f"{url}/#/streams/stream_000")
        page.locator(".tail li").first.wait_for()
        with subprocess.Popen([sys.executable, "-c", PUBLISH, url]) as publishing:
            try:
                page.wait_for_timeout(5000)
                browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
                began, before = time.monotonic(), _head(url)
                page.wait_for_timeout(seconds * 1000)
                came = (_head(url) - before) / (time.monotonic() - began)
                trace = json.loads(browser.stop_tracing())
                shown = page.evaluate("Number(document.querySelector('.tail .offset').textContent.replace(/\\D/g, ''))")
                late = _head(url) - shown
            finally:
                publishing.terminate()
        browser.close()
    timed = _tasks(trace["traceEvents"])
    tasks, frames = sorted(each for _, each in timed), _frames(timed)
    share = sum(tasks) / seconds / 10
    print(f"{came:.0f} events/s came; the newest on the page is {late:,} events old")
    print(f"the page's thread: {share:.0f} % of a core; of {len(tasks):,} tasks the longest took", end=" ")
    print(", ".join(f"{each:.1f}" for each in tasks[-5:]), "ms")
    print(f"of {seconds * 1000 / FRAME_MS:,.0f} frames {len(frames):,} had work; the most", end=" ")
    print(", ".join(f"{each:.1f}" for each in frames[-5:]), "ms")
    return {
        "first paint": statistics.median(paints),
        "size of the page": size / 1024,
        f"longest task with a tail of {TAIL_RATE} events/s": max(tasks),
        f"work in a frame with a tail of {TAIL_RATE} events/s, 99th percentile": frames[int(len(frames) * 0.99)],
    }


PUBLISH = f"""
import sys, time, httpx

part = {TAIL_RATE} // 20
with httpx.Client() as client:
    due = time.monotonic()
    while True:
        events = [{{"n": n, "text": "some text"}} for n in range(part)]
        client.post(f"{{sys.argv[1]}}/api/v1/streams/stream_000", json=events).raise_for_status()
        due += part / {TAIL_RATE}
        time.sleep(max(0.0, due - time.monotonic()))
"""


def _head(url: str) -> int:
    return int(httpx.get(f"{url}/api/v1/streams/stream_000").raise_for_status().json()["head"])


def _frames(tasks: list[tuple[float, float]]) -> list[float]:
    """Return how much work began in each frame that had some, in milliseconds, sorted."""
    work: dict[int, float] = {}
    for at, took in tasks:
        frame = int(at / FRAME_MS)
        work[frame] = work.get(frame, 0.0) + took
    return sorted(work.values())


def _tasks(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return when each task of the page's thread began and how long it took, in milliseconds; processor time where
    Chromium says it."""
    threads = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    return [
        (each["ts"] / 1000, each.get("tdur", each["dur"]) / 1000)
        for each in events
        if each["name"] == "ThreadControllerImpl::RunTask" and (each["pid"], each["tid"]) in threads and "dur" in each
    ]


def main() -> int:
    """Measure and print; the exit code says whether every bar was reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each part is watched")
    parser.add_argument("--page", action="store_true", help="only the part in Chromium")
    options = parser.parse_args()
    with served() as (url, pid):
        asyncio.run(watch(url, 1, 6))  # everything is opened
        if options.page:
            found = in_browser(url, options.seconds)
            return _judged(found)
        idle, _ = measured(url, pid, 0, options.seconds)
        one, took = measured(url, pid, 1, options.seconds)
        many, took_many = measured(url, pid, WATCHERS, options.seconds)
        found = {
            "overview, median": statistics.median(took),
            "processor time for one watcher": one - idle,
            f"{WATCHERS} watchers, of that of one": (many - idle) / max(one - idle, 0.1),
            **in_browser(url, options.seconds),
        }
    print(f"nobody watches: {idle:.1f} % of a core; one: {one:.1f} %; {WATCHERS}: {many:.1f} %")
    print(
        f"overview: longest {max(took):.0f} ms; with {WATCHERS} watchers median {statistics.median(took_many):.0f} ms"
    )
    return _judged(found)


def _judged(found: dict[str, float]) -> int:
    for name, value in found.items():
        bar, unit = BARS[name]
        print(f"{'ok  ' if value <= bar else 'OVER'} {name}: {value:.1f} {unit} (≤ {bar:g})")
    return 0 if all(value <= BARS[name][0] for name, value in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
