"""Tasks that are all due at one moment, delivered and durably acked; beanstalkd's beside."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.cases.enqueue import MODE_NAMES
from benchmarks.context import Contestant, Context, Result, alternate, busy, measured, rates
from benchmarks.load import Load
from benchmarks.scale import CONNECTIONS, PEER_BURST_WINDOW, WINDOW
from benchmarks.servers import Tickwheel

MARGIN_S = 0.3
"""The consumer must be ready this long before the tasks are due."""
_SETTLE_S = 0.5


class NotInTime(Exception):
    """The burst was due before everything was prepared: the machine is too slow for its lead."""


def burst(context: Context) -> Result:
    """Raw consumers that ack what each read brought, as ``ack_nowait`` does."""
    result = Result("burst")
    contestants: dict[str, Contestant] = {
        "tickwheel": lambda seed: _burst(context, seed, "tickwheel_burst", prefetch=WINDOW)
    }
    if context.beanstalkd is not None:
        contestants["no_log"] = lambda seed: _peer_burst(context, "no_log", seed)
        contestants["log"] = lambda seed: _peer_burst(context, "log", seed)
    rounds_of = alternate(context, result.case, contestants)
    ours = rounds_of.pop("tickwheel")
    what = f"tickwheel, {context.scale.burst:,} due at once, {CONNECTIONS} connections"
    rate = result.rate("rate", what, rates(ours), busy(ours))
    result.metric("early", sum(figures["early"] for figures in ours))
    result.metric("repeated", sum(figures["repeated"] for figures in ours))
    result.details["first_ms"] = [round(figures["first_ms"], 1) for figures in ours]
    for mode, rounds in rounds_of.items():
        name = f"{MODE_NAMES[mode]}, reserve + delete"
        theirs = result.rate(mode, name, rates(rounds), busy(rounds))
        result.ratio(f"ratio_{mode}", f"tickwheel / {name}", rate / theirs)
    if context.beanstalkd is None and context.redis_server is None:
        result.missing.append(f"beanstalkd: {context.peers_missing}")
    return result


def burst_client(context: Context) -> Result:
    """The same through the Python client."""
    result = Result("burst_client")
    rounds_of = alternate(
        context,
        result.case,
        {
            "ack_nowait": lambda seed: _burst(
                context, seed, "client_burst", prefetch=WINDOW, awaiting=False
            ),
            "await_ack": lambda seed: _burst(
                context, seed, "client_burst", prefetch=WINDOW, awaiting=True
            ),
        },
    )
    for name, rounds in rounds_of.items():
        what = f"client, {name}, {CONNECTIONS} subscriptions in one process"
        result.rate(name, what, rates(rounds), busy(rounds))
        result.metric(f"{name}_early", sum(figures["early"] for figures in rounds))
    return result


def history(context: Context) -> Result:
    """What the delivery history costs: the burst, larger, with a history and without."""
    result = Result("history")
    count = context.scale.history_burst

    def run(seed: int, *, kept: bool) -> dict[str, Any]:
        return _burst(context, seed, "tickwheel_burst", prefetch=WINDOW, count=count, history=kept)

    rounds_of = alternate(
        context,
        result.case,
        {
            "off": lambda seed: run(seed, kept=False),
            "on": lambda seed: run(seed, kept=True),
        },
    )
    found = {
        name: result.rate(
            name, f"tickwheel, {count:,} due at once, history {name}", rates(rounds), busy(rounds)
        )
        for name, rounds in rounds_of.items()
    }
    result.ratio("ratio", "with a history / without", found["on"] / found["off"])
    cpu_s = {name: sum(one["server_cpu_s"] for one in rounds) for name, rounds in rounds_of.items()}
    if cpu_s["off"]:  # a quick run may take less than a tick of the processor's clock
        result.metric("cpu_ratio", cpu_s["on"] / cpu_s["off"])
    return result


def _burst(
    context: Context,
    seed: int,
    job: str,
    *,
    count: int | None = None,
    history: bool = False,
    **arguments: object,
) -> dict[str, Any]:
    scale = context.scale
    count = count or scale.burst
    with context.tickwheel(history=history) as daemon:
        due_s = time.time() + scale.burst_lead_s
        due_ms = int(due_s * 1000)
        measured(
            daemon,
            "tickwheel_put",
            count=count,
            tasks_per_frame=scale.tasks_per_frame,
            window=scale.frames_window,
            seed=seed,
            due_ms=due_ms,
        )
        arguments = {"count": count, "due_ms": due_ms, **arguments}
        with Load(job, port=daemon.port, **arguments) as load:
            if time.time() > due_s - MARGIN_S:
                raise NotInTime(f"{count} tasks were not ready {MARGIN_S} s ahead")
            return _run(daemon, load, due_s)


def _run(daemon: Tickwheel, load: Load, due_s: float) -> dict[str, Any]:
    load.start()
    time.sleep(max(0.0, due_s - MARGIN_S / 2 - time.time()))
    cpu_s = daemon.cpu_s()
    figures = load.result()
    return {**figures, "server_cpu_s": daemon.cpu_s() - cpu_s}


def _peer_burst(context: Context, mode: str, seed: int) -> dict[str, Any]:
    """Its jobs are delayed too, and all are ready before the first is asked for: waiting for
    the delays to pass is not counted against it."""
    count = context.scale.burst
    with context.peer(mode) as peer:
        measured(peer, "beanstalkd_put", count=count, window=WINDOW, seed=seed, delay_s=1)
        peer.wait_until_ready(count)
        time.sleep(_SETTLE_S)
        return measured(peer, "beanstalkd_burst", count=count, window=PEER_BURST_WINDOW)
