"""Cases that take minutes, or gigabytes of disk: ten million pending, a million due at once, and a
day's mix of topics, groups and failures. They run only when they are named."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from benchmarks.cases.burst import due_at_once, in_time, raw_burst
from benchmarks.cases.lateness import lateness_at
from benchmarks.cases.pending import restarts
from benchmarks.context import Contestant, Context, Result, alternate, measured
from benchmarks.load import Load
from benchmarks.scale import BODY_BYTES, RUN_TIMEOUT_S

SPAN_S = 30 * 86_400
LATENESS_RATE = 2_000
TOPICS, GROUPS, NACK_SHARE, RATE = 20, 3, 0.05, 10_000
"""Parameters of the mixed day. RATE is tasks per second over all topics; every group gets each."""
DELAY_S = (1.0, 3.0)
_SEED = 400
_SAMPLES = 40
_LIMIT_S = 900


def ten_million(context: Context) -> Result:
    """Filled through the client, due over 30 days: memory, disk, lateness beside it, and a start
    after SIGKILL."""
    result = Result("ten_million")
    scale = context.scale
    count = scale.long_bulk
    with context.tickwheel() as daemon:
        empty = daemon.quiet_memory_bytes(scale.quiet_s)
        filled = measured(
            daemon,
            "client_bulk",
            limit_s=_LIMIT_S,
            count=count,
            per_call=scale.long_per_call,
            in_flight=scale.long_in_flight,
            seed=_SEED,
            columns=True,
            span_s=SPAN_S,
        )
        full = daemon.quiet_memory_bytes(scale.quiet_s)
        stored = sum(path.stat().st_size for path in daemon.folder.glob("store.db*"))
        calls = f"{scale.long_per_call:,} a call, {scale.long_in_flight} in flight"
        result.median("fill", f"filling, client, enqueue_columns, {calls}", [filled])
        bytes_per_task = (full["VmRSS"] - empty["VmRSS"]) / count
        result.metric("bytes_per_task", bytes_per_task)
        result.row("memory a task", f"{bytes_per_task:.1f} B")
        result.ratio("disk", "bytes on disk / bytes of bodies", stored / (count * BODY_BYTES))
        sample = lateness_at(context, daemon, LATENESS_RATE)
        result.details["lateness"] = sample
        for side in ("daemon", "client"):
            late = sample[f"{side}_late_ms"]
            result.metric(f"{side}_p99_ms", late["p99"])
            what = f"lateness at {LATENESS_RATE:,} a second beside it, {side}'s clock"
            result.row(what, ", ".join(f"{name} {ms:.1f} ms" for name, ms in late.items()))
        restarts(context, result, daemon, count, scale.long_rounds)
        result.metric("early", result.metrics[f"{result.case}.early"] + sample["early"])
    return result


def due_million(context: Context) -> Result:
    """A million due at one moment through raw consumers, beside the burst of the usual size; and
    how long PING and STATS take on another connection meanwhile."""
    result = Result("due_million")
    scale = context.scale

    def million(seed: int) -> dict[str, Any]:
        return in_time(scale.due_million_lead_s, partial(million_ahead, seed))

    def million_ahead(seed: int, lead_s: float) -> dict[str, Any]:
        count = scale.due_million
        with due_at_once(context, seed, count, lead_s) as (daemon, due_s):
            arguments = {"port": daemon.port, "count": count, "due_ms": int(due_s * 1000)}
            with Load("watch", **arguments) as watch:
                watch.start()
                return {**raw_burst(daemon, count, due_s), "watched": watch.result()}

    def burst(seed: int) -> dict[str, Any]:
        return in_time(scale.burst_lead_s, partial(burst_ahead, seed))

    def burst_ahead(seed: int, lead_s: float) -> dict[str, Any]:
        with due_at_once(context, seed, scale.burst, lead_s) as (daemon, due_s):
            return raw_burst(daemon, scale.burst, due_s)

    contestants: dict[str, Contestant] = {"burst": burst, "million": million}
    rounds_of = alternate(context, result.case, contestants, scale.due_million_rounds)
    rate = {
        name: result.median(name, f"raw, {rounds[0]['count']:,} due at once", rounds)
        for name, rounds in rounds_of.items()
    }
    result.ratio("ratio", "due at once: many / the usual burst", rate["million"] / rate["burst"])
    rounds = rounds_of["million"]
    result.metric("early", sum(one_round["early"] for one_round in rounds))
    for kind in ("ping", "stats"):
        late = [one_round["watched"][f"{kind}_ms"] for one_round in rounds]
        p99 = statistics.median(entry["p99"] for entry in late)
        result.metric(f"{kind}_p99_ms", p99)
        largest = max(entry["max"] for entry in late)
        result.row(f"{kind.upper()} meanwhile", f"p99 {p99:.1f} ms, max {largest:.1f} ms")
    return result


def mixed_day(context: Context) -> Result:
    """20 topics with 3 groups each, one in twenty nacked once, 10,000 enqueued and due a second."""
    result = Result("mixed_day")
    seconds = context.scale.mixed_s
    with context.tickwheel() as daemon:
        producing = {
            "rate": RATE,
            "seconds": seconds,
            "topics": TOPICS,
            "delay_s": DELAY_S,
            "seed": _SEED,
        }
        consuming = {
            "count": round(RATE * seconds),
            "topics": TOPICS,
            "groups": GROUPS,
            "nack_share": NACK_SHARE,
            "seconds": seconds,
            "seed": _SEED,
        }
        limit_s = int(seconds) + RUN_TIMEOUT_S
        with (
            Load("mixed_consume", limit_s=limit_s, port=daemon.port, **consuming) as consumer,
            Load("mixed_produce", limit_s=limit_s, port=daemon.port, **producing) as producer,
        ):
            cpu_s = daemon.cpu_s()
            consumer.start()
            producer.start()
            samples = []
            for _ in range(_SAMPLES):
                time.sleep(seconds / _SAMPLES)
                samples.append(daemon.memory_bytes()["VmRSS"])
            produced, consumed = producer.result(), consumer.result()
        server_cpu_s = daemon.cpu_s() - cpu_s
    client_cpu_s = produced["client_cpu_s"] + consumed["client_cpu_s"]
    figures = {**produced, "server_cpu_s": server_cpu_s, "client_cpu_s": client_cpu_s}
    result.details.update(produced=produced, consumed=consumed, memory_bytes=samples)
    what = f"{TOPICS} topics, {GROUPS} groups each, {NACK_SHARE:.0%} nacked, {seconds:,.0f} s"
    result.median("rate", what, [figures])
    late = consumed["late_ms"]
    for name, value in late.items():
        result.metric(f"late_{name}_ms", value)
    result.row("lateness", ", ".join(f"{name} {value:.0f} ms" for name, value in late.items()))
    # The second quarter against the last: at first caches fill that have a size.
    quarter = _SAMPLES // 4
    begin, end = (
        statistics.median(some) for some in (samples[quarter : 2 * quarter], samples[-quarter:])
    )
    result.metric("memory_growth", end / begin)
    mib = 1024 * 1024
    result.row(
        "memory in the second quarter, in the last", f"{begin / mib:.0f}, {end / mib:.0f} MiB"
    )
    for name in ("early", "refused", "nacked"):
        result.metric(name, consumed[name])
    result.row("the producer was behind by at most", f"{produced['behind_ms']:.0f} ms")
    return result
