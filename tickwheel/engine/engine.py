"""The engine: one object that owns a shard's memory, made of its parts; and how that memory comes
back from stored rows, before anything is served (``Recovery``).

Commands and times go in; outcomes, deliveries and effects come out. It reads no clock, opens
nothing, awaits nothing and logs nothing. The shard seals the open batch, commits it, and says
``landed`` or ``refused``; meanwhile commands fill the next batch.
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
from tickwheel.engine.ownership import Ownership
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
        """``key_seed``: the seed of key hashes that the store gave when it was opened."""
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
        """Close the open batch for the store; None when there is nothing to commit."""
        core = self.core
        if core.sealed is not None:
            raise AssertionError("a batch is with the store already")
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
        limit_ms = mono_ms if everything else mono_ms - core.config.lease_checkpoint_ms
        progress, unsaved = core.open.effects.progress, core.unsaved
        written, core.replaced_leases = core.replaced_leases, []
        while unsaved and unsaved[0].since_mono_ms <= limit_ms:
            lease = unsaved.popleft()
            if not lease.checkpointed:
                written.append(lease)
        for lease in written:
            if not lease.live:
                continue
            lease.checkpointed = True
            progress[lease.id, lease.group.name] = ProgressRow(
                lease.id,
                lease.group.name,
                ProgressState.IN_FLIGHT,
                lease.attempt,
                now_ms + lease.deadline_mono_ms - mono_ms,
                lease.epoch,
                *lease.past,
            )

    def next_checkpoint_mono_ms(self) -> int | None:
        """When the oldest delivery that no batch holds has to be written; None: there is none."""
        unsaved = self.core.unsaved
        while unsaved and (not unsaved[0].live or unsaved[0].checkpointed):
            unsaved.popleft()
        if not unsaved:
            return None
        return unsaved[0].since_mono_ms + self.core.config.lease_checkpoint_ms

    def wake_in_ms(self, now_ms: int, mono_ms: int, *, has_checkpoints: bool = True) -> int | None:
        """Milliseconds until something beside the wheel is due; None: nothing is.
        ``has_checkpoints`` False: leave out deliveries that no batch holds."""
        core = self.core
        times = [keep.until_mono_ms - mono_ms for keep in core.keeps.values()] if core.keeps else []
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
        asked_ms = core.transaction_registry.wait_ms(mono_ms)
        if asked_ms is not None:
            times.append(asked_ms)
        end_ms = core.lifetimes.next_ms(now_ms)
        looked_up_max = core.config.lapsing_max + core.missing_apart
        if end_ms is not None and len(core.lifetimes.fired) < looked_up_max:
            times.append(end_ms - now_ms)
        return min(times, default=None)

    def sweep(self, now_ms: int, mono_ms: int) -> None:
        """Once in a while: forget producer sessions that nobody will resume, and deliveries that
        need no checkpoint any more."""
        core = self.core
        for key in core.sessions.expired(now_ms):
            self.forget_session(key)
        self.transactions.sweep(mono_ms)
        self.bulks.sweep(now_ms)
        core.orderings.sweep()
        if len(core.unsaved) > 2 * core.in_flight:
            # While the store is away deliveries end and come again, behind one that lasts.
            live = (lease for lease in core.unsaved if lease.live and not lease.checkpointed)
            core.unsaved = deque(live)

    def forget_session(self, key: bytes) -> None:
        rows = self.core.sessions.forget(key)
        self.core.open.effects.change(SESSION, dict.fromkeys(rows))


class Recovery:
    """Rebuilds memory from rows: records, then tasks with a history, then others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._ownership = engine.ownership
        self._dead_letters = engine.dead_letters
        self._arrivals: list[tuple[Group, TaskRow]] = []
        """Due tasks that get their order by key once all tasks that were in flight are known."""
        self.leases_kept = 0
        self.stopped_ms = 0
        """The wheel's position at the last stop, by the clock that the ends of leases follow."""

    def records(self, of_kind: Callable[[Kind[Any]], Iterable[Any]], mono_ms: int) -> None:
        """Restore the records of every kind but schedules, which need timetables. ``of_kind``: the
        stored rows of a kind."""
        engine, self._ownership.stopped_ms = self._engine, self.stopped_ms
        for row in sorted(of_kind(GROUP), key=lambda r: r.since_ms):
            engine.grouping.restore(row)
        for counter in of_kind(COUNTER):
            self._core.versions.counter, self._core.versions.sure = counter
        engine.key_control.restore(of_kind(PAUSED_KEY))
        self._core.targets.update({(row.topic, row.group): row for row in of_kind(TARGET)})
        self._core.claims.update({CLAIM.key(row): row for row in of_kind(CLAIM)})
        self._core.sessions.restore(of_kind(SESSION))
        engine.transactions.restore(of_kind(TRANSACTION), mono_ms)
        engine.bulks.restore(of_kind(BULK))

    def outcomes(self, pairs: Iterable[tuple[int, Outcome]]) -> None:
        for task_id, outcome in pairs:
            self._core.outcomes.add(task_id, outcome)

    def with_history(
        self, known: TaskSnapshot, now_ms: int, mono_ms: int, lease_ms_max: int | None
    ) -> None:
        """Restore a task that some group was handed; leases last ``lease_ms_max`` at most."""
        core, row = self._core, known.row
        topic = core.topic(row.topic)
        self._dead_letters.restore(known)
        core.tasks += 1
        core.count_unfinished(topic.name, 1)
        core.acted_ms = max(core.acted_ms, row.due_ms)
        key = key_of(row)
        if key is not None:
            core.keys.add({row.id: core.keys.hash(row.topic, key)})
        groups = self._ownership.restore(known)
        if topic.default_backlog is not None:
            # Its records name groups that are not there: it waits for the first one.
            self._arrives(topic.default_backlog, row, now_ms)
            core.lifetimes.begin(row)
            return
        if not groups and not self._ownership.keepers(known):
            # Only groups that were being deleted still owed it, and nothing records which.
            core.end_unowed(row)
            return
        if not groups:
            core.count_unfinished(topic.name, -1)
        for group in groups:
            progress = known.progress.get(group.name)
            self._standing(group, known, progress, now_ms, mono_ms, lease_ms_max)

    def _standing(
        self,
        group: Group,
        known: TaskSnapshot,
        progress: ProgressRow | None,
        now_ms: int,
        mono_ms: int,
        lease_ms_max: int | None,
    ) -> None:
        core, task_id, priority = self._core, known.row.id, priority_of(known.row)
        if progress is None:
            self._arrives(group, known.row, now_ms)
            core.lifetimes.begin(known.row)
            return
        ordering = core.ordering_for(group, known.row)
        if progress.state is ProgressState.IN_FLIGHT or progress.replaced_by:
            # What was replaced in flight, and then restored as released, gives way at once.
            # A clock that was set back meanwhile makes no lease longer than it was.
            left_ms = max(0, progress.at_ms - max(now_ms, self.stopped_ms))
            if lease_ms_max is not None:
                left_ms = min(left_ms, lease_ms_max)
            mark, traits = 0, traits_of(known.row)
            if ordering is not None:
                mark, traits = ordering.restored(known.row)
            lease = Lease(
                task_id,
                group,
                group.detached,
                progress.attempt,
                progress.epoch,
                mono_ms,
                mono_ms + left_ms,
                known.row.due_ms,
                traits,
                progress.past,
                mark,
            )
            lease.checkpointed = True
            group.flight[task_id] = lease
            core.in_flight += 1
            core.expires(group, lease.deadline_mono_ms)
            self.leases_kept += 1
            return
        core.lifetimes.begin(known.row)
        past = progress.past
        group.delivery_attempts[task_id] = DeliveryAttempts(
            progress.attempt, progress.epoch, priority, past
        )
        if ordering is not None and group.delivery_attempts[task_id].was_had:
            ordering.claim(known.row)
        if progress.state is ProgressState.HELD and ordering is not None:  # not being deleted
            core.hold_key(group, task_id, group.delivery_attempts[task_id], progress.at_ms)
            ordering.held_since(task_id, progress.at_ms)
            ordering.waits(known.row, is_new=False)
            return
        if progress.state is ProgressState.WAITING:
            if ordering is not None:
                ordering.waits(known.row, is_new=False)
            group.waiting[task_id] = progress.at_ms
            core.retrying.setdefault(task_id, []).append(group)
            core.wheel.add(task_id, progress.at_ms)
        else:
            self._arrives(group, known.row, now_ms)

    def _arrives(self, group: Group, row: TaskRow, now_ms: int) -> None:
        if self._core.ordering_for(group, row) is None:
            self._core.come(group, row, now_ms)
        else:
            self._arrivals.append((group, row._replace(body=NO_BODY)))

    def arrived(self, now_ms: int) -> None:
        """Make due tasks ready, now that all tasks with a history were restored."""
        arrivals, self._arrivals = self._arrivals, []
        arrivals.sort(key=lambda one: (one[1].due_ms, order_of(one[1])))
        for group, row in arrivals:
            self._core.come(group, row, now_ms)

    def handles(
        self,
        ids: Sequence[int],
        dues_ms: Sequence[int],
        topics: Sequence[str],
        special: set[int],
    ) -> None:
        """Put a chunk of pending tasks onto the wheel, except the ``special`` ones."""
        core = self._core
        if special and not special.isdisjoint(ids):
            rows = [r for r in zip(ids, dues_ms, topics, strict=True) if r[0] not in special]
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
        self, ids: Sequence[int], hashes: Sequence[int], special: set[int], expected: int = 0
    ) -> None:
        """Load the keys of some tasks, of ``expected`` at most (0: not known), except the
        ``special``."""
        self._core.keys.load(ids, hashes, special, expected)

    def has_handles(self, until_ms: int | None) -> None:
        """All handles due before ``until_ms`` were loaded; None: all there are."""
        self._ownership.unloaded_ms = until_ms
