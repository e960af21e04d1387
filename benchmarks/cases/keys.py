"""What a key costs: enqueues, memory and recovery with a key for each task, beside the same
without; and requests by key at random."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks.by_id_jobs import KEYS_UNANSWERED
from benchmarks.cases.pending import FILL_TASKS_PER_FRAME, FILL_WINDOW, IDS_PER_FRAME, restarts
from benchmarks.context import Context, Result, alternate, measured
from benchmarks.scale import WINDOW
from benchmarks.servers import Server, Tickwheel

_SEED = 400
_REFILL_SEED = 450
_BY_KEY_SEED = 500
_KINDS = (False, True)
"""Without keys; each with a key."""


def keys(context: Context) -> Result:
    """Alternating rounds for the rates; two daemons side by side for memory and recovery."""
    result = Result("keys")
    _rates(context, result)
    with ExitStack() as stack:
        daemons = {
            keyed: stack.enter_context(
                Tickwheel(context.fresh_folder("tickwheel"), context.daemon_command)
            )
            for keyed in _KINDS
        }
        _memory(context, result, daemons)
        for keyed, daemon in daemons.items():
            part = Result("keyed" if keyed else "plain")
            restarts(context, part, daemon, context.scale.pending, context.scale.restarts)
            result.details[f"starts_{part.case}"] = part.details["starts"]
    _compare_starts(context, result)
    return result


def _put(
    daemon: Server, count: int, per_frame: int, window: int, seed: int, *, keyed: bool
) -> dict[str, Any]:
    return measured(
        daemon,
        "tickwheel_put",
        count=count,
        tasks_per_frame=per_frame,
        window=window,
        seed=seed,
        ids_file=str(daemon.folder / "ids"),
        keyed=keyed,
    )


def _rates(context: Context, result: Result) -> None:
    scale = context.scale
    loads = {
        "frame": (scale.frames, 1, WINDOW, "one task a frame"),
        "batched": (
            scale.batched,
            scale.tasks_per_frame,
            scale.frames_window,
            f"{scale.tasks_per_frame} tasks a frame",
        ),
    }
    for name, (count, per_frame, window, what) in loads.items():

        def enqueue(
            seed: int, keyed: bool, count: int = count, per_frame: int = per_frame,
            window: int = window,
        ) -> dict[str, Any]:  # fmt: skip
            with context.tickwheel() as daemon:
                return _put(daemon, count, per_frame, window, seed, keyed=keyed)

        rounds_of = alternate(
            context,
            f"{result.case} {name}",
            {
                "plain": lambda seed: enqueue(seed, keyed=False),
                "keyed": lambda seed: enqueue(seed, keyed=True),
            },
        )
        plain = result.median(f"{name}_plain", f"{what}, without keys", rounds_of["plain"])
        keyed = result.median(f"{name}_keyed", f"{what}, each with a key", rounds_of["keyed"])
        result.ratio(f"{name}_ratio", "with keys / without", keyed / plain)


def _memory(context: Context, result: Result, daemons: dict[bool, Tickwheel]) -> None:
    """After filling; and after all of these were cancelled, as many were made again, and these
    were rescheduled. Then requests by key, whose reads take memory of their own for a while."""
    scale, count = context.scale, context.scale.pending
    moments: dict[str, dict[bool, int]] = {"filled": {}, "churned": {}}
    for keyed, daemon in daemons.items():
        empty = daemon.quiet_memory_bytes(scale.quiet_s)["VmRSS"]
        _put(daemon, count, FILL_TASKS_PER_FRAME, FILL_WINDOW, _SEED, keyed=keyed)
        moments["filled"][keyed] = daemon.quiet_memory_bytes(scale.quiet_s)["VmRSS"] - empty
        by_id = {
            "ids_file": str(daemon.folder / "ids"),
            "ids_per_frame": IDS_PER_FRAME,
            "window": FILL_WINDOW,
            "count": count,
            "seed": _SEED,
        }
        measured(daemon, "by_id", verb="cancel", **by_id)
        _put(daemon, count, FILL_TASKS_PER_FRAME, FILL_WINDOW, _REFILL_SEED, keyed=keyed)
        measured(daemon, "by_id", verb="reschedule", **by_id)  # the ids of the last filling
        moments["churned"][keyed] = daemon.quiet_memory_bytes(scale.quiet_s)["VmRSS"] - empty
        assert daemon.stats()["scheduled"] == count
    _by_key(context, result, daemons[True])
    for moment, grown in moments.items():
        extra = (grown[True] - grown[False]) / count
        result.metric(f"bytes_a_key_{moment}", extra)
        both = f"{grown[True] / count:.1f} - {grown[False] / count:.1f}"
        result.row(f"memory of a key, {moment}", f"{extra:.1f} B a task ({both})")


def _by_key(context: Context, result: Result, daemon: Tickwheel) -> None:
    count = context.scale.pending
    for verb in ("lookup", "cancel"):
        wanted = {"fill_seed": _REFILL_SEED, "fill_count": count, "seed": _BY_KEY_SEED}
        figures = measured(daemon, "by_key", verb=verb, count=context.scale.by_id, **wanted)
        what = f"{verb} by key, one a frame, {KEYS_UNANSWERED} unanswered"
        result.median(f"{verb}_key", what, [figures])
    _put(daemon, context.scale.by_id, FILL_TASKS_PER_FRAME, FILL_WINDOW, _REFILL_SEED + 50,
         keyed=True)  # fmt: skip


def _compare_starts(context: Context, result: Result) -> None:
    for name, what in (("counted_s", "all loaded"), ("first_delivery_s", "first delivery")):
        middle = {
            kind: statistics.median(detail[name] for detail in result.details[f"starts_{kind}"])
            for kind in ("plain", "keyed")
        }
        result.metric(f"{name}_keyed", middle["keyed"])
        result.ratio(f"{name}_ratio", f"start, {what}: with keys / without",
                     middle["keyed"] / middle["plain"])  # fmt: skip
        result.row(f"start, {what}", f"{middle['keyed']:.2f} s with keys, {middle['plain']:.2f} s"
                   " without")  # fmt: skip
