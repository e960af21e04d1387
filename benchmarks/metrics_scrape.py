"""Duration of a scrape of ``/metrics`` and its effect on deliveries.

    python -m benchmarks.metrics_scrape [--topics 1000] [--rate 1000] [--seconds 20]

The daemon has ``--topics`` topics, each with a subscription, and ``--rate`` tasks due per second.
Seconds with and without scraping alternate, so that a slow minute of the machine affects both. The
load is a separate process. Lateness is measured by the client from the due time to the receipt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.consume import percentiles
from benchmarks.environment import choose_folder
from benchmarks.servers import Tickwheel
from benchmarks.wire import Control, unpacker
from tickwheel.api.frames import FrameType
from tickwheel.protocol import encode

PHASE_S = 2.0
SCRAPE_EVERY_S = 0.25
WARM_UP_S = 2.0
TICK_S = 0.01
DELAY_MS = (500, 1_500)
GROUP = "bench"
ACCEPT = "application/openmetrics-text; version=1.0.0"
_DELIVER, _ACK, _ENQUEUE = int(FrameType.DELIVER), int(FrameType.ACK), int(FrameType.ENQUEUE)


class Pacer:
    """A connection with a subscription per topic, which enqueues tasks on all topics in turn."""

    def __init__(self, port: int, topics: int, rate: int) -> None:
        control = Control(port, session=True)
        self._topics = [f"topic-{number:04}" for number in range(topics)]
        for number, topic in enumerate(self._topics, 1):
            control.ask(FrameType.SUBSCRIBE, number, topic, GROUP, 1_000, None)
        self._sock = control.sock
        self._reader = unpacker()
        self._request = 1_000_000
        self._floor = self._request + 1
        self._turn = 0
        self._rate = rate
        self.late: list[tuple[float, float, float]] = []
        """(wall time of the receipt, late by the daemon's stamp, late at the receipt), in ms."""

    def run(self, seconds: float) -> None:
        self._sock.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(self._sock, selectors.EVENT_READ)
        begin_s = time.monotonic()
        sent = 0
        while (elapsed_s := time.monotonic() - begin_s) < seconds + DELAY_MS[1] / 1000 + 0.5:
            wanted = int(min(elapsed_s, seconds) * self._rate)
            if wanted > sent:
                self._enqueue(wanted - sent)
                sent = wanted
            if selector.select(TICK_S):
                self._read()

    def _enqueue(self, count: int) -> None:
        tasks = []
        for _ in range(count):
            self._turn += 1
            topic = self._topics[self._turn % len(self._topics)]
            spread = DELAY_MS[1] - DELAY_MS[0]
            tasks.append((topic, b"x" * 100, DELAY_MS[0] + self._turn * 7919 % spread))
        self._send(_ENQUEUE, self._floor, tasks)

    def _send(self, kind: int, *fields: Any) -> None:
        self._request += 1
        self._sock.setblocking(True)
        self._sock.sendall(encode((kind, self._request, *fields)))
        self._sock.setblocking(False)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.feed(self._sock.recv(1 << 18))
        received_ms = time.time() * 1000
        for frame in self._reader:
            if frame[0] == FrameType.ERROR:
                raise RuntimeError(f"the daemon answered {frame!r:.200}")
            if frame[0] == FrameType.OK:
                self._floor = max(self._floor, frame[1] + 1)
            if frame[0] != _DELIVER:
                continue
            _, number, epoch, stamp_ms, items = frame
            for item in items:
                self.late.append((received_ms, stamp_ms - item[2], received_ms - item[2]))
            ids, attempts = [item[0] for item in items], [item[1] for item in items]
            self._send(_ACK, self._topics[number - 1], GROUP, epoch, ids, attempts)


def load(options: argparse.Namespace) -> int:
    """Run the load process, which prints its start time, then its figures."""
    pacer = Pacer(options.load, options.topics, options.rate)
    print("ready", flush=True)
    pacer.run(options.seconds + WARM_UP_S)
    json.dump(pacer.late, sys.stdout)
    return 0


def scrape(url: str) -> tuple[float, int, int]:
    """Return (seconds, bytes, samples) of a scrape."""
    request = urllib.request.Request(url, headers={"Accept": ACCEPT})  # noqa: S310  # our own
    begin_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # our own
        body = answer.read()
    elapsed_s = time.perf_counter() - begin_s
    return elapsed_s, len(body), sum(not line.startswith(b"#") for line in body.splitlines())


def measure(options: argparse.Namespace, folder: Path) -> int:
    os.environ["TICKWHEEL_HTTP"] = "127.0.0.1:0"
    with Tickwheel(folder) as daemon:
        url = json.loads((folder / "ready.json").read_text())["http"] + "/metrics"
        command = [sys.executable, "-m", "benchmarks.metrics_scrape", "--load", str(daemon.port)]
        for name in ("topics", "rate", "seconds"):
            command += [f"--{name}", str(getattr(options, name))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the load did not start"
            time.sleep(WARM_UP_S)
            windows, scrapes = phases(url, options.seconds)
            late = json.loads(process.stdout.read())
        early = daemon.stats()["early"]
    show(options, late, windows, scrapes)
    return 1 if early else 0


Windows = list[tuple[float, float, bool]]
"""(start, end, whether scraped); wall-clock ms."""


def phases(url: str, seconds: float) -> tuple[Windows, list[tuple[float, int, int]]]:
    windows: Windows = []
    scrapes = []
    end_s, scraping = time.monotonic() + seconds, False
    while time.monotonic() < end_s:
        begin_ms, until_s = time.time() * 1000, time.monotonic() + min(PHASE_S, seconds / 4)
        while time.monotonic() < until_s:
            if scraping:
                scrapes.append(scrape(url))
            time.sleep(SCRAPE_EVERY_S)
        windows.append((begin_ms, time.time() * 1000, scraping))
        scraping = not scraping
    return windows, scrapes


def show(
    options: argparse.Namespace,
    late: list[tuple[float, float, float]],
    windows: Windows,
    scrapes: list[tuple[float, int, int]],
) -> None:
    times = percentiles([elapsed_s * 1000 for elapsed_s, _, _ in scrapes])
    size_bytes, samples = scrapes[-1][1:]
    figures = ", ".join(f"{name} {value:.1f} ms" for name, value in times.items())
    print(f"{options.topics:,} topics, {options.rate:,} deliveries a second")
    print(f"scrape ({len(scrapes)}, {samples:,} samples, {size_bytes:,} bytes): {figures}")
    for when, wanted in (("without scraping", False), ("with scraping", True)):
        spans = [(begin, end) for begin, end, scraped in windows if scraped is wanted]
        selected = [row for row in late if any(begin <= row[0] < end for begin, end in spans)]
        for column, side in ((1, "daemon's stamp"), (2, "client's receipt")):
            figures = ", ".join(
                f"{name} {value:.1f} ms"
                for name, value in percentiles([item[column] for item in selected]).items()
            )
            print(f"late {when}, {side} ({len(selected):,}): {figures}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics_scrape")
    parser.add_argument("--topics", type=int, default=1_000, help="at most 1,024")
    parser.add_argument("--rate", type=int, default=1_000, help="tasks due a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="without the warm-up")
    parser.add_argument("--dir", metavar="FOLDER", help="where the database goes: a real disk")
    parser.add_argument("--load", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        return load(options)
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-bench-", dir=choose_folder(options.dir)))
    try:
        return measure(options, folder / "daemon")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
