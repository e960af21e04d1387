"""What a million pending tasks cost: memory, recovery, and the rate of further enqueues."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.consume import TickwheelConsumer
from benchmarks.context import Context, Result, alternate, measured
from benchmarks.scale import RUN_TIMEOUT_S, WINDOW
from benchmarks.servers import Server, Tickwheel
from benchmarks.wire import WrongAnswer

FILL_TASKS_PER_FRAME = 500
FILL_WINDOW = 8
IDS_PER_FRAME = 500
_FILL_SEED = 100
_OVERDUE_SEED = 200
_MIB = 1024 * 1024
_POLL_S = 0.005
_RECOVERY_TIMEOUT_S = 120.0


def fill(context: Context, daemon: Server, ids_file: Path | None = None) -> dict[str, Any]:
    """Put the scale's number of pending tasks into a daemon."""
    count = context.scale.pending
    return measured(
        daemon,
        "tickwheel_put",
        limit_s=RUN_TIMEOUT_S * max(1, count // 1_000_000),
        count=count,
        tasks_per_frame=FILL_TASKS_PER_FRAME,
        window=FILL_WINDOW,
        seed=_FILL_SEED,
        ids_file=str(ids_file) if ids_file is not None else None,
    )


def memory(context: Context) -> Result:
    """Resident memory of a daemon at 0 and at n pending, and after every task was moved."""
    result = Result("memory")
    count = context.scale.pending
    with context.tickwheel() as daemon:
        empty = daemon.quiet_memory_bytes(context.scale.quiet_s)
        ids_file = daemon.folder / "ids"
        filled = fill(context, daemon, ids_file)
        full = daemon.quiet_memory_bytes(context.scale.quiet_s)
        moved = measured(
            daemon,
            "by_id",
            verb="reschedule",
            ids_file=str(ids_file),
            ids_per_frame=IDS_PER_FRAME,
            window=FILL_WINDOW,
            seed=_FILL_SEED + 1,
        )
        after = daemon.quiet_memory_bytes(context.scale.quiet_s)
        stats = daemon.stats()
    assert stats["scheduled"] == count, f"{stats['scheduled']} scheduled instead of {count}"
    moments = {"at 0": empty, f"at {count:,}": full, f"after {count:,} reschedules": after}
    result.details.update(
        moments=moments,
        wheel_bytes=stats.get("wheel_bytes"),
        resident_bytes=stats.get("resident_bytes"),
    )
    for moment, memory in moments.items():
        anon = memory.get("RssAnon", 0) / _MIB
        result.row(f"memory {moment}", f"{memory['VmRSS'] / _MIB:.1f} MiB (anonymous {anon:.1f})")
    for name, memory in (("bytes_per_task", full), ("bytes_per_task_rescheduled", after)):
        for key, suffix in (("VmRSS", ""), ("RssAnon", "_anon")):
            result.metric(name + suffix, (memory[key] - empty[key]) / count)
        anon_bytes = result.metrics[f"memory.{name}_anon"]
        figure = f"{result.metrics[f'memory.{name}']:.1f} B (anonymous {anon_bytes:.1f})"
        result.row(name.replace("_", " "), figure)
    result.median("fill", f"filling, {FILL_TASKS_PER_FRAME} tasks a frame", [filled])
    result.median("reschedule", f"reschedule, {IDS_PER_FRAME} ids a frame", [moved])
    return result


def recovery(context: Context) -> Result:
    """SIGKILL at n pending and some due, start again: until the ready file, until a consumer has
    its first delivery, and until the counts are right.

    The operating system's page cache is warm, as after a crash of the daemon alone.
    """
    result = Result("recovery")
    count = context.scale.pending
    folder = context.fresh_folder("tickwheel")
    with Tickwheel(folder, context.daemon_command) as daemon:
        fill(context, daemon)
        restarts(context, result, daemon, count, context.scale.restarts)
    return result


def restarts(context: Context, result: Result, daemon: Tickwheel, count: int, times: int) -> None:
    """Kill and start it several times over; the medians of what each start took."""
    starts: list[dict[str, float]] = []
    with ExitStack() as started:
        for _ in range(times):
            put_overdue(context, daemon)
            # These tasks are due at the start, so their delivery waits only for the daemon.
            time.sleep(context.scale.overdue_lead_ms / 1000)
            daemon.kill()
            daemon = Tickwheel(daemon.folder, context.daemon_command)
            started.callback(daemon.stop)
            starts.append(_until_works(context, daemon, count))
            context.say(f"{result.case}: {starts[-1]}")
    result.details["starts"] = starts
    what = {
        "ready_s": f"{count:,} pending, SIGKILL, to the ready file",
        "first_delivery_s": "to the first delivery of what is due",
        "counted_s": f"to the first stats that say {count:,} pending",
        "cpu_s": "the daemon's processor time until then",
    }
    for name, text in what.items():
        took = [start[name] for start in starts]
        middle = statistics.median(took)
        result.metric(name, middle)
        result.row(text, f"{middle:.2f} s ({min(took):.2f}-{max(took):.2f})")
    result.metric("early", sum(start["early"] for start in starts))


def _until_works(context: Context, daemon: Tickwheel, count: int) -> dict[str, float]:
    overdue = context.scale.overdue
    with closing(consumer_when_active(daemon, overdue)) as consumer:
        consumer.run(overdue, _RECOVERY_TIMEOUT_S)
    counted_s = until_pending(daemon, count)
    return {
        "ready_s": daemon.ready_s,
        "first_delivery_s": first_delivery_s(daemon, consumer),
        "counted_s": counted_s,
        "cpu_s": daemon.cpu_s(),
        "early": consumer.early,
    }


def put_overdue(context: Context, daemon: Server) -> None:
    """Some tasks that come due while the daemon is down."""
    scale = context.scale
    measured(
        daemon,
        "tickwheel_put",
        count=scale.overdue,
        tasks_per_frame=scale.tasks_per_frame,
        window=scale.frames_window,
        seed=_OVERDUE_SEED,
        due_ms=int(time.time() * 1000) + scale.overdue_lead_ms,
    )


def consumer_when_active(daemon: Server, prefetch: int) -> TickwheelConsumer:
    """As soon as the daemon takes one: one that stands by answers that it does."""
    deadline_s = time.monotonic() + _RECOVERY_TIMEOUT_S
    while True:
        try:
            return TickwheelConsumer(daemon.port, 1, prefetch)
        except WrongAnswer as error:
            if "not_active" not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(_POLL_S)


def first_delivery_s(daemon: Server, consumer: TickwheelConsumer) -> float:
    """From the start of the process to the first delivery that the consumer got."""
    started_s = time.time() - (time.perf_counter() - daemon.started_s)
    return consumer.first_s - started_s


def until_pending(daemon: Tickwheel, count: int) -> float:
    """Seconds from the start of the process to the first stats with ``count`` pending."""
    while True:
        pending = daemon.stats()["scheduled"]
        elapsed_s = time.perf_counter() - daemon.started_s
        if pending == count:
            return elapsed_s
        assert elapsed_s < _RECOVERY_TIMEOUT_S, f"{pending} pending instead of {count}"
        time.sleep(_POLL_S)


def rate_pending(context: Context) -> Result:
    """``enqueue_frame`` on an empty daemon and on one with n pending, in turn."""
    result = Result("rate_pending")
    scale = context.scale

    def enqueue(daemon: Server, seed: int) -> dict[str, Any]:
        return measured(
            daemon, "tickwheel_put", count=scale.frames, tasks_per_frame=1, window=WINDOW, seed=seed
        )

    def on_empty(seed: int) -> dict[str, Any]:
        with context.tickwheel() as empty:
            empty.quiet_memory_bytes(context.scale.quiet_s, patience_s=5.0)
            return enqueue(empty, seed)

    with context.tickwheel() as full:
        fill(context, full)
        full.quiet_memory_bytes(context.scale.quiet_s)

        def on_full(seed: int) -> dict[str, Any]:
            return enqueue(full, seed)

        rounds_of = alternate(context, result.case, {"at_0": on_empty, "at_n": on_full})
        pending = full.stats()["scheduled"]
    result.details["pending_at_end"] = pending
    at_0 = result.median("at_0", "at 0 pending", rounds_of["at_0"])
    what = f"at {scale.pending:,} pending and more"
    at_n = result.median("at_n", what, rounds_of["at_n"])
    result.ratio("ratio", f"at {scale.pending:,} / at 0", at_n / at_0)
    return result
