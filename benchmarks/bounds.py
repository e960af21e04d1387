"""The bounds that a full run has to hold, in one table, and their check.

A bound names a metric of a case. Its figure is compared as measured, not rounded. Bounds find
regressions: they leave room for slower days of the machine that docs/benchmarks.md measured, about
half for absolute rates. That page has the figures, and the reasons for slow ones.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Relation = Literal[">=", "<=", "<", "=="]
_COMPARE = {">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq}
Verdict = Literal["holds", "broken", "not measured"]


@dataclass(frozen=True)
class Bound:
    """``metric relation limit``. A quick run also checks the bounds that hold at any scale."""

    metric: str
    relation: Relation
    limit: float
    what: str
    any_scale: bool = False
    peer: str | None = None
    """The peer of the comparison, if any."""
    store: str | None = None
    """The only store with this bound; None for every store with the case."""

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        if self.metric not in metrics:
            return "not measured"
        held = _COMPARE[self.relation](metrics[self.metric], self.limit)
        return "holds" if held else "broken"


def _peer(metric: str, limit: float, what: str, peer: str = "beanstalkd") -> Bound:
    return Bound(metric, ">=", limit, what, peer=peer, store="sqlite")


def _queues(metric: str, what: str) -> Bound:
    return Bound(metric, ">=", 2.0, what, peer="queues", store="postgresql")


BOUNDS: tuple[Bound, ...] = (
    _peer("enqueue_frame.ratio_no_log", 1.7, "durable enqueue, one a frame / put, no log"),
    _peer("enqueue_frame.ratio_log", 1.5, "durable enqueue, one a frame / put, default log"),
    _peer("enqueue_frame.ratio_log_each", 12.0, "durable enqueue, one a frame / put, fsync each"),
    _peer("enqueue_batched.ratio_no_log", 2.0, "durable enqueue, batched / put, no log"),
    Bound("enqueue_sequential.p50_over_floor", "<=", 2.7, "one enqueue / (one sync + one echo)"),
    _peer("enqueue_sequential.ratio_log_each", 0.25, "one enqueue after another / put, fsync each"),
    _peer("bulk_client.ratio_columns", 1.0, "bulk, enqueue_columns / COPY", "PostgreSQL"),
    _peer("bulk_client_long.ratio_columns", 1.2, "long bulk, the same / COPY", "PostgreSQL"),
    Bound("single_client.rate_200", ">=", 100_000, "200 that await enqueue(), a second"),
    Bound("single_client.rate_1000", ">=", 100_000, "1,000 that await enqueue(), a second"),
    _peer("burst.ratio_no_log", 3.0, "burst with durable acks / reserve + delete, no log"),
    _peer("burst.ratio_postgres", 0.65, "burst with durable acks / fetch and delete", "PostgreSQL"),
    Bound("burst.early", "==", 0, "early in the burst", any_scale=True),
    Bound("burst_client.ratio_ack_nowait", ">=", 0.5, "burst, client's ack_nowait / raw"),
    Bound("burst_client.ratio_await_ack", ">=", 0.27, "burst, client's await ack / raw"),
    Bound("burst_client.ratio_worker", ">=", 0.5, "burst, a Worker / raw"),
    Bound("push.p99_ms", "<=", 10.0, "pushed at 1,000 a second, p99 ms late"),
    Bound("push.early", "==", 0, "early pushes", any_scale=True),
    Bound("virtual_week.handled_s", "<=", 20.0, "100,000 handled in a virtual week, s"),
    Bound("virtual_week.unread_s", "<=", 60.0, "1 M without a consumer in one, s"),
    Bound("history.ratio", ">=", 0.95, "delivery with a history / without"),
    Bound("lateness.daemon_p99_ms_at_2000", "<", 5.0, "lateness p99 at 2,000 a second, ms"),
    Bound("lateness.early", "==", 0, "early at a steady rate", any_scale=True),
    Bound("steady.late_p99_ms_at_2000", "<=", 2.0, "steady: late p99 at 2,000 a second, ms"),
    Bound("steady.early", "==", 0, "early in an ordinary minute", any_scale=True),
    Bound("steady_history.early", "==", 0, "the same with a history", any_scale=True),
    Bound("steady_worker.early", "==", 0, "the same with a worker", any_scale=True),
    Bound("memory.bytes_per_task", "<=", 64.0, "memory a pending task, B"),
    Bound("memory.bytes_per_task_rescheduled", "<=", 55.0, "the same after each was moved, B"),
    Bound("random_access.reschedule", ">=", 20_000, "reschedule at random, ids a second"),
    Bound("random_access.cancel", ">=", 25_000, "cancel at random, ids a second"),
    Bound("random_access.run_now", ">=", 13_000, "run now at random, ids a second"),
    Bound("random_access.nack", ">=", 16_000, "nack at random, ids a second"),
    Bound("random_access.lookup", ">=", 17_000, "look up at random, ids a second"),
    Bound("recovery.first_delivery_s", "<=", 1.0, "first delivery after SIGKILL at 1 M, s"),
    Bound("recovery.counted_s", "<", 5.0, "recovery of 1 M after SIGKILL, s"),
    Bound("recovery.early", "==", 0, "early after recovery", any_scale=True),
    Bound("rate_pending.ratio", ">=", 0.8, "enqueue rate at 1 M pending / at 0"),
    Bound("keys.frame_ratio", ">=", 0.5, "enqueue with keys / without, one a frame"),
    Bound("keys.batched_ratio", ">=", 0.45, "the same, many a frame"),
    Bound("keys.bytes_a_key_filled", "<=", 40.0, "memory of a key, B"),
    Bound("keys.bytes_a_key_churned", "<=", 40.0, "the same after cancels and reschedules, B"),
    Bound("keys.counted_s_ratio", "<=", 1.7, "recovery of 1 M with keys / without"),
    Bound("order.ordered_ratio", ">=", 0.33, "burst with 10,000 order keys / without"),
    Bound("order.bytes_a_key", "<=", 40.0, "memory of an order key with a ready task, B"),
    Bound("order.early", "==", 0, "early with order keys", any_scale=True),
    Bound("order.repeated", "==", 0, "repeated with order keys", any_scale=True),
    Bound("filters.ratio", ">=", 0.9, "burst with a filter that half of the tasks pass / without"),
    Bound("filters.early", "==", 0, "early with a filter", any_scale=True),
    Bound("http.ratio_nothing", ">=", 0.45, "single enqueues over HTTP / its stack for nothing"),
    Bound("http.lines", ">=", 50_000, "lines (NDJSON) over HTTP, a second"),
    Bound("http.tcp_p99_ms", "<", 5.0, "lateness p99 over TCP beside HTTP, ms"),
    Bound("http.early", "==", 0, "early beside HTTP", any_scale=True),
    Bound("forward.late_p99_ms_at_20000", "<=", 10.0, "20,000 a second to a Redis stream: p99, ms"),
    Bound("forward.early", "==", 0, "early to a Redis stream", any_scale=True),
    Bound("shards.ratio_enqueue", ">=", 1.7, "enqueue, one a frame, 2 shards / one daemon"),
    Bound("shards.ratio_burst", ">=", 1.55, "burst, 2 shards / one daemon"),
    Bound("shards.ratio_client_enqueue", ">=", 1.0, "one client's enqueue(), the same"),
    Bound("shards.ratio_client_burst", ">=", 1.0, "one client's burst, the same"),
    Bound("shards.early", "==", 0, "early from shards", any_scale=True),
    Bound("held_loop.session_row_ms", "<=", 50.0, "loop held: a session's row, ms"),
    Bound("held_loop.transactions_page_ms", "<=", 50.0, "loop held: a page of transactions, ms"),
    Bound("held_loop.histories_ms", "<=", 50.0, "loop held: histories of tasks, ms"),
    Bound("held_loop.clock_ahead_ms", "<=", 50.0, "loop held: schedules, a clock ahead, ms"),
    Bound("held_loop.rare_cron_ms", "<=", 50.0, "loop held: a rare cron, ms"),
    Bound("held_loop.flood_ms", "<=", 50.0, "loop held: a flood of requests, ms"),
    Bound("held_loop.bulk_ms", "<=", 50.0, "loop held: eighty bulk operations, ms"),
    Bound("ten_million.fill", ">=", 190_000, "10 M: filled through the client, a second"),
    Bound("ten_million.bytes_per_task", "<=", 20.0, "10 M: memory a pending task, B"),
    Bound("ten_million.disk", "<=", 1.45, "10 M: bytes on disk / bytes of bodies"),
    Bound("ten_million.client_p99_ms", "<=", 5.0, "10 M: lateness p99 at 2,000 a second, ms"),
    Bound("ten_million.first_delivery_s", "<=", 4.0, "10 M: first delivery after SIGKILL, s"),
    Bound("ten_million.counted_s", "<=", 30.0, "10 M: all counted after SIGKILL, s"),
    Bound("ten_million.early", "==", 0, "10 M: early", any_scale=True),
    Bound("due_million.ratio", ">=", 0.6, "1 M due at once / the usual burst"),
    Bound("due_million.ping_p99_ms", "<", 20.0, "PING p99 meanwhile, ms"),
    Bound("due_million.stats_p99_ms", "<", 150.0, "STATS p99 meanwhile, ms"),
    Bound("due_million.early", "==", 0, "early when 1 M are due", any_scale=True),
    Bound("mixed_day.rate", ">=", 9_900, "a mixed day: enqueued a second, of 10,000"),
    Bound("mixed_day.late_max_ms", "<=", 100.0, "a mixed day: largest lateness, ms"),
    Bound("mixed_day.memory_growth", "<=", 1.1, "a mixed day: memory, last / second quarter"),
    Bound("mixed_day.early", "==", 0, "a mixed day: early", any_scale=True),
    Bound("mixed_day.refused", "==", 0, "a mixed day: acks refused", any_scale=True),
    Bound(
        "redis_enqueue.ratio_batched",
        ">=",
        3.0,
        "durable enqueue / ZADD + HSET through redis-py",
        peer="redis-py",
    ),
    Bound(
        "redis_bulk_client.ratio_columns",
        ">=",
        2.0,
        "bulk, enqueue_columns / redis.asyncio without its time-out",
        peer="redis-py",
    ),
    Bound("redis_recovery.loaded_s", "<", 15.0, "recovery of 1 M after SIGKILL, s"),
    Bound("redis_recovery.early", "==", 0, "early after recovery", any_scale=True),
    Bound("redis_memory_no_mirror.bytes_per_task", "<=", 64.0, "no mirror: a pending task, B"),
    Bound(
        "redis_takeover.no_mirror_first_delivery_s",
        "<",
        1.0,
        "no mirror: first delivery after the lease's end at 1 M, s",
    ),
    Bound("redis_takeover.early", "==", 0, "early after a takeover", any_scale=True),
    Bound(
        "redis_ten_million.no_mirror_first_delivery_s",
        "<=",
        1.0,
        "no mirror: first delivery after the lease's end at 10 M, s",
    ),
    Bound(
        "redis_ten_million.no_mirror_loaded_s",
        "<=",
        15.0,
        "no mirror: all loaded after the lease's end at 10 M, s",
    ),
    Bound("redis_ten_million.early", "==", 0, "10 M on Redis: early", any_scale=True),
    _queues("bulk_client.ratio_queues", "bulk, enqueue_columns / the fastest other queue"),
    _queues("burst_client.ratio_queues", "burst, a Worker / the fastest other queue"),
    Bound("postgres_steady.late_p99_ms", "<=", 10.0, "transaction open, 2,000 a second: p99, ms"),
    Bound("postgres_steady.dead", "==", 0, "transaction open: dead tasks", any_scale=True),
    Bound("postgres_steady.early", "==", 0, "transaction open: early", any_scale=True),
    Bound("postgres_long.late_p99_ms", "<=", 10.0, "the same for ten minutes: p99, ms"),
    Bound("postgres_long.dead", "==", 0, "ten minutes: dead tasks", any_scale=True),
    Bound("postgres_long.growth", "<=", 1.1, "ten minutes: size of tables, last / second quarter"),
    Bound("postgres_long.early", "==", 0, "ten minutes: early", any_scale=True),
)


@dataclass(frozen=True)
class Judged:
    """A bound with its figure, or None without one."""

    bound: Bound
    measured: float | None
    verdict: Verdict


def judge(
    metrics: Mapping[str, float], cases: Iterable[str], *, full: bool, store: str = "sqlite"
) -> list[Judged]:
    """Return the judged bounds of the cases. A quick run has only bounds that hold at any scale."""
    asked = frozenset(cases)
    return [
        Judged(bound, metrics.get(bound.metric), bound.judge(metrics))
        for bound in BOUNDS
        if bound.metric.split(".")[0] in asked
        and bound.store in (None, store)
        and (full or bound.any_scale)
    ]


def failed(judged: Iterable[Judged], *, peers_wanted: bool) -> list[Judged]:
    """Return the bounds that make ``--check`` fail: broken bounds, and bounds that were not
    measured, except comparisons with unwanted peers."""
    return [
        judgement
        for judgement in judged
        if judgement.verdict == "broken"
        or (judgement.verdict == "not measured" and (peers_wanted or judgement.bound.peer is None))
    ]
