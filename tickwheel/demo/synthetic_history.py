"""Synthetic history: segments like those of a busy daemon, generated from a seed.

It is used to try out and measure reports. This module knows the names of segments, but no daemon,
and reads no clock. Invariants:

* Every line contains ``"synthetic": true``, so that figures from it are not mistaken for real ones.
* The same arguments generate the same bytes.
* Memory contains pending tasks, not the whole history. Hours are generated in order, and a task
  waits until the hour in which it is due.
"""

from __future__ import annotations

import gzip
import math
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Self

from tickwheel.history.segments import DAY_MS, HOUR_MS, PARTIAL_PREFIX, SegmentName, hour_folder

NODE = "synthetic-1"
SHARD = 0
RETRY_BASE_MS, RETRY_CAP_MS, RETRY_JITTER = 10_000, 7_200_000, 0.1
LEASE_MS = 30_000
CANCELLED, RESCHEDULED = 0.01, 0.004
LEASE_OVER, RELEASED, REQUEUED = 0.0008, 0.0006, 0.3
STICKY = 0.6
"""The probability that a delivery fails again after a failure."""
RESTART_EVERY_DAYS = 3
"""Days between restarts of the daemon. Each restart begins an epoch."""
SLOW_TIMES_A_DAY = 1.2
"""How often per day a slow consumer falls behind."""
GZIP_LEVEL = 1
WAITING_SEGMENTS_MAX = 2
"""Maximum segments that wait for compression, which bounds the memory."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a history. ``start_ms`` is midnight of the first day, in UTC."""

    tasks: int
    days: int
    seed: int
    start_ms: int
    segment_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.days < 1 or self.start_ms % HOUR_MS:
            raise ValueError("tasks and days must be at least 1, and start_ms a full hour in UTC")


@dataclass
class GeneratedHistory:
    """Counts of a generated history. ``events`` contains the number of lines by event."""

    events: dict[str, int]
    segments: int = 0
    bytes: int = 0

    @property
    def lines(self) -> int:
        return sum(self.events.values())


def generate(
    plan: Plan, out: Path, on_hour: Callable[[int, int], None] | None = None
) -> GeneratedHistory:
    """Write the history below ``out``. Call ``on_hour(hours done, all hours)`` after each hour."""
    generator = _Generator(plan)
    history = GeneratedHistory(generator.counts)
    hours = plan.days * 24
    with SegmentFiles(out, plan.segment_bytes, history) as files:
        for hour in range(hours):
            start_ms = plan.start_ms + hour * HOUR_MS
            epoch = 1 + hour // (24 * RESTART_EVERY_DAYS)
            lines = generator.hour(hour, last=hour == hours - 1)
            files.hour(start_ms, epoch, lines)
            if on_hour is not None:
                on_hour(hour + 1, hours)
    return history


class _Generator:
    """Generates events by hour, as pairs of time and line. The end of the line, with ``seq``, is
    added later."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._end_ms = plan.start_ms + plan.days * DAY_MS
        self._events: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._pending: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._next = 0
        self.counts: dict[str, int] = defaultdict(int)
        self._slow_times = {
            (load.topic, group.name): self._make_slow_times(group)
            for load in LOADS
            for group in load.groups
        }
        weight = sum(load.weight(hour) for load in LOADS for hour in range(24))
        self._per_weight = plan.tasks / plan.days / weight
        self._carry = [0.0] * len(LOADS)

    def hour(self, hour: int, *, last: bool) -> list[tuple[int, str]]:
        """Return all events of one hour, in the order of their times."""
        start_ms = self._plan.start_ms + hour * HOUR_MS
        events = self._events[hour]
        if hour % (24 * RESTART_EVERY_DAYS) == 0:
            self._daemon(events, start_ms, "started", hour == 0)
        for index, load in enumerate(LOADS):
            wanted = load.weight(hour % 24) * self._per_weight + self._carry[index]
            self._carry[index] = wanted - int(wanted)
            self._enqueue(start_ms, index, load, int(wanted))
        if last:  # the remainder of rounding
            self._enqueue(start_ms, 0, LOADS[0], self._plan.tasks - self._next)
        for due_ms, task, index in self._pending.pop(hour, ()):
            for group in LOADS[index].groups:
                self._deliver(LOADS[index], group, task, due_ms)
        if last or (hour + 1) % (24 * RESTART_EVERY_DAYS) == 0:
            self._daemon(events, start_ms + HOUR_MS - 1, "stopped", True)
        del self._events[hour]
        events.sort(key=itemgetter(0))
        return events

    def _put(self, at_ms: int, event: str, text: str) -> None:
        if at_ms < self._end_ms:
            self.counts[event] += 1
            self._events[(at_ms - self._plan.start_ms) // HOUR_MS].append(
                (at_ms, f'{{"v":1,"time_ms":{at_ms},"event":"{event}",{text}')
            )

    def _daemon(self, events: list[tuple[int, str]], at_ms: int, event: str, clean: bool) -> None:
        self.counts[event] += 1
        text = "true" if clean else "false"
        events.append((at_ms, f'{{"v":1,"time_ms":{at_ms},"event":"{event}","clean":{text}'))

    # --- producers --------------------------------------------------------------------------

    def _enqueue(self, start_ms: int, index: int, load: Load, count: int) -> None:
        rng, uniform = self._random, self._random.random
        span_ms = load.burst_ms or HOUR_MS
        low, ratio = load.delay_min_ms, load.delay_max_ms / load.delay_min_ms
        head = f'"topic":"{load.topic}","producer":"'
        pending, begin_ms, put = self._pending, self._plan.start_ms, self._put
        for _ in range(count):
            at_ms = start_ms + int(uniform() * span_ms)
            due_ms = at_ms + int(low * ratio ** uniform())
            if load.on_minute:
                due_ms += -due_ms % 60_000
            self._next += 1
            task = (at_ms << 20) | (self._next & 0xFFFFF)
            producer = load.producers[int(uniform() * len(load.producers))]
            text = f'"task_id":"{task}",{head}{producer}","due_ms":{due_ms}'
            if load.keys:
                # Squaring makes a few keys busier than others.
                text += f',"key":"{load.key}-{int(uniform() ** 2 * load.keys)}"'
            put(at_ms, "enqueued", text)
            if uniform() < CANCELLED + RESCHEDULED and due_ms - at_ms > 2_000:
                changed_ms = at_ms + int(uniform() * (due_ms - at_ms - 1_000)) + 1
                if rng.random() < CANCELLED / (CANCELLED + RESCHEDULED):
                    put(changed_ms, "cancelled", f'"task_id":"{task}","topic":"{load.topic}"')
                    continue
                due_ms += int(uniform() * HOUR_MS)
                text = f'"task_id":"{task}","topic":"{load.topic}","due_ms":{due_ms}'
                put(changed_ms, "rescheduled", text)
            pending[(due_ms - begin_ms) // HOUR_MS].append((due_ms, task, index))

    # --- deliveries -------------------------------------------------------------------------

    def _deliver(self, load: Load, group: Group, task: int, due_ms: int) -> None:
        """Generate all attempts of a task in a group, until the task or the history ends."""
        rng, put = self._random, self._put
        late_ms = self._late(load, group, due_ms)
        names = f'"task_id":"{task}","topic":"{load.topic}","group":"{group.name}"'
        if load.ttl_ms and late_ms > load.ttl_ms:
            put(due_ms + load.ttl_ms, "expired", f'{names},"reason":"ttl over"')
            return
        at_ms, attempt, failing = due_ms + late_ms, 1, group.failing
        while at_ms < self._end_ms:
            worker = group.subscribers[int(rng.random() * len(group.subscribers))]
            tail = f'{names},"attempt":{attempt},"subscriber":"{worker}"'
            late = f',"lateness_ms":{at_ms - due_ms}' if attempt == 1 else ""
            put(at_ms, "delivered", f'{tail},"due_ms":{due_ms}{late}')
            took_ms = int(group.ack_ms * math.exp(rng.gauss(0.0, 0.6))) + 1
            draw = rng.random()
            if failing <= draw < 1 - LEASE_OVER - RELEASED:
                put(at_ms + took_ms, "acked", f'{tail},"ack_ms":{took_ms}')
                return
            if draw >= 1 - RELEASED:
                put(at_ms + took_ms, "released", tail)
                at_ms += took_ms + 5
                continue
            failed = draw < failing
            at_ms += took_ms if failed else LEASE_MS
            reason = rng.choice(group.reasons) if failed else "lease over"
            if attempt > group.retries:
                put(at_ms, "dead", f'{names},"attempt":{attempt},"reason":"{reason}"')
                if rng.random() > REQUEUED:
                    return
                at_ms += int(rng.expovariate(1 / (2 * HOUR_MS))) + 60_000
                put(at_ms, "requeued", names)
                # The cause of the failure was repaired before the requeue.
                due_ms, failing = at_ms, group.failing
            elif failed:
                delay_ms = min(RETRY_BASE_MS << (attempt - 1), RETRY_CAP_MS)
                due_ms = at_ms + int(delay_ms * (1 + RETRY_JITTER * (2 * rng.random() - 1)))
                put(at_ms, "nacked", f'{tail},"due_ms":{due_ms},"reason":"{reason}"')
                # A task that has failed is likely to fail again.
                failing = max(group.failing, STICKY)
            else:
                put(at_ms, "lease_over", f'{tail},"reason":"{reason}"')
                due_ms = at_ms
            attempt += 1
            at_ms = due_ms + int(rng.expovariate(0.6)) + 1

    def _late(self, load: Load, group: Group, due_ms: int) -> int:
        """Return the lateness of a delivery in ms, due to the daemon, a burst or a slow
        consumer."""
        rng = self._random
        late = rng.expovariate(0.7)
        if load.burst_ms or load.on_minute:
            late += rng.random() * load.crowd_ms
        elif rng.random() < 0.002:
            late += rng.expovariate(1 / 60)
        for begin_ms, end_ms, slope in self._slow_times[load.topic, group.name]:
            if begin_ms <= due_ms < end_ms:
                late += slope * min(due_ms - begin_ms, end_ms - due_ms)
        return int(late)

    def _make_slow_times(self, group: Group) -> list[tuple[int, int, float]]:
        """Return when consumers of this group are slow: (start, end, growth of lateness)."""
        if not group.slow:
            return []
        rng, slow_times = self._random, []
        for day in range(self._plan.days):
            if rng.random() < SLOW_TIMES_A_DAY / 2:
                begin_ms = self._plan.start_ms + day * DAY_MS + int(rng.uniform(7, 19) * HOUR_MS)
                slow_times.append((begin_ms, begin_ms + int(rng.uniform(0.2, 1.2) * HOUR_MS), 0.08))
        return slow_times


# --- files -------------------------------------------------------------------------------------


class SegmentFiles:
    """Writes hours as sealed segments, and counts finished segments in ``history``.

    A thread compresses them while the next hour is generated, because zlib releases the GIL.
    """

    def __init__(self, out: Path, segment_bytes: int, history: GeneratedHistory) -> None:
        self._out, self._segment_bytes, self._history = out, segment_bytes, history
        self._number, self._seq, self._epoch = 0, 0, 0
        self._pool = ThreadPoolExecutor(1)
        self._compressions: list[Future[int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._compressions:
                self._finish()
        finally:
            self._pool.shutdown()

    def hour(self, start_ms: int, epoch: int, lines: list[tuple[int, str]]) -> None:
        """Write the events of one hour in order. ``seq`` restarts with each epoch."""
        if epoch != self._epoch:
            self._epoch, self._seq = epoch, 0
        ends = f',"node":"{NODE}","shard":{SHARD},"epoch":{epoch},"seq":'
        last = ',"synthetic":true}\n'
        texts: list[str] = []
        size = 0
        for seq, (_, text) in enumerate(lines, self._seq + 1):
            texts.append(f"{text}{ends}{seq}{last}")
            size += len(texts[-1])
            if size >= self._segment_bytes:
                self._seal(start_ms, texts)
                texts, size = [], 0
        self._seq += len(lines)
        if texts:
            self._seal(start_ms, texts)

    def _seal(self, start_ms: int, texts: list[str]) -> None:
        self._number += 1
        folder = self._out / hour_folder(start_ms)
        name = str(SegmentName(NODE, SHARD, self._epoch, self._number, sealed=True))
        while len(self._compressions) >= WAITING_SEGMENTS_MAX:
            self._finish()
        self._compressions.append(self._pool.submit(_write, folder, name, texts))

    def _finish(self) -> None:
        self._history.bytes += self._compressions.pop(0).result()
        self._history.segments += 1


def _write(folder: Path, name: str, texts: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{PARTIAL_PREFIX}{name}"
    # Without a timestamp in the file, the same history has the same bytes.
    part.write_bytes(gzip.compress("".join(texts).encode(), GZIP_LEVEL, mtime=0))
    part.rename(folder / name)
    return (folder / name).stat().st_size


# --- topics and groups -------------------------------------------------------------------------


_MINUTE = 60_000

OFFICE = (1, 1, 1, 1, 1, 2, 4, 8, 14, 18, 20, 19, 16, 17, 19, 18, 16, 13, 9, 7, 5, 4, 2, 1)
EVENING = (5, 3, 2, 1, 1, 1, 2, 4, 6, 7, 8, 9, 11, 10, 9, 9, 10, 13, 17, 21, 23, 20, 14, 9)
FLAT = (10,) * 24
NIGHTLY = (0, 0, 120, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 60)


@dataclass(frozen=True)
class Group:
    """A subscriber group: its speed, its failure rate, and whether it falls behind by day."""

    name: str
    subscribers: tuple[str, ...]
    ack_ms: float
    failing: float
    retries: int = 5
    slow: bool = False
    reasons: tuple[str, ...] = ("timed out",)


@dataclass(frozen=True)
class Load:
    """A topic. Delays are distributed log-uniformly between their bounds."""

    topic: str
    share: float
    rhythm: tuple[int, ...]
    delay_min_ms: int
    delay_max_ms: int
    producers: tuple[str, ...]
    groups: tuple[Group, ...]
    key: str = ""
    keys: int = 0
    burst_ms: int = 0
    on_minute: bool = False
    crowd_ms: float = 0.0
    ttl_ms: int = 0

    def weight(self, hour: int) -> float:
        return self.share * self.rhythm[hour]


def _workers(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-{i}@10.0.3.{10 + i}:{50_000 + 7 * i}" for i in range(1, count + 1))


LOADS = (
    Load(
        "orders.close", 24, OFFICE, 30 * _MINUTE, 2 * HOUR_MS, ("shop-api-1", "shop-api-2"),
        (
            Group("billing", _workers("billing", 4), 24, 0.012, reasons=(
                "payment provider: 503", "payment provider: timed out", "order is locked")),
            Group("audit", _workers("audit", 1), 3, 0.0005, reasons=("disk quota",)),
        ),
        key="customer", keys=4_000, on_minute=True, crowd_ms=9,
    ),
    Load(
        "push.reminder", 30, EVENING, 1_000, 6 * HOUR_MS, ("app-backend-1", "app-backend-2",
        "app-backend-3"),
        (Group("push", _workers("push", 6), 38, 0.004, retries=3, slow=True, reasons=(
            "device token is gone", "rate limited")),),
        key="device", keys=60_000, ttl_ms=10 * _MINUTE,
    ),
    Load(
        "webhooks:deliver", 14, FLAT, 1_000, 10 * _MINUTE, ("events-1",),
        (Group("dispatch", _workers("dispatch", 3), 180, 0.16, slow=True, reasons=(
            "HTTP 500", "HTTP 404", "HTTP 410", "connection refused", "timed out",
            "TLS: expired")),),
        key="endpoint", keys=300,
    ),
    Load(
        "payments/retry", 6, OFFICE, 60_000, 24 * HOUR_MS, ("payments-1", "payments-2"),
        (Group("gateway", _workers("gateway", 2), 320, 0.06, retries=6, reasons=(
            "card declined", "issuer unavailable", "3-D Secure pending")),),
        key="card", keys=9_000,
    ),
    Load(
        "sessions.expire", 16, EVENING, 15 * _MINUTE, 30 * _MINUTE, ("auth-1", "auth-2"),
        (Group("default", _workers("janitor", 1), 2, 0.0003, reasons=("store busy",)),),
    ),
    Load(
        "reports/nightly", 4, NIGHTLY, 1_000, 20 * _MINUTE, ("cron-1",),
        (Group("render", _workers("render", 2), 900, 0.02, retries=2, reasons=(
            "out of memory", "no data for day")),),
        key="tenant", keys=1_200, burst_ms=90_000, crowd_ms=420,
    ),
    Load(
        "search.index", 6, OFFICE, 500, 5_000, ("catalogue-1",),
        (Group("indexer", _workers("indexer", 2), 55, 0.008, slow=True, reasons=(
            "version conflict", "shard not ready")),),
        key="product", keys=20_000,
    ),
    Load(
        "legacy.import:v1", 0.02, FLAT, 60_000, 4 * HOUR_MS, ("legacy-importer",), (),
    ),
)  # fmt: skip
"""The topics of the history. The last one has no subscriber: a report lists its tasks as stuck."""
