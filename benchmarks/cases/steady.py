"""What a task costs in an ordinary minute: one connection that enqueues one a frame, due a second
later, and one that acks what each read brought. In a burst a batch has thousands of tasks, here it
has one or a few, so this shows the fixed price of a batch."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cases.lateness import lateness_at
from benchmarks.context import Contestant, Context, Result, alternate, measured

DELAY_MS = (1_000, 1_000)


def steady(context: Context) -> Result:
    """Each rate on a daemon of its own: its processor time, syncs and wake-ups a task, and how late
    the client got it."""
    return _steady(context, Result("steady"))


def steady_history(context: Context) -> Result:
    """The same with a history."""
    return _steady(context, Result("steady_history"), history=True)


def steady_worker(context: Context) -> Result:
    """The same with a ``Worker`` that takes the tasks."""
    return _steady(context, Result("steady_worker"), worker=True)


def _steady(
    context: Context, result: Result, *, history: bool = False, worker: bool = False
) -> Result:
    for rate in context.scale.steady_rates:
        with context.tickwheel(history=history) as daemon:
            before = daemon.stats()["batches"]
            sample = lateness_at(context, daemon, rate, DELAY_MS, connections=1, worker=worker)
            sample["batches"] = daemon.stats()["batches"] - before
        count, late = sample["count"], sample["client_late_ms"]
        task_us = sample["server_cpu_s"] / count * 1e6
        switches, batches = sample["switches"] / count, sample["batches"] / count
        result.details[str(rate)] = sample
        result.metric(f"server_us_at_{rate}", task_us)
        result.metric(f"switches_at_{rate}", switches)
        result.metric(f"batches_at_{rate}", batches)
        for name in ("p50", "p99"):
            result.metric(f"late_{name}_ms_at_{rate}", late[name])
        result.row(
            f"{rate:,} a second",
            f"{task_us:,.0f} us of processor time a task ({task_us * rate / 1e6:.0%} of a core),"
            f" {batches:.2f} commits, {switches:.1f} wake-ups; late p50 {late['p50']:.1f} ms, p99"
            f" {late['p99']:.1f} ms",
        )
        context.say(f"{result.case}: {rate}/s: {sample}")
    result.metric("early", sum(sample["early"] for sample in result.details.values()))
    return result


def sequential_client(context: Context) -> Result:
    """One coroutine of one client: it awaits one enqueue after the other; it awaits one ack after
    the other, of tasks that are ready."""
    result = Result("sequential_client")
    names = {"enqueue": "client_sequential", "ack": "client_sequential_acks"}

    def contestant(job: str) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.tickwheel() as daemon:
                return measured(daemon, job, count=context.scale.sequential, seed=seed)

        return run

    rounds_of = alternate(context, result.case, {n: contestant(job) for n, job in names.items()})
    for name, rounds in rounds_of.items():
        result.median(name, f"client, await {name}() one after the other", rounds)
    p50 = statistics.median(entry["latency_ms"]["p50"] for entry in rounds_of["enqueue"])
    result.metric("enqueue_p50_ms", p50)
    result.row("client, await enqueue()", f"p50 {p50:.3f} ms")
    return result
