"""Durable enqueues: one task a frame, many a frame, one after the other; beanstalkd's beside."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.context import Contestant, Context, Result, Rounds, alternate, busy, measured, rates
from benchmarks.scale import CONNECTIONS, WINDOW
from benchmarks.servers import Tickwheel

MODE_NAMES = {
    "no_log": "beanstalkd, no log",
    "log": "beanstalkd, log, fsync each 50 ms",
    "log_each": "beanstalkd, log, fsync each put",
}


def enqueue_frame(context: Context) -> Result:
    """One task a frame, pipelined, each acknowledged when durable."""
    result = Result("enqueue_frame")
    scale = context.scale
    contestants: dict[str, Contestant] = {
        "tickwheel": lambda seed: _enqueue(context, seed, scale.frames, 1, WINDOW)
    }
    _add_peers(context, contestants, ("no_log", "log", "log_each"))
    rounds_of = alternate(context, result.case, contestants)
    what = f"tickwheel, {CONNECTIONS} connections, window {WINDOW}"
    _compare(context, result, rounds_of, "tickwheel", what)
    return result


def enqueue_batched(context: Context) -> Result:
    """Many tasks a frame; the peer has no such command and pipelines single puts."""
    result = Result("enqueue_batched")
    scale = context.scale
    per_frame = scale.tasks_per_frame
    contestants: dict[str, Contestant] = {
        "tickwheel": lambda seed: _enqueue(
            context, seed, scale.batched, per_frame, scale.frames_window
        )
    }
    _add_peers(context, contestants, ("no_log",))
    rounds_of = alternate(context, result.case, contestants)
    _compare(context, result, rounds_of, "tickwheel", f"tickwheel, {per_frame} tasks a frame")
    return result


def enqueue_sequential(context: Context) -> Result:
    """Each enqueue after the answer to the one before: one connection, one at a time."""
    result = Result("enqueue_sequential")
    count = context.scale.sequential

    def ours(seed: int) -> dict[str, Any]:
        with context.tickwheel() as daemon:
            return measured(daemon, "tickwheel_sequential", count=count, seed=seed)

    def theirs(seed: int) -> dict[str, Any]:
        with context.peer("log_each") as peer:
            return measured(peer, "beanstalkd_sequential", count=count, seed=seed)

    contestants: dict[str, Contestant] = {"tickwheel": ours}
    if context.beanstalkd is not None:
        contestants["log_each"] = theirs
    rounds_of = alternate(context, result.case, contestants)
    for name, rounds in rounds_of.items():
        p50 = statistics.median(figures["latency_ms"]["p50"] for figures in rounds)
        p99 = statistics.median(figures["latency_ms"]["p99"] for figures in rounds)
        result.metric(f"{name}_p50_ms", p50)
        result.metric(f"{name}_p99_ms", p99)
        remark = f"; p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        result.rate(name, MODE_NAMES.get(name, name), rates(rounds), remark)
    if context.beanstalkd is None:
        result.missing.append(f"beanstalkd: {context.peers_missing}")
    return result


def _enqueue(
    context: Context, seed: int, count: int, tasks_per_frame: int, window: int
) -> dict[str, Any]:
    with context.tickwheel() as daemon:
        return put_tasks(daemon, count, tasks_per_frame, window, seed)


def put_tasks(
    daemon: Tickwheel, count: int, tasks_per_frame: int, window: int, seed: int
) -> dict[str, Any]:
    """One load of enqueues."""
    return measured(
        daemon,
        "tickwheel_put",
        count=count,
        tasks_per_frame=tasks_per_frame,
        window=window,
        seed=seed,
    )


def _put(context: Context, mode: str, seed: int) -> dict[str, Any]:
    scale = context.scale
    count = scale.frames_synced if mode == "log_each" else scale.frames
    with context.peer(mode) as peer:
        return measured(peer, "beanstalkd_put", count=count, window=WINDOW, seed=seed)


def _add_peers(
    context: Context, contestants: dict[str, Contestant], modes: tuple[str, ...]
) -> None:
    if context.beanstalkd is None:
        return
    for mode in modes:
        contestants[mode] = lambda seed, mode=mode: _put(context, mode, seed)  # type: ignore[misc]  # the default binds it


def _compare(context: Context, result: Result, rounds_of: Rounds, ours: str, what: str) -> None:
    rate = result.rate("rate", what, rates(rounds_of[ours]), busy(rounds_of[ours]))
    for mode, rounds in rounds_of.items():
        if mode == ours:
            continue
        theirs = result.rate(mode, MODE_NAMES[mode], rates(rounds), busy(rounds))
        result.ratio(f"ratio_{mode}", f"tickwheel / {MODE_NAMES[mode]}", rate / theirs)
    if context.beanstalkd is None:
        result.missing.append(f"beanstalkd: {context.peers_missing}")
