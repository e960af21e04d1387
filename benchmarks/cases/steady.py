"""What a task costs in an ordinary minute: one connection that enqueues one a frame, due a second
later, and one that acks what each read brought. In a burst a batch has thousands of tasks, here it
has one or a few, so this shows the fixed price of a batch."""

from __future__ import annotations

from benchmarks.cases.lateness import lateness_at
from benchmarks.context import Context, Result

DELAY_MS = (1_000, 1_000)


def steady(context: Context) -> Result:
    """Each rate on a daemon of its own: its processor time and wake-ups a task, and how late the
    client got it."""
    return _steady(context, Result("steady"), history=False)


def steady_history(context: Context) -> Result:
    """The same with a history."""
    return _steady(context, Result("steady_history"), history=True)


def _steady(context: Context, result: Result, *, history: bool) -> Result:
    for rate in context.scale.steady_rates:
        with context.tickwheel(history=history) as daemon:
            found = lateness_at(context, daemon, rate, DELAY_MS, connections=1)
        task_us = found["server_cpu_s"] / found["count"] * 1e6
        switches = found["switches"] / found["count"]
        late = found["client_late_ms"]
        result.details[str(rate)] = found
        result.metric(f"server_us_at_{rate}", task_us)
        result.metric(f"switches_at_{rate}", switches)
        for name in ("p50", "p99"):
            result.metric(f"late_{name}_ms_at_{rate}", late[name])
        result.row(
            f"{rate:,} a second",
            f"{task_us:,.0f} us of processor time a task ({task_us * rate / 1e6:.0%} of a core),"
            f" {switches:.1f} wake-ups; late p50 {late['p50']:.1f} ms, p99 {late['p99']:.1f} ms",
        )
        context.say(f"{result.case}: {rate}/s: {found}")
    result.metric("early", sum(found["early"] for found in result.details.values()))
    return result
