"""The cost of OpenTelemetry for a client, a worker and the daemon, enabled and disabled.

    python -m benchmarks.tracing [--tasks 30000] [--rounds 5] [--before FOLDER]

Each kind of tracing has a fresh daemon, and a program that enqueues ``--tasks`` tasks with
``enqueue_nowait`` and processes them with a ``Worker`` whose handler does nothing. Kinds alternate
within a round. The figures are processor time per task, as the median of the rounds. ``--before``
adds a checkout without tracing as the first kind. The endpoint discards everything.
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
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import getrandbits
from typing import Any

TOPIC, GROUP = "bench", "bench"
CLIENTS = ("off", "api", "some", "all")
"""Tracing of the client: none, without an SDK, with an SDK that samples 1 %, or all."""
DAEMONS = ("off", "0.01", "1")
"""The daemon's ``trace_sample``. All tasks have a sampled ``trace``; off means no endpoint."""
PIECE = 1_000
"""Enqueues between two waits for their answers."""


# --- the program that is measured ----------------------------------------------------------------


def traced(way: str, target: Any) -> Any:
    if way in ("off", "given"):
        return target
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    from tickwheel.otel import instrument

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    if way == "api":
        return instrument(target)
    provider = TracerProvider(ParentBasedTraceIdRatio(0.01 if way == "some" else 1.0))
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=1 << 20))
    trace.set_tracer_provider(provider)
    return instrument(target)


def traceparent() -> str:
    return f"00-{getrandbits(128) | 1:032x}-{getrandbits(64) | 1:016x}-01"


async def program(port: int, way: str, tasks: int) -> dict[str, float]:
    """Return the CPU time of this process per task in microseconds."""
    from tickwheel import Client, Worker

    async with Client(f"tcp://127.0.0.1:{port}", send_timeout=60) as client:
        await client.create_group(TOPIC, GROUP)
        worker = traced(way, Worker(client, signals=False))
        done = 0

        @worker.on(TOPIC, group=GROUP)
        async def handle(delivery: Any) -> None:
            nonlocal done
            done += 1
            if done == tasks:
                worker.stop()

        body = b"x" * 100
        began_s = time.process_time()
        futures: deque[Any] = deque()
        for number in range(tasks):
            # A trace for each, so that some are in the daemon's share.
            options = {"trace": traceparent()} if way == "given" else {}
            futures.append(client.enqueue_nowait(TOPIC, body, delay=1, **options))
            if number % PIECE == PIECE - 1:
                while futures:
                    await futures.popleft()
        while futures:
            await futures.popleft()
        enqueued_s = time.process_time()
        await worker.run()
        worked_s = time.process_time()
    return {
        "enqueue_us": (enqueued_s - began_s) / tasks * 1e6,
        "work_us": (worked_s - enqueued_s) / tasks * 1e6,
    }


# --- rounds --------------------------------------------------------------------------------------


class Swallow(BaseHTTPRequestHandler):
    """An endpoint that accepts everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *about: Any) -> None:
        """Log nothing."""


def one(folder: Path, tree: Path, client: str, settings: list[str], tasks: int) -> dict[str, float]:
    """Return the figures of a daemon and a program, both from ``tree``."""
    from benchmarks.servers import Tickwheel

    there = f'cd "{tree}" && exec "{sys.executable}" -m tickwheel "$@"'
    with Tickwheel(folder, ["sh", "-c", there, "sh"], settings=settings) as daemon:
        before_s = daemon.cpu_s()
        command = [sys.executable, __file__, "--program", client, "--port", str(daemon.port)]
        command += ["--tasks", str(tasks)]
        env = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        figures: dict[str, float] = json.loads(done.stdout)
        figures["daemon_us"] = (daemon.cpu_s() - before_s) / tasks * 1e6
    return figures


def measure(options: argparse.Namespace, folder: Path, url: str) -> dict[str, dict[str, float]]:
    here = Path(__file__).resolve().parents[1]
    ways: dict[str, tuple[Path, str, list[str]]] = {}
    if options.before is not None:
        ways["before"] = (options.before.resolve(), "off", [])
    ways |= {f"client {way}": (here, way, []) for way in CLIENTS}
    if options.before is not None:
        ways["before, tasks with trace"] = (options.before.resolve(), "given", [])
    for share in DAEMONS:
        on = [] if share == "off" else [f"otlp_endpoint={url}", f"trace_sample={share}"]
        ways[f"daemon {share}, tasks with trace"] = (here, "given", on)
    if options.ways:
        ways = {name: way for name, way in ways.items() if name in options.ways}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for index, (name, (tree, client, settings)) in enumerate(ways.items()):
            place = folder / f"{number}-{index}"
            rounds[name].append(one(place, tree, client, settings, options.tasks))
            shutil.rmtree(place, ignore_errors=True)
    return {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing")
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout without it")
    parser.add_argument("--ways", nargs="*", metavar="NAME", help="only these, as they are printed")
    parser.add_argument("--dir", metavar="FOLDER", help="where the database goes: a real disk")
    parser.add_argument("--program", metavar="WAY", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        print(json.dumps(asyncio.run(program(options.port, options.program, options.tasks))))
        return 0
    from benchmarks.environment import choose_folder

    folder = Path(tempfile.mkdtemp(prefix="tickwheel-bench-", dir=choose_folder(options.dir)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Swallow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        medians = measure(options, folder, f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        server.shutdown()
    print(f"{options.tasks:,} tasks, {options.rounds} rounds; processor time a task, in µs")
    for name, figures in medians.items():
        shown = "  ".join(
            f"{key.removesuffix('_us')} {value:6.1f}" for key, value in figures.items()
        )
        print(f"{name:30} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
