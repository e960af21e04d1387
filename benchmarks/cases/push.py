"""Pushes to a local endpoint, beside a group whose host is slow and one whose host is dead: how
late tasks are when the endpoint has read their heads."""

from __future__ import annotations

import json
import sys
import time
import urllib.request

import numpy as np

from benchmarks.cases.lateness import DELAY_MS, WARM_UP_S
from benchmarks.context import Context, Result
from benchmarks.load import Load
from benchmarks.payload import TOPIC
from benchmarks.scale import WINDOW
from benchmarks.servers import Plain, Tickwheel
from tickwheel.sync import Client

RATE = 1_000
SLOW_S = 5.0
PATIENCE_S = 60.0
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105  # of nobody
ENDPOINT = [sys.executable, "-m", "benchmarks.push_endpoint", "{port}"]


def push(context: Context) -> Result:
    """One rate; the endpoint's own look at the clock against the due millisecond."""
    result, seconds = Result("push"), context.scale.lateness_s
    folder = context.fresh_folder("tickwheel")
    with (
        Plain(context.fresh_folder("endpoint"), ENDPOINT) as fast,
        Plain(context.fresh_folder("slow"), [*ENDPOINT, str(SLOW_S)]) as slow,
        Tickwheel(folder, context.daemon_command, settings=["push_allow=127.0.0.0/8"]) as daemon,
        Client(f"tcp://127.0.0.1:{daemon.port}") as client,
    ):
        hosts = {"fast": fast.port, "slow": slow.port, "dead": 9}
        for group, port in hosts.items():
            client.set_push(TOPIC, group, f"http://127.0.0.1:{port}/", secrets=[SECRET])
        count = int(RATE * seconds)
        with Load(
            "pace", port=daemon.port, rate=RATE, seconds=seconds, window=WINDOW,
            delay_ms=DELAY_MS, seed=7,
        ) as producer:  # fmt: skip
            producer.start()
            producer.result()
        late_ms = _figures(fast.port, count)
    warm_up = int(min(WARM_UP_S, seconds / 2) * RATE)
    measured = np.array(late_ms[warm_up:])
    for name, share in (("p50", 50), ("p99", 99), ("max", 100)):
        value = float(np.percentile(measured, share))
        result.metric(f"{name}_ms", value)
        result.row(f"pushed at {RATE:,} a second, {name}", f"{value:.1f} ms")
    early = int((measured < 0).sum())
    result.metric("early", early)
    result.row("early", str(early))
    return result


def _figures(port: int, count: int) -> list[float]:
    """How late each task was, once all have come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/figures") as answer:
            result: list[float] = json.load(answer)
        if len(result) >= count:
            return result
        assert time.monotonic() < deadline_s, f"{len(result)} of {count} came"
        time.sleep(0.2)
