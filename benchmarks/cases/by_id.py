"""Requests about tasks by their ids, at random among a million that are pending."""

from __future__ import annotations

from typing import Any

from benchmarks.cases.pending import IDS_PER_FRAME, fill
from benchmarks.context import Context, Result, measured, rates, server_us

FRAMES_UNANSWERED = 4
_SEED = 300
# In this order: what is run now is delivered and nacked, what is cancelled was moved before.
VERBS = ("lookup", "reschedule", "run_now", "nack", "cancel")


def random_access(context: Context) -> Result:
    """LOOKUP, RESCHEDULE, RUN_NOW, NACK and CANCEL; each round takes other tasks."""
    result = Result("random_access")
    scale = context.scale
    count = scale.by_id
    by_verb: dict[str, list[dict[str, Any]]] = {verb: [] for verb in VERBS}
    with context.tickwheel() as daemon:
        ids_file = daemon.folder / "ids"
        fill(context, daemon, ids_file)
        daemon.quiet_memory_bytes(scale.quiet_s)
        frames = {"ids_per_frame": IDS_PER_FRAME, "window": FRAMES_UNANSWERED, "seed": _SEED}

        def by_id(verb: str, start: int) -> dict[str, Any]:
            return measured(
                daemon,
                "by_id",
                verb=verb,
                ids_file=str(ids_file),
                start=start,
                count=count,
                **frames,
            )

        for number in range(scale.by_id_rounds):
            # Two shares of the ids a round: one stays pending and is cancelled, one is run.
            stays, runs = 2 * number * count, (2 * number + 1) * count
            for verb in VERBS:
                if verb == "nack":
                    figures = measured(daemon, "nack", count=count, **frames)
                else:
                    figures = by_id(verb, runs if verb == "run_now" else stays)
                by_verb[verb].append(figures)
                context.say(f"{result.case}: {verb}: {rates([figures])[0]:,.0f}/s")
    for verb, rounds in by_verb.items():
        result.median(verb, f"{verb}, {IDS_PER_FRAME} ids a frame", rounds)
        result.metric(f"{verb}_cpu_s_per_100k", server_us(rounds) / 10)
    return result
