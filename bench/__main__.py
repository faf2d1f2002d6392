"""The command: `python -m bench [--only TEXT] [--scale 0.1] [--format json]`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile

from bench.disk import sync_milliseconds
from bench.harness import Case, Result, measure

MODULES = tuple(
    f"bench.{name}"
    for name in (
        "streams_sqlite",
        "streams_servers",
        "startup",
        "engine_start",
        "engine_loads",
        "bad_rows",
        "engine_files",
        "streaming",
        "windows",
        "joins",
        "cdc",
        "pipelines_start",
        "pipelines_loads",
        "server",
        "redis_consumers",
        "redis_frames",
        "redis_streams",
    )
)


def main() -> int:
    """Measure and print; the exit code says whether every bar was reached."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default="", help="only the cases whose name holds this text")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="how much of the work: 0.1 is quick, 1 is the real thing"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    cases: list[Case] = [case for name in MODULES for case in importlib.import_module(name).CASES]
    chosen = [case for case in cases if options.only.lower() in f"{case.name} {case.against}".lower()]
    results = [measure(case, options.scale, lambda text: print(f"… {text}", file=sys.stderr)) for case in chosen]
    if options.format == "json":
        print(json.dumps([row(result) for result in results], indent=2))
    else:
        print_table(results)
    return 0 if all(result.holds for result in results) else 1


def row(result: Result) -> dict[str, object]:
    """A result for scripts."""
    if result.skipped:
        return {"name": result.case.name, "against": result.case.against, "skipped": result.skipped}
    return {
        "name": result.case.name,
        "against": result.case.against,
        "ratio": round(result.ratio, 3),
        "ratios": [round(ratio, 3) for ratio in result.ratios],
        "bar": result.case.bar,
        "at_most": result.case.at_most,
        "holds": result.holds,
        "ours_per_second": round(max(result.ours)),
        "yardstick_per_second": round(max(result.yardstick)),
    }


def print_table(results: list[Result]) -> None:
    """Print the results as a Markdown table, in the form of docs/notes/benchmark-runs.md."""
    print(f"{os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}")
    print(f"fdatasync of 4 KiB takes the disk {sync_milliseconds(tempfile.gettempdir()):.2f} ms (median of 100)\n")
    print("| | against | bar | ratio | rounds | ours/s | theirs/s | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for result in results:
        case, bar = result.case, "≤" if result.case.at_most else "≥"
        if result.skipped:
            print(f"| {case.name} | {case.against} | {bar} {case.bar} | skipped: {result.skipped} | | | | |")
            continue
        spread = f"{min(result.ratios):.2f}–{max(result.ratios):.2f}"
        print(
            f"| {case.name} | {case.against} | {bar} {case.bar} | **{result.ratio:.2f}** | {spread} "
            f"| {max(result.ours):,.0f} | {max(result.yardstick):,.0f} | {'✓' if result.holds else '✗'} |"
        )


if __name__ == "__main__":
    sys.exit(main())
