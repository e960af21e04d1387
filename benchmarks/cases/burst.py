"""Tasks that are all due at one moment, delivered and durably acked; the peers' beside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.cases.enqueue import MODE_NAMES
from benchmarks.client_jobs import HANDLERS
from benchmarks.consume import GROUP
from benchmarks.context import Contestant, Context, Result, alternate, measured
from benchmarks.load import Load
from benchmarks.payload import TOPIC
from benchmarks.peers import Queue
from benchmarks.scale import CONNECTIONS, PEER_BURST_WINDOW, POSTGRES_FETCH, WINDOW
from benchmarks.servers import Tickwheel

MARGIN_S = 0.3
"""The consumer must be ready this long before the tasks are due."""
LEAD_FACTOR_MAX = 8
"""On a busy machine a burst is prepared again with twice the lead, up to this times as much."""
_SETTLE_S = 0.5
_PEER_NAMES = {
    **{mode: f"{name}, reserve + delete" for mode, name in MODE_NAMES.items()},
    "postgres": f"PostgreSQL, fetch and delete {POSTGRES_FETCH}, {CONNECTIONS} connections",
}


class NotInTime(Exception):
    """The burst was due before everything was prepared: the machine was too busy for its lead."""


def burst(context: Context) -> Result:
    """Raw consumers that ack what each read brought, as ``ack_nowait`` does."""
    result = Result("burst")
    contestants: dict[str, Contestant] = {
        "tickwheel": lambda seed: _burst(context, seed, "tickwheel_burst", prefetch=WINDOW)
    }
    if context.beanstalkd is not None:
        contestants["no_log"] = lambda seed: _peer_burst(context, "no_log", seed)
        contestants["log"] = lambda seed: _peer_burst(context, "log", seed)
    if context.postgres_programs is not None:
        contestants["postgres"] = lambda seed: _postgres_burst(context, seed)
    rounds_of = alternate(context, result.case, contestants)
    ours = rounds_of.pop("tickwheel")
    what = f"tickwheel, {context.scale.burst:,} due at once, {CONNECTIONS} connections"
    rate = result.median("rate", what, ours)
    result.metric("early", sum(figures["early"] for figures in ours))
    result.metric("repeated", sum(figures["repeated"] for figures in ours))
    result.details["first_ms"] = [round(figures["first_ms"], 1) for figures in ours]
    for mode, rounds in rounds_of.items():
        name = _PEER_NAMES[mode]
        theirs = result.median(mode, name, rounds)
        result.ratio(f"ratio_{mode}", f"tickwheel / {name}", rate / theirs)
    if context.redis_server is None and not context.on_postgres:
        if context.beanstalkd is None:
            result.missing.append(f"beanstalkd: {context.peers_missing}")
        if context.postgres_programs is None:
            result.missing.append(f"PostgreSQL: {context.postgres_missing}")
    return result


def burst_client(context: Context) -> Result:
    """The same through the Python client with its defaults, beside the raw one; other queues on
    PostgreSQL with their clients."""
    result = Result("burst_client")
    ways = {
        "ack_nowait": "ack_nowait()",
        "await_ack": f"await ack() in {HANDLERS} handlers each, a task a delivery",
        "await_loop": f"await ack() in {HANDLERS} loops over each subscription",
        "worker": "Worker",
    }

    def through_client(way: str) -> Contestant:
        return lambda seed: _burst(context, seed, "client_burst", way=way)

    contestants: dict[str, Contestant] = {
        "raw": lambda seed: _burst(context, seed, "tickwheel_burst", prefetch=WINDOW),
        **{way: through_client(way) for way in ways},
        **{queue.key: _queue_burst(context, queue) for queue in context.queues},
    }
    rounds_of = alternate(context, result.case, contestants)
    raw = result.median("raw", f"raw, {CONNECTIONS} connections", rounds_of.pop("raw"))
    for queue in context.queues:
        rounds = rounds_of.pop(queue.key)
        what = f"{queue.name}, {rounds[0]['count']:,} jobs that do nothing"
        result.median(queue.key, what, rounds)
    for name, rounds in rounds_of.items():
        what = f"client, {ways[name]}, {CONNECTIONS} clients in one process"
        rate = result.median(name, what, rounds)
        result.ratio(f"ratio_{name}", f"client, {ways[name]} / raw", rate / raw)
        result.metric(f"{name}_early", sum(figures["early"] for figures in rounds))
    result.against_queues("Worker", result.metrics["burst_client.worker"], context)
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
    medians = {
        name: result.median(name, f"tickwheel, {count:,} due at once, history {name}", rounds)
        for name, rounds in rounds_of.items()
    }
    result.ratio("ratio", "with a history / without", medians["on"] / medians["off"])
    cpu_s = {
        name: sum(one_round["server_cpu_s"] for one_round in rounds)
        for name, rounds in rounds_of.items()
    }
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
    shape: str | None = None,
    group: dict[str, Any] | None = None,
    acked: int | None = None,
    **arguments: object,
) -> dict[str, Any]:
    """``shape`` are further options of the tasks, ``group`` the settings of their group, and
    ``acked`` the number of tasks that match its filter, if not all do."""
    scale = context.scale
    count = count or scale.burst

    def run(lead_s: float) -> dict[str, Any]:
        made = due_at_once(context, seed, count, lead_s, history=history, shape=shape, group=group)
        with made as (daemon, due_s):
            return _run(daemon, job, acked or count, due_s, arguments)

    return in_time(scale.burst_lead_s, run)


def in_time(lead_s: float, run: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """``run`` with this lead time, or with a longer one where the machine was too slow for it."""
    longest_s = LEAD_FACTOR_MAX * lead_s
    while True:
        try:
            return run(lead_s)
        except NotInTime:
            lead_s *= 2
            if lead_s > longest_s:
                raise


@contextmanager
def due_at_once(
    context: Context,
    seed: int,
    count: int,
    lead_s: float,
    *,
    history: bool = False,
    shape: str | None = None,
    group: dict[str, Any] | None = None,
) -> Iterator[tuple[Tickwheel, float]]:
    """A daemon that holds tasks which are all due at one moment, and when that is."""
    scale = context.scale
    with context.tickwheel(history=history) as daemon:
        if group is not None:
            daemon.ask_group(TOPIC, GROUP, group)
        due_s = time.time() + lead_s
        measured(
            daemon,
            "tickwheel_put",
            count=count,
            tasks_per_frame=scale.tasks_per_frame,
            window=scale.frames_window,
            seed=seed,
            due_ms=int(due_s * 1000),
            shape=shape,
        )
        yield daemon, due_s


def due_burst(context: Context, seed: int, **more: Any) -> dict[str, Any]:
    """One burst through raw consumers; ``more`` as ``_burst`` has it."""
    return _burst(context, seed, "tickwheel_burst", prefetch=WINDOW, **more)


def raw_burst(daemon: Tickwheel, count: int, due_s: float) -> dict[str, Any]:
    """Takes them through raw consumers."""
    return _run(daemon, "tickwheel_burst", count, due_s, {"prefetch": WINDOW})


def _run(
    daemon: Tickwheel, job: str, count: int, due_s: float, arguments: dict[str, object]
) -> dict[str, Any]:
    with Load(job, port=daemon.port, count=count, due_ms=int(due_s * 1000), **arguments) as load:
        if time.time() > due_s - MARGIN_S:
            raise NotInTime(f"{count} tasks were not ready {MARGIN_S} s ahead")
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


def _postgres_burst(context: Context, seed: int) -> dict[str, Any]:
    """Everything is due before the first fetch."""
    count = context.scale.burst
    with context.postgres() as postgres:
        measured(postgres, "postgres_fill", count=count, seed=seed)
        time.sleep(_SETTLE_S)
        return measured(postgres, "postgres_burst", count=count, per_fetch=POSTGRES_FETCH)


def _queue_burst(context: Context, queue: Queue) -> Contestant:
    """All jobs are due before its worker starts. A queue that takes them one by one gets a tenth:
    its rate does not depend on their number, and it needs minutes for all."""
    count = context.scale.burst // (1 if queue.is_batched else 10)

    def run(seed: int) -> dict[str, Any]:
        with context.postgres() as postgres:
            return measured(postgres, "burst", queue=queue, count=count)

    return run
