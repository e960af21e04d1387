"""Synthetic history: the segments that a busy daemon would have written, made up from a seed.

For trying reports and for measuring them. Every line says ``"synthetic": true``, so that no
figure made from it can be taken for a real one. The same arguments make the same bytes.

Hours are made in order: what is enqueued in an hour waits in the hour it is due, and only there
do its deliveries come about. So memory holds what is pending, not the whole history. Nothing
here reads a clock or knows a daemon.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.demo.generate_files import SegmentFiles
from tickwheel.demo.generate_load import LOADS, Group, Load

HOUR_MS = 3_600_000
DAY_MS = 86_400_000
NODE = "synthetic-1"
RETRY_BASE_MS, RETRY_CAP_MS, RETRY_JITTER = 10_000, 7_200_000, 0.1
LEASE_MS = 30_000
CANCELLED, RESCHEDULED = 0.01, 0.004
LEASE_OVER, RELEASED, REQUEUED = 0.0008, 0.0006, 0.3
STICKY = 0.6
"""How probably a delivery fails that has failed before."""
RESTART_EVERY_DAYS = 3
"""A daemon that is never restarted would show one epoch only."""
SPELLS_A_DAY = 1.2
"""So often a slow consumer falls behind."""


@dataclass(frozen=True)
class Plan:
    """What to make. ``start_ms`` is the first day's midnight, UTC."""

    tasks: int
    days: int
    seed: int
    start_ms: int
    segment_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.days < 1 or self.start_ms % HOUR_MS:
            raise ValueError("tasks and days are at least 1; the start is a full hour, UTC")


@dataclass
class Made:
    """What came of it. ``events`` counts lines by event."""

    events: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    segments: int = 0
    bytes: int = 0

    @property
    def lines(self) -> int:
        return sum(self.events.values())


def generate(plan: Plan, out: Path, tell: Callable[[int, int], None] | None = None) -> Made:
    """Write the history below ``out``; ``tell(hours done, hours)`` after every hour."""
    made = Made()
    maker = _Maker(plan)
    hours = plan.days * 24
    with SegmentFiles(out, NODE, plan.segment_bytes) as files:
        for hour in range(hours):
            start_ms = plan.start_ms + hour * HOUR_MS
            epoch = 1 + hour // (24 * RESTART_EVERY_DAYS)
            lines = maker.hour(hour, last=hour == hours - 1)
            files.hour(start_ms, epoch, lines)
            if tell is not None:
                tell(hour + 1, hours)
    made.events.update(maker.counts)
    made.segments, made.bytes = files.segments, files.bytes
    return made


class _Maker:
    """Events by hour. A line is kept as (time, text without its end); the end holds ``seq``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._end_ms = plan.start_ms + plan.days * DAY_MS
        self._events: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._pending: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._next = 0
        self.counts: dict[str, int] = defaultdict(int)
        self._spells = {
            (load.topic, group.name): self._make_spells(group)
            for load in LOADS
            for group in load.groups
        }
        weight = sum(_weight(load, hour) for load in LOADS for hour in range(24))
        self._per_weight = plan.tasks / plan.days / weight
        self._carry = [0.0] * len(LOADS)

    def hour(self, hour: int, *, last: bool) -> list[tuple[int, str]]:
        """All of one hour's events in the order of their times."""
        start_ms = self._plan.start_ms + hour * HOUR_MS
        events = self._events[hour]
        if hour % (24 * RESTART_EVERY_DAYS) == 0:
            self._daemon(events, start_ms, "started", hour == 0)
        for index, load in enumerate(LOADS):
            wanted = _weight(load, hour % 24) * self._per_weight + self._carry[index]
            self._carry[index] = wanted - int(wanted)
            self._enqueue(start_ms, index, load, int(wanted))
        if last:  # what rounding left over
            self._enqueue(start_ms, 0, LOADS[0], self._plan.tasks - self._next)
        for due_ms, task, index in self._pending.pop(hour, ()):
            for group in LOADS[index].groups:
                self._deliver(LOADS[index], group, task, due_ms)
        if last or (hour + 1) % (24 * RESTART_EVERY_DAYS) == 0:
            self._daemon(events, start_ms + HOUR_MS - 1, "stopped", True)
        del self._events[hour]
        events.sort(key=_time)
        return events

    def _put(self, at_ms: int, event: str, text: str) -> None:
        if at_ms < self._end_ms:
            self.counts[event] += 1
            self._events[(at_ms - self._plan.start_ms) // HOUR_MS].append(
                (at_ms, f'{{"v":1,"time_ms":{at_ms},"event":"{event}",{text}')
            )

    def _daemon(self, events: list[tuple[int, str]], at_ms: int, event: str, clean: bool) -> None:
        self.counts[event] += 1
        told = "true" if clean else "false"
        events.append((at_ms, f'{{"v":1,"time_ms":{at_ms},"event":"{event}","clean":{told}'))

    # --- what producers do ------------------------------------------------------------------

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
                # The square makes a few keys busy, as customers are.
                text += f',"key":"{load.key}-{int(uniform() ** 2 * load.keys)}"'
            put(at_ms, "enqueued", text)
            if uniform() < CANCELLED + RESCHEDULED and due_ms - at_ms > 2_000:
                moved_ms = at_ms + int(uniform() * (due_ms - at_ms - 1_000)) + 1
                if rng.random() < CANCELLED / (CANCELLED + RESCHEDULED):
                    put(moved_ms, "cancelled", f'"task_id":"{task}","topic":"{load.topic}"')
                    continue
                due_ms += int(uniform() * HOUR_MS)
                text = f'"task_id":"{task}","topic":"{load.topic}","due_ms":{due_ms}'
                put(moved_ms, "rescheduled", text)
            pending[(due_ms - begin_ms) // HOUR_MS].append((due_ms, task, index))

    # --- what becomes of it -----------------------------------------------------------------

    def _deliver(self, load: Load, group: Group, task: int, due_ms: int) -> None:
        """All attempts of one task in one group, to its end or to the end of the history."""
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
            drawn = rng.random()
            if failing <= drawn < 1 - LEASE_OVER - RELEASED:
                put(at_ms + took_ms, "acked", f'{tail},"ack_ms":{took_ms}')
                return
            if drawn >= 1 - RELEASED:
                put(at_ms + took_ms, "released", tail)
                at_ms += took_ms + 5
                continue
            failed = drawn < failing
            at_ms += took_ms if failed else LEASE_MS
            reason = rng.choice(group.reasons) if failed else "lease over"
            if attempt > group.retries:
                put(at_ms, "dead", f'{names},"attempt":{attempt},"reason":"{reason}"')
                if rng.random() > REQUEUED:
                    return
                at_ms += int(rng.expovariate(1 / (2 * HOUR_MS))) + 60_000
                put(at_ms, "requeued", names)
                # What made it fail has been mended by then.
                due_ms, failing = at_ms, group.failing
            elif failed:
                delay_ms = min(RETRY_BASE_MS << (attempt - 1), RETRY_CAP_MS)
                due_ms = at_ms + int(delay_ms * (1 + RETRY_JITTER * (2 * rng.random() - 1)))
                put(at_ms, "nacked", f'{tail},"due_ms":{due_ms},"reason":"{reason}"')
                # What fails once mostly fails again.
                failing = max(group.failing, STICKY)
            else:
                put(at_ms, "lease_over", f'{tail},"reason":"{reason}"')
                due_ms = at_ms
            attempt += 1
            at_ms = due_ms + int(rng.expovariate(0.6)) + 1

    def _late(self, load: Load, group: Group, due_ms: int) -> int:
        """Milliseconds after due: the daemon's own, the burst's, and the slow consumer's."""
        rng = self._random
        late = rng.expovariate(0.7)
        if load.burst_ms or load.on_minute:
            late += rng.random() * load.crowd_ms
        elif rng.random() < 0.002:
            late += rng.expovariate(1 / 60)
        for begin_ms, end_ms, slope in self._spells[load.topic, group.name]:
            if begin_ms <= due_ms < end_ms:
                late += slope * min(due_ms - begin_ms, end_ms - due_ms)
        return int(late)

    def _make_spells(self, group: Group) -> list[tuple[int, int, float]]:
        """When this group's consumers are too slow: (from, until, how fast lateness grows)."""
        if not group.slow:
            return []
        rng, spells = self._random, []
        for day in range(self._plan.days):
            if rng.random() < SPELLS_A_DAY / 2:
                begin_ms = self._plan.start_ms + day * DAY_MS + int(rng.uniform(7, 19) * HOUR_MS)
                spells.append((begin_ms, begin_ms + int(rng.uniform(0.2, 1.2) * HOUR_MS), 0.08))
        return spells


def _time(event: tuple[int, str]) -> int:
    return event[0]


def _weight(load: Load, hour: int) -> float:
    return load.share * load.rhythm[hour]
