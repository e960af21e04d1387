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
_FLOOR = ("sync", "echo")
_SEQUENTIAL = {
    **MODE_NAMES,
    "floor": "an echo over loopback, then an fdatasync of 4 KiB, appended",
    "sync": "fdatasync of 4 KiB, appended",
    "sync_in_place": "fdatasync of 4 KiB, written over (not in the floor)",
    "echo": "an echo over loopback",
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

    def floor(seed: int) -> dict[str, Any]:
        with context.echo() as echo:
            return measured(
                echo, "echo_sequential", count=count, seed=seed, sync_in=str(echo.folder)
            )

    contestants: dict[str, Contestant] = {"tickwheel": ours, "floor": floor}
    if context.beanstalkd is not None:
        contestants["log_each"] = theirs
    rounds_of = alternate(context, result.case, contestants)
    p50 = {
        name: _latencies(result, name, rounds, "latency_ms") for name, rounds in rounds_of.items()
    }
    parts = [_latencies(result, part, rounds_of["floor"], f"{part}_ms") for part in _FLOOR]
    _latencies(result, "sync_in_place", rounds_of["floor"], "sync_in_place_ms")
    rate = {
        name: result.median(name, _SEQUENTIAL.get(name, name), rounds)
        for name, rounds in rounds_of.items()
    }
    result.ratio(
        "p50_over_floor", "p50 / (one fdatasync + one echo)", p50["tickwheel"] / sum(parts)
    )
    if "log_each" in rate:
        what = f"tickwheel / {MODE_NAMES['log_each']}"
        result.ratio("ratio_log_each", what, rate["tickwheel"] / rate["log_each"])
    else:
        result.missing.append(f"beanstalkd: {context.peers_missing}")
    return result


def _latencies(result: Result, name: str, rounds: list[dict[str, Any]], key: str) -> float:
    """Notes the medians of the rounds' p50 and p99; the p50."""
    p50, p99 = (
        statistics.median(one_round[key][which] for one_round in rounds) for which in ("p50", "p99")
    )
    result.metric(f"{name}_p50_ms", p50)
    result.metric(f"{name}_p99_ms", p99)
    result.row(_SEQUENTIAL.get(name, name), f"p50 {p50:.3f} ms, p99 {p99:.3f} ms")
    return p50


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
    rate = result.median("rate", what, rounds_of[ours])
    for mode, rounds in rounds_of.items():
        if mode == ours:
            continue
        theirs = result.rate(mode, MODE_NAMES[mode], rates(rounds), busy(rounds))
        result.ratio(f"ratio_{mode}", f"tickwheel / {MODE_NAMES[mode]}", rate / theirs)
    if context.beanstalkd is None:
        result.missing.append(f"beanstalkd: {context.peers_missing}")
