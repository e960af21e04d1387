"""The HTTP API: single enqueues beside what its own stack does for nothing, streams of lines, and
the lateness of deliveries over TCP meanwhile."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.lateness import lateness_at
from benchmarks.context import Context, Result, alternate, measured, rates
from benchmarks.load import Load
from benchmarks.scale import WINDOW
from benchmarks.servers import Plain, Tickwheel

LINES_WINDOW = 20_000
RATE = 2_000
"""Deliveries a second over TCP while HTTP is busy."""


class OverHttp(Tickwheel):
    """Its port is the one of HTTP."""

    def __init__(
        self, context: Context, folder: Path | None = None, settings: Sequence[str] = ()
    ) -> None:
        folder = folder or context.fresh_folder("tickwheel")
        given = ["http=127.0.0.1:0", *settings]
        super().__init__(folder, context.daemon_command, settings=given)
        url = json.loads((folder / "ready.json").read_text())["http"]
        self.tcp_port, self.port = self.port, int(url.rsplit(":", 1)[1])


def http(context: Context) -> Result:
    """Alternating rounds of both servers; then lines; then both transports at once."""
    result = Result("http")
    scale = context.scale

    def put(seed: int) -> dict[str, Any]:
        with OverHttp(context) as daemon:
            return measured(daemon, "http_put", count=scale.http, seed=seed)

    def nothing(seed: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.http_floor", "{port}"]
        with Plain(context.fresh_folder("floor"), command) as floor:
            return measured(floor, "http_put", count=scale.http, seed=seed)

    def lines(seed: int) -> dict[str, Any]:
        with OverHttp(context) as daemon:
            return measured(
                daemon, "http_lines", count=scale.http_lines, window=LINES_WINDOW, seed=seed
            )

    rounds = alternate(context, "http", {"put": put, "nothing": nothing, "lines": lines})
    put_rate = result.median("put", "single enqueues, 32 connections", rounds["put"])
    nothing_rate = result.median("nothing", "the same stack, doing nothing", rounds["nothing"])
    result.ratio("ratio_nothing", "… single / nothing", put_rate / nothing_rate)
    result.median("lines", "lines (NDJSON), one connection", rounds["lines"])
    result.details["rates"] = {name: rates(figures) for name, figures in rounds.items()}
    _lateness(context, result)
    return result


def _lateness(context: Context, result: Result) -> None:
    """Deliveries over TCP while single enqueues come over HTTP as fast as they can."""
    with OverHttp(context) as daemon:
        over = threading.Event()
        pressed = threading.Thread(target=_press, args=(daemon.port, context.scale.http, over))
        http_port, daemon.port = daemon.port, daemon.tcp_port
        assert http_port != daemon.port
        pressed.start()
        try:
            sample = lateness_at(context, daemon, RATE)
        finally:
            over.set()
            pressed.join()
    result.details["lateness"] = sample
    for name, value in sample["daemon_late_ms"].items():
        result.metric(f"tcp_{name}_ms", value)
    figures = ", ".join(f"{k} {v:.1f} ms" for k, v in sample["daemon_late_ms"].items())
    result.row(f"lateness over TCP at {RATE:,} a second beside it", figures)
    result.metric("early", sample["early"])


def _press(port: int, count: int, over: threading.Event) -> None:
    seed = 50_000
    while not over.is_set():
        seed += WINDOW
        with Load("http_put", port=port, count=count, seed=seed) as load:
            load.run()
