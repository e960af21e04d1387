"""Time until an opened console shows its content.

    python -m benchmarks.console [--runs 15] [--tasks 1000] [--check]

A headless Chromium opens the console of a daemon with the given number of tasks. Each run is a
first visit with an empty cache. It records the first contentful paint, the time when the counts of
the overview are shown, and the requests and bytes until then. Times begin with the navigation. A
visit before the runs starts the browser and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import choose_folder
from benchmarks.servers import Tickwheel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playwright.sync_api import Browser

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FIRST_SIGHT_MS = 200.0
"""Maximum median of the first contentful paint."""
HOUR_MS = 3_600_000
WAIT_MS = 30_000
SIZE = {"width": 1280, "height": 860}
# Records the time of the first number.
WATCH = """
new MutationObserver((changes, watch) => {
  const tile = document.querySelector(".tile b");
  if (!tile || !/[0-9]/.test(tile.textContent)) return;
  window.counted_ms = performance.now();
  watch.disconnect();
}).observe(document, { childList: true, subtree: true, characterData: true });
"""
FIGURES = """() => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  if (!paint || !window.counted_ms) return null;
  const files = performance.getEntriesByType("resource");
  const page = performance.getEntriesByType("navigation")[0];
  return {
    paint_ms: paint.startTime, counted_ms: window.counted_ms, requests: files.length + 1,
    bytes: files.reduce((total, file) => total + file.transferSize, page.transferSize),
  };
}"""


def fill(http: str, count: int) -> None:
    """Enqueue tasks that are due in the next hours."""
    tasks = [
        {"topic": f"topic-{n % 10}", "body": f"body {n}", "delay_ms": HOUR_MS + n * 20_000}
        for n in range(count)
    ]
    data = json.dumps({"tasks": tasks}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{http}/v1/tasks", data, headers)  # noqa: S310  # our own
    urllib.request.urlopen(request, timeout=60).close()  # noqa: S310  # our own


def visit(browser: Browser, http: str) -> dict[str, float]:
    """Make a first visit, in a new context without cookies and cache."""
    context = browser.new_context(viewport=SIZE)  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.add_init_script(WATCH)
        page.goto(f"{http}/console/", wait_until="commit")
        figures: Any = page.wait_for_function(FIGURES, timeout=WAIT_MS).json_value()
        return {name: float(value) for name, value in figures.items()}
    finally:
        context.close()


def measure(options: argparse.Namespace, folder: Path, program: str) -> list[dict[str, float]]:
    """Return the figures of each visit."""
    from playwright.sync_api import sync_playwright

    os.environ["TICKWHEEL_HTTP"] = "127.0.0.1:0"
    with Tickwheel(folder) as daemon, sync_playwright() as playwright:
        http = json.loads((daemon.folder / "ready.json").read_text())["http"]
        fill(http, options.tasks)
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])],
        )
        visit(browser, http)
        visits = [visit(browser, http) for _ in range(options.runs)]
        browser.close()
    return visits


def show(options: argparse.Namespace, visits: Sequence[dict[str, float]]) -> None:
    print(f"{options.tasks:,} tasks, {len(visits)} first visits")
    for name, words in (("paint_ms", "first contentful paint"), ("counted_ms", "counts shown")):
        values = sorted(figures[name] for figures in visits)
        middle = statistics.median(values)
        print(f"{words}: median {middle:.0f} ms ({values[0]:.0f} to {values[-1]:.0f})")
    requests, size = (max(figures[name] for figures in visits) for name in ("requests", "bytes"))
    print(f"until then {requests:.0f} requests, {size / 1024:.0f} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console")
    parser.add_argument("--runs", type=int, default=15, help="visits")
    parser.add_argument("--tasks", type=int, default=1_000, help="tasks of the daemon")
    parser.add_argument("--dir", metavar="FOLDER", help="folder for the database, on a real disk")
    parser.add_argument("--check", action="store_true", help="exit code 1 above the bound")
    options = parser.parse_args()
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        print("no chromium: apt-get install chromium-headless-shell", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-bench-", dir=choose_folder(options.dir)))
    try:
        visits = measure(options, folder / "daemon", program)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(options, visits)
    late = statistics.median(figures["paint_ms"] for figures in visits) > FIRST_SIGHT_MS
    if late:
        print(f"the bound is {FIRST_SIGHT_MS:.0f} ms")
    return 1 if late and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
