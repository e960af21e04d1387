"""From stored rows back to engine memory, before anything is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tickwheel.engine.dead_letters import DeadLetters
from tickwheel.engine.events import DELETED
from tickwheel.engine.filtering import order_of
from tickwheel.engine.groups import Grouping
from tickwheel.engine.ownership import Ownership
from tickwheel.engine.state import Core
from tickwheel.engine.topics import DeliveryAttempts, Group, Lease, key_of, priority_of, traits_of
from tickwheel.model.records import (
    NO_BODY,
    GroupRow,
    Outcome,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskRow,
    TaskSnapshot,
)


class Recovery:
    """Rebuilds memory from rows: groups and sessions, then tasks with a history, then others."""

    def __init__(
        self, core: Core, ownership: Ownership, dead_letters: DeadLetters, grouping: Grouping
    ) -> None:
        self._core = core
        self._ownership = ownership
        self._dead_letters = dead_letters
        self._grouping = grouping
        self._arrivals: list[tuple[Group, TaskRow]] = []
        """Due tasks that get their order by key once all tasks that were in flight are known."""
        self.leases_kept = 0
        self.stopped_ms = 0
        """The wheel's position at the last stop, by the clock that the ends of leases follow."""

    def groups(self, rows: Iterable[GroupRow]) -> None:
        self._ownership.stopped_ms = self.stopped_ms
        for row in sorted(rows, key=lambda r: r.since_ms):
            self._grouping.restore(row)

    def sessions(self, rows: Iterable[SessionRow]) -> None:
        self._core.sessions.restore(rows)

    def outcomes(self, pairs: Iterable[tuple[int, Outcome]]) -> None:
        self._core.outcomes.add_all(pairs)

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
            core.end(row.id, Outcome.DELETED, topic.name, key_of(row))
            if core.recorder is not None:
                core.recorder.ended(topic.name, None, DELETED, row.id, last=True)
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
        if progress.state is ProgressState.IN_FLIGHT:
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
