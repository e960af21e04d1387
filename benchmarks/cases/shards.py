"""Two shards of ``serve --processes`` beside one daemon, in turn: each with a load of its own, and
both through one client that has its defaults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.cases.burst import MARGIN_S, NotInTime, in_time
from benchmarks.context import Contestant, Context, Result, alternate, measured
from benchmarks.load import Load
from benchmarks.payload import shares
from benchmarks.scale import CONNECTIONS, WINDOW
from benchmarks.servers import Shards, Tickwheel

COUNT = 2
CALLERS = 1_000
_WAYS = {
    "enqueue": f"enqueues, one a frame, a load of {CONNECTIONS} connections for each daemon",
    "burst": f"due at once, raw consumers of {CONNECTIONS} connections for each daemon",
    "client_enqueue": f"one client, {CALLERS:,} coroutines that await enqueue()",
    "client_burst": "due at once, one client, ack_nowait()",
}

Consumers = Callable[[Sequence[int], int], list[Load]]
"""What takes the tasks of daemons at these ports, due at a moment in milliseconds."""


def shards(context: Context) -> Result:
    """Rates of two shards, of one daemon, and how many times the one the other is."""
    result = Result("shards")
    runs = {
        "enqueue": _enqueue,
        "burst": _burst,
        "client_enqueue": _client_enqueue,
        "client_burst": _client_burst,
    }

    def contestant(way: str, count: int) -> Contestant:
        return lambda seed: runs[way](context, count, seed)

    contestants = {f"{way}_{count}": contestant(way, count) for way in runs for count in (1, COUNT)}
    rounds_of = alternate(context, result.case, contestants, context.scale.shards_rounds)
    for way, what in _WAYS.items():
        one, two = (
            result.median(f"{way}_{count}", f"{what}; {name}", rounds_of[f"{way}_{count}"])
            for count, name in ((1, "one daemon"), (COUNT, f"{COUNT} shards"))
        )
        result.ratio(f"ratio_{way}", f"{what}; {COUNT} shards / one daemon", two / one)
    bursts = [
        one_round for name, rounds in rounds_of.items() if "burst" in name for one_round in rounds
    ]
    result.metric("early", sum(figures["early"] for figures in bursts))
    return result


def _daemons(context: Context, count: int) -> tuple[Tickwheel, list[int]]:
    """Start a daemon with this number of shards, and return their addresses."""
    if count == 1:
        daemon = context.tickwheel()
        return daemon, [daemon.port]
    shards = Shards(context.fresh_folder("shards"), count, context.daemon_command)
    return shards, shards.ports


def _enqueue(context: Context, count: int, seed: int) -> dict[str, Any]:
    """As many tasks for each daemon."""
    daemon, ports = _daemons(context, count)
    tasks = [context.scale.frames] * count
    with daemon, ExitStack() as stack:
        loads = [stack.enter_context(load) for load in _puts(ports, tasks, 1, WINDOW, seed)]
        return _run(daemon, loads)


def _client_enqueue(context: Context, count: int, seed: int) -> dict[str, Any]:
    daemon, _ = _daemons(context, count)
    tasks = context.scale.single
    with daemon:
        return measured(daemon, "client_single", count=tasks, callers=CALLERS, seed=seed)


def _burst(context: Context, count: int, seed: int) -> dict[str, Any]:
    """As many tasks for each daemon."""
    tasks = [context.scale.burst] * count

    def consumers(ports: Sequence[int], due_ms: int) -> list[Load]:
        return [
            Load("tickwheel_burst", port=port, count=some, due_ms=due_ms, prefetch=WINDOW)
            for port, some in zip(ports, tasks, strict=True)
        ]

    return _due_at_once(context, tasks, seed, consumers)


def _client_burst(context: Context, count: int, seed: int) -> dict[str, Any]:
    """The same number of tasks in all."""
    total = context.scale.burst

    def consumers(ports: Sequence[int], due_ms: int) -> list[Load]:
        how: dict[str, Any] = {"way": "ack_nowait", "connections": 1}
        return [Load("client_burst", port=ports[0], count=total, due_ms=due_ms, **how)]

    return _due_at_once(context, shares(total, count), seed, consumers)


def _due_at_once(
    context: Context, tasks: Sequence[int], seed: int, consumers: Consumers
) -> dict[str, Any]:
    """``tasks`` of each daemon, all due at one moment; until their last ack is confirmed."""
    scale = context.scale

    def run(lead_s: float) -> dict[str, Any]:
        daemon, ports = _daemons(context, len(tasks))
        with daemon, ExitStack() as stack:
            due_s = time.time() + lead_s
            due_ms = int(due_s * 1000)
            frames = scale.tasks_per_frame, scale.frames_window
            for load in _puts(ports, tasks, *frames, seed, due_ms):
                with load:
                    load.run()
            loads = [stack.enter_context(load) for load in consumers(ports, due_ms)]
            if time.time() > due_s - MARGIN_S:
                raise NotInTime(f"{sum(tasks)} tasks were not ready {MARGIN_S} s ahead")
            return _run(daemon, loads, due_s - MARGIN_S / 2)

    return in_time(scale.shards_lead_s, run)


def _puts(
    ports: Sequence[int],
    tasks: Sequence[int],
    per_frame: int,
    window: int,
    seed: int,
    due_ms: int | None = None,
) -> list[Load]:
    """A load for each daemon that enqueues its tasks."""
    same: dict[str, Any] = {"tasks_per_frame": per_frame, "window": window, "due_ms": due_ms}
    return [
        Load("tickwheel_put", port=port, count=count, seed=seed * COUNT + number, **same)
        for number, (port, count) in enumerate(zip(ports, tasks, strict=True))
    ]


def _run(daemon: Tickwheel, loads: Sequence[Load], counts_from_s: float = 0.0) -> dict[str, Any]:
    """All loads at the same time, as one; processor time counts from a moment on."""
    cpu_s = daemon.cpu_s()
    for load in loads:
        load.start()
    if counts_from_s:
        time.sleep(max(0.0, counts_from_s - time.time()))
        cpu_s = daemon.cpu_s()
    results = [load.result() for load in loads]
    server_cpu_s = daemon.cpu_s() - cpu_s
    summed = {
        name: sum(figures.get(name, 0) for figures in results)
        for name in ("count", "client_cpu_s", "early")
    }
    elapsed_s = max(figures["elapsed_s"] for figures in results)
    return {**summed, "elapsed_s": elapsed_s, "server_cpu_s": server_cpu_s}
