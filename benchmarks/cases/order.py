"""What order keys, fair shares and filters cost: bursts with them beside the plain one, and the
memory of a key whose only task waits for a consumer."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from benchmarks.cases.burst import due_burst
from benchmarks.cases.pending import FILL_TASKS_PER_FRAME, FILL_WINDOW
from benchmarks.consume import GROUP
from benchmarks.context import Context, Result, alternate, measured
from benchmarks.payload import ORDER_KEYS, TENANTS, TOPIC
from benchmarks.servers import Tickwheel

_SEED = 600
_POLL_S = 0.05
_READY_TIMEOUT_S = 180.0
FAIR = {"fair_by": "tenant"}
HALF = {"tags": "half"}


def order(context: Context) -> Result:
    """Bursts in turn; then two daemons side by side for the memory."""
    result = Result("order")
    rounds_of = alternate(
        context,
        result.case,
        {
            "plain": lambda seed: due_burst(context, seed),
            "ordered": lambda seed: due_burst(context, seed, shape="order"),
            "fair": lambda seed: due_burst(context, seed, shape="tenant", group=FAIR),
        },
    )
    what = f"{context.scale.burst:,} due at once"
    plain = result.median("plain", f"{what}, without order keys", rounds_of["plain"])
    for name, text in (
        ("ordered", f"{what}, {ORDER_KEYS:,} order keys"),
        ("fair", f"{what}, {TENANTS} tenants that share the group"),
    ):
        rate = result.median(name, text, rounds_of[name])
        result.ratio(f"{name}_ratio", f"{text} / plain", rate / plain)
    figures = [it for rounds in rounds_of.values() for it in rounds]
    result.metric("early", sum(it["early"] for it in figures))
    result.metric("repeated", sum(it["repeated"] for it in figures))
    _memory(context, result)
    return result


def _memory(context: Context, result: Result) -> None:
    """Measure the memory of ready tasks with order keys, and of tasks with a tag instead."""
    count, grown = context.scale.pending, dict[str, int]()
    with ExitStack() as stack:
        for shape in ("tag_each", "order_each"):
            daemon = stack.enter_context(context.tickwheel())
            daemon.ask_group(TOPIC, GROUP, {})
            empty = daemon.quiet_memory_bytes(context.scale.quiet_s)["VmRSS"]
            measured(
                daemon,
                "tickwheel_put",
                count=count,
                tasks_per_frame=FILL_TASKS_PER_FRAME,
                window=FILL_WINDOW,
                seed=_SEED,
                due_ms=int(time.time() * 1000),
                shape=shape,
            )
            _until_ready(daemon, count)
            grown[shape] = daemon.quiet_memory_bytes(context.scale.quiet_s)["VmRSS"] - empty
    extra = (grown["order_each"] - grown["tag_each"]) / count
    result.metric("bytes_a_key", extra)
    both = " - ".join(f"{grown[shape] / count:.1f}" for shape in ("order_each", "tag_each"))
    result.row("memory of an order key with one ready task", f"{extra:.1f} B a task ({both})")


def _until_ready(daemon: Tickwheel, count: int) -> None:
    until_s = time.monotonic() + _READY_TIMEOUT_S
    while (ready := daemon.stats()["ready"]) < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{ready} of {count} tasks are ready")
        time.sleep(_POLL_S)


def filters(context: Context) -> Result:
    """A burst of which a group's filter by tags lets half pass, beside one without a filter."""
    result = Result("filters")
    count = context.scale.burst

    def half(seed: int) -> dict[str, Any]:
        # Filtered tasks have come due as well, and the burst ends with the last task.
        passed = due_burst(context, seed, shape="half", group=HALF, acked=count // 2)
        return {**passed, "count": count}

    rounds_of = alternate(
        context,
        result.case,
        {"plain": lambda seed: due_burst(context, seed, shape="half"), "half": half},
    )
    plain = result.median("plain", f"{count:,} due at once, no filter", rounds_of["plain"])
    rate = result.median("half", f"{count:,} due at once, a filter that half of the tasks pass",
                         rounds_of["half"])  # fmt: skip
    result.ratio("ratio", "with a filter that half of the tasks pass / without", rate / plain)
    result.ratio("passed_ratio", "the same, counting what passes", rate / 2 / plain)
    figures = [it for rounds in rounds_of.values() for it in rounds]
    result.metric("early", sum(it["early"] for it in figures))
    return result
