"""The lower half of ``engine_rig``: life, time, commits, producers and deliveries.

It does what the shard does, in the same order: it reads for the engine what the engine asks
for, and lays what is not durable over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from support.engine_rows import Rows
from tickwheel.engine.delivery import Dispatch
from tickwheel.engine.engine import Engine
from tickwheel.engine.sessions import Session
from tickwheel.engine.state import Batch, EngineConfig
from tickwheel.engine.timetables import Timetable
from tickwheel.engine.topics import Group, Subscriber
from tickwheel.model.lateness import Cause
from tickwheel.model.policies import PolicyRef, RetryPolicy
from tickwheel.model.records import ID_STEP, TaskOptions, TaskSnapshot, size_of

NOW_MS = 1_800_000_000_000
LEASE_MS = 30_000
GRACE_MS = 5_000
PASSES_MAX = 1_000
EXPIRED_AT_ONCE = 2
"""Leases that a call of the engine ends, so that most tests need several."""
RETRY = RetryPolicy(base_ms=1_000, factor=2.0, cap_ms=60_000, retries_max=3, jitter=0.0)
CONFIG = EngineConfig(slots=60, tick_ms=100, retry=RETRY, acks_ahead_max=0)
"""Without credit ahead of the commit, so that a test decides when credit returns."""


class Got(NamedTuple):
    """A delivery as its consumer sees it."""

    subscriber: Subscriber
    id: int
    epoch: int
    attempt: int
    due_ms: int
    body: bytes
    failures: int = 0
    deaths: int = 0

    @property
    def group(self) -> Group:
        return self.subscriber.group


class RigBase:
    """``engine`` is replaced by each restart; ``rows`` survives it."""

    def __init__(self, config: EngineConfig = CONFIG, now_ms: int = NOW_MS) -> None:
        self.config = config
        self.rows = Rows()
        self.now_ms = now_ms
        self.mono_ms = 0
        self.epoch = 0
        self.answered: list[object] = []
        """Addresses of enqueues and repeats that were answered, in order."""
        self.frozen: set[Subscriber] = set()
        """Consumers that show no life after a lease of theirs has ended; all others do."""
        self.handed: list[Got] = []
        """At-most-once deliveries that were written."""
        self.causes: dict[int, Cause | None] = {}
        """Why the last delivery of each task was late."""
        self._start(clean=True)

    # --- life and time -----------------------------------------------------------------------

    def _start(self, *, clean: bool) -> None:
        self.epoch += 1
        rows = self.rows
        self.engine = self.new_engine()
        self.core = self.engine.core
        self.core.tally(lambda name: True)  # counted from the start on, and compared by recount
        recovery = self.engine.recovery
        recovery.stopped_ms = rows.position_ms
        recovery.records(rows.of_kind, *self.now)
        recovery.outcomes(rows.outcomes.items())
        special = {key[0] for key in (*rows.progress, *rows.dead)}
        for known in rows.known(special).values():
            recovery.with_history(known, self.now_ms, self.mono_ms, None if clean else GRACE_MS)
        recovery.make_arrivals_ready(self.now_ms)
        for schedule in rows.schedules.values():
            self.engine.schedules.restore(schedule, Timetable(schedule.schedule))
        watched = self.core.schedule_heap.watched_ids()
        self.engine.schedules.unwatch_ended(watched, rows.known(watched))
        tasks = sorted(rows.tasks.values(), key=lambda row: (row.due_ms, row.id))
        ids, dues_ms = [row.id for row in tasks], [row.due_ms for row in tasks]
        recovery.handles(ids, dues_ms, [row.topic for row in tasks], special)
        self.core.keys.begin_loading()
        hashes = self.core.keys.hash.of_rows(tasks)
        recovery.keys(list(hashes), list(hashes.values()), special)
        self.core.keys.loaded()

    def new_engine(self) -> Engine:
        return Engine(self.config, self.epoch, self.rows.id_mark, self.now_ms)

    def crash(self, *, down_ms: int = 0) -> None:
        """Restart without the effects that were not applied to the rows."""
        self.pass_time(down_ms)
        self._start(clean=False)

    def stop_and_start(self, *, down_ms: int = 0, back_ms: int = 0) -> None:
        """Commit everything, including deliveries in flight, and restart.

        The wall clock is set back by `back_ms` meanwhile.
        """
        if self.core.sealed is not None:
            self.apply_and_land()
        self.core.open.has_marks = True  # the time is committed at least
        while self.seal(checkpoint_all=True) is not None:
            self.apply_and_land()
        self.pass_time(down_ms)
        self.now_ms -= back_ms
        self._start(clean=True)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.mono_ms += ms

    def after(self, ms: int) -> Self:
        """Advance the clock and return the rig."""
        self.pass_time(ms)
        return self

    @property
    def now(self) -> tuple[int, int]:
        return self.now_ms, self.mono_ms

    # --- commits -----------------------------------------------------------------------------

    def seal(self, *, checkpoint_all: bool = False) -> Batch | None:
        return self.engine.seal(self.now_ms, self.mono_ms, checkpoint_all=checkpoint_all)

    def apply(self) -> None:
        """Apply the sealed batch to the rows; the engine does not learn of it yet."""
        assert self.core.sealed is not None
        self.rows.apply(self.core.sealed.effects)

    def land(self) -> None:
        batch = self.core.sealed
        assert batch is not None
        self.engine.intake.land(batch, self.now_ms)
        self.handed += self.take(batch.handed)
        self.answered += [address for address, _, _ in batch.staged]

    def apply_and_land(self) -> None:
        self.apply()
        self.land()

    def refuse(self) -> list[object]:
        """Refuse the sealed batch. Return the addresses that must get an error."""
        batch = self.core.sealed
        assert batch is not None
        self.engine.intake.refuse(batch)
        refused = [address for address, _, _ in batch.staged]
        batch.staged = []
        return refused

    def commit(self) -> None:
        """Make everything so far durable."""
        if self.core.sealed is not None:
            self.apply_and_land()
        while self.seal() is not None:
            self.apply_and_land()

    # --- producers ---------------------------------------------------------------------------

    def session(self, key: bytes = b"s" * 16) -> Session:
        session = self.core.sessions.open(key, *self.now)
        assert session is not None
        return session

    def stage(
        self,
        topic: str = "t",
        delay_ms: int = 0,
        *,
        count: int = 1,
        body: bytes = b"b",
        priority: int = 0,
        ttl_ms: int | None = None,
        retry: PolicyRef | None = None,
        key: str | None = None,
        session: Session | None = None,
        request: int = 0,
        address: object = None,
    ) -> list[int]:
        """Stage an ENQUEUE of `count` equal tasks and return their ids."""
        options = TaskOptions(key, priority=priority, ttl_ms=ttl_ms, retry=retry)
        new_task = (
            topic,
            self.now_ms + delay_ms,
            body,
            None if options == TaskOptions() else options,
        )
        if session is not None:
            session.use(*self.now)
        self.engine.intake.enqueue(
            address,
            session,
            request,
            [new_task] * count,
            size_of(*new_task[2:]) * count,
            self.now_ms,
        )
        last = self.core.ids.last
        return list(range(last - (count - 1) * ID_STEP, last + 1, ID_STEP))

    def store(self, topic: str = "t", delay_ms: int = 0, **options: Any) -> list[int]:
        """Enqueue `count` equal tasks durably and return their ids."""
        ids = self.stage(topic, delay_ms, **options)
        self.commit()
        return ids

    def enqueue(self, topic: str = "t", delay_ms: int = 0, **options: Any) -> int:
        """Enqueue a task durably and return its id."""
        (task_id,) = self.store(topic, delay_ms, **options)
        return task_id

    # --- consumers ---------------------------------------------------------------------------

    def subscribe_all(self, groups: Iterable[str], **options: Any) -> None:
        for group in groups:
            self.subscribe(group=group, **options)

    def subscribe(
        self,
        topic: str = "t",
        group: str = "default",
        *,
        prefetch: int = 100,
        lease_ms: int = LEASE_MS,
        once: bool = False,
        at_most_once: bool = False,
    ) -> Subscriber:
        result = self.engine.grouping.group(self.core.topic(topic), group, self.now_ms)
        subscriber = Subscriber(
            None,
            result,
            prefetch,
            lease_ms,
            once=once,
            at_most_once=at_most_once,
            acks_ahead_max=self.core.config.acks_ahead_max,
        )
        self.engine.subscriptions.subscribe(subscriber)
        return subscriber

    def disconnect(self, subscriber: Subscriber, death: str = "") -> None:
        """End a subscriber. With `death` its consumer counts as died."""
        self.engine.subscriptions.disconnected(subscriber, self.mono_ms, death)

    def fire(self) -> None:
        """Hand due tasks to their groups."""
        for _ in range(PASSES_MAX):
            more = self.engine.firing.fire(self.now_ms, 1_000)
            more |= self.engine.firing.request_lapsed(self.now_ms, 1_000)
            if not more and not self.core.rows_to_read and not self.core.lapsed_rows_to_read:
                return
            self.load()
        raise AssertionError("the wheel always says that there is more")

    def load(self) -> None:
        """Read the rows that the engine asked for."""
        core, firing = self.core, self.engine.firing
        wants, core.rows_to_read = core.rows_to_read, []
        firing.process_rows(wants, {i: k.row for i, k in self.known(wants).items()}, self.now_ms)
        lapsed, core.lapsed_rows_to_read = core.lapsed_rows_to_read, []
        firing.expire_lapsed(lapsed, self.known(lapsed), self.now_ms)
        ready_rows_to_read, core.ready_rows_to_read = core.ready_rows_to_read, {}
        for group, ids in ready_rows_to_read.items():
            self.engine.delivery.reading.process_rows(
                group, ids, {i: k.row for i, k in self.known(ids).items()}
            )

    def expire(self) -> int:
        before = {lease.subscriber for group in self.core.leased for lease in group.flight.values()}
        in_flight = self.core.in_flight
        while self.engine.settlement.expire(self.now_ms, self.mono_ms, EXPIRED_AT_ONCE):
            pass
        for subscriber in before - self.frozen:
            self.engine.subscriptions.consumer_responded(subscriber.presence, [subscriber])
        return in_flight - self.core.in_flight

    def dispatch(self, limit: int = 1_000) -> list[Got]:
        """Deliver until no more can be delivered now."""
        got: list[Got] = []
        for _ in range(PASSES_MAX):
            dispatches, more = self.engine.delivery.dispatch(self.now_ms, self.mono_ms, limit)
            got += self.take(dispatches)
            if not more and not self.core.ready_rows_to_read:
                return got
            self.load()
        raise AssertionError("dispatch always says that there is more")

    def take(self, dispatches: list[Dispatch]) -> list[Got]:
        got: list[Got] = []
        for subscriber, items, _, causes in dispatches:
            if causes is None:
                causes = self.core.ledger.causes(subscriber.group, items, self.now_ms)
            each = causes if isinstance(causes, list) else [causes] * len(items)
            for (row, attempt, past), cause in zip(items, each, strict=True):
                self.causes[row.id] = cause
                values = row.id, self.epoch, attempt, row.due_ms, row.body, past.failed, past.deaths
                got.append(Got(subscriber, *values))
        return got

    def tick(self) -> list[Got]:
        self.fire()
        self.expire()
        return self.dispatch()

    def one(self) -> Got:
        """Return the only delivery there is now."""
        (got,) = self.tick()
        return got

    def known(self, ids: list[int]) -> dict[int, TaskSnapshot]:
        """Return tasks as the shard's reader does: durable rows under uncommitted changes."""
        sealed = self.core.sealed
        overlays = (
            [self.core.open.effects] if sealed is None else [sealed.effects, self.core.open.effects]
        )
        landed_id = self.core.landed_id
        return self.rows.known([i for i in ids if i <= landed_id], *overlays)
