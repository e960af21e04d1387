"""The engine, which owns a shard's memory, and ``Recovery``, which rebuilds that memory from stored
rows at the start.

Commands and times are the input; outcomes, deliveries and effects are the output. The engine reads
no clock, performs no I/O, awaits nothing and logs nothing. The shard seals the open batch, commits
it, and calls ``landed`` or ``refused``. During the commit, commands fill the next batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tickwheel.engine.delivery import Delivery, Subscriptions
from tickwheel.engine.enqueue import Coalescer, Intake
from tickwheel.engine.events import Recorder
from tickwheel.engine.firing import Firing
from tickwheel.engine.groups import Closing, Grouping, Resets, TopicClosing
from tickwheel.engine.ownership import Ownership, newer_of
from tickwheel.engine.schedules import Schedules
from tickwheel.engine.settlement import DeadLetters, Settlement
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Batch, Core, EngineConfig, strip_ended
from tickwheel.engine.tasks import Bulks, Control, KeyControl
from tickwheel.engine.topics import DeliveryAttempts, Group, Lease, key_of, priority_of, traits_of
from tickwheel.engine.transactions import Transactions
from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    COUNTER,
    GROUP,
    PAUSED_KEY,
    SESSION,
    TARGET,
    TRANSACTION,
    Kind,
)
from tickwheel.model.records import (
    NO_BODY,
    Outcome,
    ProgressRow,
    ProgressState,
    TaskRow,
    TaskSnapshot,
    order_of,
)

STEP_MS_MIN = 1_000
"""Minimum step of the clock after which checkpointed leases are written again."""


class Engine:
    """One shard in memory. Its parts share ``core``, and their verbs are the engine's commands."""

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        id_mark: int,
        now_ms: int,
        recorder: Recorder | None = None,
        key_seed: bytes = b"",
    ) -> None:
        """``key_seed`` is the store's seed for key hashes."""
        self.core = core = Core(config, epoch, id_mark, now_ms, recorder, key_seed)
        self.intake = Intake(core)
        self.ownership = ownership = Ownership(core)
        self.dead_letters = dead_letters = DeadLetters(core, ownership)
        self.settlement = Settlement(core, ownership, dead_letters)
        self.control = Control(core, ownership, dead_letters)
        self.firing = firing = Firing(core, ownership)
        self.subscriptions = subscriptions = Subscriptions(core, firing.broadcasts)
        self.delivery = Delivery(core, ownership, self.settlement, firing, subscriptions)
        self.grouping = Grouping(core, ownership)
        self.closing = Closing(core, ownership, dead_letters, self.settlement, self.grouping)
        self.topic_closing = TopicClosing(
            core, self.grouping, self.closing, self.control, subscriptions
        )
        self.coalescer = Coalescer(core, ownership, self.intake, self.control)
        self.schedules = Schedules(core, self.intake, self.control)
        self.transactions = Transactions(core, self.intake)
        self.bulks = Bulks(core, self.control)
        self.intake.undo_bulks = self.bulks.undo
        self.resets = Resets(core, self.intake, self.bulks)
        self.key_control = KeyControl(core, dead_letters)
        self.recovery = Recovery(self)

    def seal(self, now_ms: int, mono_ms: int, *, checkpoint_all: bool = False) -> Batch | None:
        """Close the open batch for the store. Return None if there is nothing to commit."""
        core = self.core
        if core.sealed is not None:
            raise AssertionError("the store is already writing a batch")
        if checkpoint_all:
            core.wheel.catch_up(now_ms)
        self._checkpoint_leases(now_ms, mono_ms, checkpoint_all)
        batch, effects = core.open, core.open.effects
        for key in core.dirty_sessions:
            session = core.sessions.get(key)
            if session is not None:
                effects.change(SESSION, session.changes())
        core.dirty_sessions.clear()
        if batch.is_empty():
            return None
        effects.enqueued_bytes = batch.staged_bytes - len(effects.enqueued) * ROW_OVERHEAD_BYTES
        strip_ended(effects)
        effects.id_mark = core.ids.last
        effects.position_ms = core.wheel.position_ms
        batch.notes = core.recorder.cut()
        core.sealed = batch
        core.open = Batch()
        return batch

    def _checkpoint_leases(self, now_ms: int, mono_ms: int, everything: bool) -> None:
        core = self.core
        # A start measures leases from the stored position, which stays if the clock is set back.
        offset_ms = max(now_ms, core.wheel.position_ms) - mono_ms
        self._follow_steps(offset_ms, everything)
        limit_ms = mono_ms if everything else mono_ms - core.config.lease_checkpoint_ms
        progress, unsaved = core.open.effects.progress, core.unsaved
        to_write, core.replaced_leases = core.replaced_leases, []
        while unsaved and unsaved[0].since_mono_ms <= limit_ms:
            lease = unsaved.popleft()
            if not lease.checkpointed:
                to_write.append(lease)
        for lease in to_write:
            if not lease.live:
                continue
            lease.checkpointed = True
            progress[lease.id, lease.group.name] = ProgressRow(
                lease.id,
                lease.group.name,
                ProgressState.IN_FLIGHT,
                lease.attempt,
                lease.deadline_mono_ms + offset_ms,
                lease.epoch,
                *lease.past,
            )

    def _follow_steps(self, offset_ms: int, everything: bool) -> None:
        """Write checkpointed leases again if the clock was set after they were written. Ends that
        are too late matter only after a clean stop: after a crash leases last for the grace."""
        core = self.core
        low_ms, high_ms = core.lease_offsets_ms
        is_late = everything and high_ms - offset_ms >= STEP_MS_MIN
        # Without the last condition, commits that take long would never let a stop come to an end.
        if offset_ms - low_ms >= STEP_MS_MIN or (is_late and not core.open.is_empty()):
            leases = (lease for group in core.leased for lease in group.flight.values())
            core.replaced_leases += [lease for lease in leases if lease.checkpointed]
            core.lease_offsets_ms = offset_ms, offset_ms
        core.note_lease_offset(offset_ms)

    def next_checkpoint_mono_ms(self) -> int | None:
        """Return the time by which the oldest unrecorded delivery, if any, must be written."""
        unsaved = self.core.unsaved
        while unsaved and (not unsaved[0].live or unsaved[0].checkpointed):
            unsaved.popleft()
        if not unsaved:
            return None
        return unsaved[0].since_mono_ms + self.core.config.lease_checkpoint_ms

    def wake_in_ms(self, now_ms: int, mono_ms: int, *, has_checkpoints: bool = True) -> int | None:
        """Return the milliseconds until the next step that does not depend on the wheel, or None if
        there is none. Without ``has_checkpoints``, unrecorded deliveries are ignored."""
        core = self.core
        connections = core.kept_connections
        times = (
            [keep.until_mono_ms - mono_ms for keep in connections.values()] if connections else []
        )
        if core.expiry_mono_ms is not None:
            times.append(core.expiry_mono_ms - mono_ms)
        checkpoint_mono_ms = self.next_checkpoint_mono_ms() if has_checkpoints else None
        if checkpoint_mono_ms is not None:
            times.append(checkpoint_mono_ms - mono_ms)
        token_mono_ms = self.delivery.next_token_mono_ms()
        if token_mono_ms is not None:
            times.append(token_mono_ms - mono_ms)
        planned_ms = core.schedule_heap.next_ms()
        if planned_ms is not None:
            times.append(planned_ms - now_ms)
        check_in_ms = core.transaction_registry.wait_ms(mono_ms)
        if check_in_ms is not None:
            times.append(check_in_ms)
        end_ms = core.lifetimes.next_ms(now_ms)
        looked_up_max = core.config.lapsing_max + core.uncounted_missing
        if end_ms is not None and len(core.lifetimes.fired) < looked_up_max:
            times.append(end_ms - now_ms)
        return min(times, default=None)

    def sweep(self, mono_ms: int) -> None:
        """Forget expired sessions, decided transactions, ended bulk operations, and deliveries that
        no longer need a checkpoint. Call this periodically."""
        core = self.core
        for key in core.sessions.expired(mono_ms):
            self.forget_session(key)
        self.transactions.sweep(mono_ms)
        self.bulks.sweep(mono_ms)
        core.orderings.sweep()
        if len(core.unsaved) > 2 * core.in_flight:
            # While the store is unavailable, many ended deliveries can queue up behind one that is
            # still running.
            live = (lease for lease in core.unsaved if lease.live and not lease.checkpointed)
            core.unsaved = deque(live)

    def forget_session(self, key: bytes) -> None:
        rows = self.core.sessions.forget(key)
        self.core.open.effects.change(SESSION, dict.fromkeys(rows))


class Recovery:
    """Rebuilds memory from rows: first records, then tasks with a history, then other tasks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._ownership = engine.ownership
        self._dead_letters = engine.dead_letters
        self._arrivals: list[tuple[Group, TaskRow]] = []
        """Due tasks that join the queues of their keys once all tasks in flight are restored."""
        self.leases_kept = 0
        self.stopped_ms = 0
        """The wheel's position at the last stop, by which the ends of leases were written."""

    def records(
        self, of_kind: Callable[[Kind[Any]], Iterable[Any]], now_ms: int, mono_ms: int
    ) -> None:
        """Restore the records of every kind except schedules, which need timetables. ``of_kind``
        returns the stored rows of a kind."""
        engine, self._ownership.stopped_ms = self._engine, self.stopped_ms
        for row in sorted(of_kind(GROUP), key=lambda r: r.since_ms):
            engine.grouping.restore(row)
        for counter in of_kind(COUNTER):
            self._core.versions.counter, self._core.versions.number_at_start = counter
        engine.key_control.restore(of_kind(PAUSED_KEY))
        self._core.targets.update({(row.topic, row.group): row for row in of_kind(TARGET)})
        self._core.claims.update({CLAIM.key(row): row for row in of_kind(CLAIM)})
        self._core.sessions.restore(of_kind(SESSION), now_ms, mono_ms)
        engine.transactions.restore(of_kind(TRANSACTION), mono_ms)
        engine.bulks.restore(of_kind(BULK), now_ms, mono_ms)

    def outcomes(self, pairs: Iterable[tuple[int, Outcome]]) -> None:
        for task_id, outcome in pairs:
            self._core.outcomes.add(task_id, outcome)

    def with_history(
        self, snapshot: TaskSnapshot, now_ms: int, mono_ms: int, lease_ms_max: int | None
    ) -> None:
        """Restore a task with a history. Its leases last at most ``lease_ms_max`` from now."""
        core, row = self._core, snapshot.row
        topic = core.topic(row.topic)
        self._dead_letters.restore(snapshot)
        core.tasks += 1
        core.count_unfinished(topic.name, 1)
        core.acted_ms = max(core.acted_ms, row.due_ms)
        key = key_of(row)
        if key is not None:
            core.keys.add({row.id: core.keys.hash(row.topic, key)})
        groups = self._ownership.restore(snapshot)
        if topic.default_backlog is not None:
            # The groups in its records do not exist, so it waits for the topic's first group.
            self._make_ready_later(topic.default_backlog, row, now_ms)
            core.lifetimes.begin(row)
            return
        if not groups and not self._ownership.keepers(snapshot):
            # It was owed only to groups that were being deleted, which are not recorded.
            core.end_unowed(row)
            return
        if not groups:
            core.count_unfinished(topic.name, -1)
        newer_id = newer_of(snapshot)
        for group in groups:
            progress = snapshot.progress.get(group.name)
            if progress is None and newer_id is not None:
                # A replay had not examined the task when the newer one replaced it.
                self._ownership.give_way(group, row, 0, newer_id)
                continue
            self._restore_progress(group, snapshot, progress, now_ms, mono_ms, lease_ms_max)

    def _restore_progress(
        self,
        group: Group,
        snapshot: TaskSnapshot,
        progress: ProgressRow | None,
        now_ms: int,
        mono_ms: int,
        lease_ms_max: int | None,
    ) -> None:
        core, task_id, priority = self._core, snapshot.row.id, priority_of(snapshot.row)
        if progress is None:
            self._make_ready_later(group, snapshot.row, now_ms)
            core.lifetimes.begin(snapshot.row)
            return
        ordering = core.ordering_for(group, snapshot.row)
        if progress.state is ProgressState.IN_FLIGHT or progress.replaced_by:
            # If a task that was replaced in flight is released, its replacement takes over at once.
            # A clock that was set back in the meantime does not extend a lease.
            remaining_ms = max(0, progress.at_ms - max(now_ms, self.stopped_ms))
            if lease_ms_max is not None:
                remaining_ms = min(remaining_ms, lease_ms_max)
            mark, traits = 0, traits_of(snapshot.row)
            if ordering is not None:
                mark, traits = ordering.restored(snapshot.row)
            lease = Lease(
                task_id,
                group,
                group.detached,
                progress.attempt,
                progress.epoch,
                mono_ms,
                mono_ms + remaining_ms,
                snapshot.row.due_ms,
                traits,
                progress.past,
                mark,
            )
            # A row with a later end is written again, else a later start would believe it.
            lease.checkpointed = progress.at_ms <= now_ms + remaining_ms
            if not lease.checkpointed:
                core.unsaved.append(lease)
            core.note_lease_offset(now_ms - mono_ms)
            group.flight[task_id] = lease
            core.in_flight += 1
            core.expires(group, lease.deadline_mono_ms)
            self.leases_kept += 1
            return
        core.lifetimes.begin(snapshot.row)
        past = progress.past
        group.delivery_attempts[task_id] = DeliveryAttempts(
            progress.attempt, progress.epoch, priority, past
        )
        if ordering is not None and group.delivery_attempts[task_id].was_attempted:
            ordering.claim(snapshot.row)
        if progress.state is ProgressState.HELD and ordering is not None:  # not being deleted
            core.hold_key(group, task_id, group.delivery_attempts[task_id], progress.at_ms)
            ordering.set_held(task_id, progress.at_ms)
            ordering.note_wait(snapshot.row, is_new=False)
            return
        if progress.state is ProgressState.WAITING:
            if ordering is not None:
                ordering.note_wait(snapshot.row, is_new=False)
            group.waiting[task_id] = progress.at_ms
            core.retrying.setdefault(task_id, []).append(group)
            core.wheel.add(task_id, progress.at_ms)
        else:
            self._make_ready_later(group, snapshot.row, now_ms)

    def _make_ready_later(self, group: Group, row: TaskRow, now_ms: int) -> None:
        if self._core.ordering_for(group, row) is None:
            self._core.add_due(group, row, now_ms)
        else:
            self._arrivals.append((group, row._replace(body=NO_BODY)))

    def make_arrivals_ready(self, now_ms: int) -> None:
        """Make the due tasks of order keys ready after all tasks with a history were restored."""
        arrivals, self._arrivals = self._arrivals, []
        arrivals.sort(key=lambda arrival: (arrival[1].due_ms, order_of(arrival[1])))
        for group, row in arrivals:
            self._core.add_due(group, row, now_ms)

    def handles(
        self,
        ids: Sequence[int],
        dues_ms: Sequence[int],
        topics: Sequence[str],
        ids_with_history: set[int],
    ) -> None:
        """Put a chunk of scheduled tasks, except those in ``ids_with_history``, onto the wheel."""
        core = self._core
        if ids_with_history and not ids_with_history.isdisjoint(ids):
            rows = [
                r for r in zip(ids, dues_ms, topics, strict=True) if r[0] not in ids_with_history
            ]
            ids, dues_ms = [r[0] for r in rows], [r[1] for r in rows]
            topics = [r[2] for r in rows]
        core.wheel.add_many(ids, dues_ms)
        for name, count in Counter(topics).items():
            topic = core.topic(name)
            topic.scheduled += count
            core.count_unfinished(name, count)
        core.tasks += len(ids)
        core.scheduled += len(ids)

    def keys(
        self,
        ids: Sequence[int],
        hashes: Sequence[int],
        ids_with_history: set[int],
        expected: int = 0,
    ) -> None:
        """Load the keys of tasks that are not in ``ids_with_history``. ``expected`` is the maximum
        number of keys to come, or 0 if it is unknown."""
        self._core.keys.load(ids, hashes, ids_with_history, expected)

    def handles_loaded(self, until_ms: int | None) -> None:
        """Record that all handles due before ``until_ms`` (None: all handles) have been loaded."""
        self._ownership.unloaded_ms = until_ms
