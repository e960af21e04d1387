"""The rules that determine which groups are owed a task.

Engine, recovery, restore and tests use these functions; no other code compares a group with a task.
The rules use no clock, but the order of ids, which ascend even across restarts and after a clock
was set back.

Rules for durable rows of groups and tasks:

1. **Place.** A task's place in the order is its id. If an operator reschedules a task to a time at
   which a group would wrongly miss it, or a group that is being deleted would wrongly hold it, the
   task gets a new, later place, ``TaskOptions.order_id``. This is rare. A replaced task of an
   earlier start gets its id as ``order_id``, which only affects receipts (see ``settlement``).
2. **Start.** A group is owed tasks after ``since_id``, the newest id when it was created, and
   earlier tasks that are due at ``since_ms`` or later. For a group that begins now, ``since_ms`` is
   the first due time that the wheel had not fired, independent of the clock. A group that begins in
   the future is owed tasks by due time only (``BY_DUE_ALONE``), until a restart after its start.
3. **End.** A group that is being deleted is owed no task after ``closed_id``, and no task due after
   ``closed_ms``. These tasks had not fired, so scheduled tasks never end with a group.
4. **Unowned.** A task that no group is owed by rules 2 and 3 is owed to the live groups with the
earliest start by due time. When a group with an earlier start is created, the start of the groups
that were earliest is moved before it, so that they stay the earliest.
5. **First.** The first group of a topic begins at 0. The only group of a topic gets all tasks.
6. **Filter.** A group's filter excludes some of the tasks that the group is owed by rules 1 to 5.
The task's due time and place determine which filter applies (``model.filters``). A rescheduled task
that a former filter would wrongly judge gets a new place. A group with a record of a task was owed
it. A task that the filters of all groups exclude ends.
7. **Resets.** A task that a reset has created (``TaskOptions.replayed``) is owed only to the group
that it names, whatever the start of that group. The filter applies. If the group does not exist,
the task ends.

Rules for memory:

8. **Firing.** When a task fires, the groups that are owed it by the rules get it. ``Core.owed``
names them, unless only the topic's first group is owed it. After a crash, a task without a record
fires again; a task with records is owed to the groups of the rules and of its records.
9. **Replay.** A group that begins in the past is owed tasks that have fired without it. Every task
   with an id up to ``Replay.mark`` is examined in the background. Until its task is examined, the
   replay is an owner: if the last other group finishes the task, the replay's group alone is owed
   it. Replays are not stored, because rule 8 and the row of the group give the same result after a
   crash.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from tickwheel.engine.events import CANCELLED, DELETED, EXPIRED, FILTERED
from tickwheel.engine.state import Core
from tickwheel.engine.topics import (
    Group,
    Lease,
    PendingGroups,
    Replay,
    Topic,
    key_of,
    traits_of,
)
from tickwheel.model.filters import is_before, judge_of, with_former
from tickwheel.model.kinds import GROUP
from tickwheel.model.records import (
    BY_DUE_ALONE,
    ID_MAX,
    FormerFilter,
    GroupSettings,
    Outcome,
    ProgressState,
    TaskOptions,
    TaskRow,
    TaskSnapshot,
    order_of,
)


class Member(Protocol):
    """A group in memory or its stored row."""

    @property
    def name(self) -> str: ...

    @property
    def since_ms(self) -> int: ...

    @property
    def since_id(self) -> int: ...

    @property
    def settings(self) -> GroupSettings | None: ...


M = TypeVar("M", bound=Member)

# --- the rules for stored groups and tasks ---------------------------------------------------


def is_closed(member: Member) -> bool:
    """Return whether the group is being deleted."""
    return member.settings is not None and member.settings.closed_ms is not None


def owes(member: Member, row: TaskRow) -> bool:
    """Return whether the group is owed the task according to the group's start and end."""
    order, settings = order_of(row), member.settings
    if settings is not None and settings.closed_ms is not None:
        if row.due_ms > settings.closed_ms or order > settings.closed_id:
            return False
    named = named_group(row)
    if named is not None:
        return member.name == named
    return order > member.since_id or row.due_ms >= member.since_ms


def named_group(row: TaskRow) -> str | None:
    """Return the only group that is owed a task created by a reset, or None for any other task."""
    options = row.options
    return None if options is None or options.replayed is None else options.replayed.group


def wants(member: Member, row: TaskRow) -> bool:
    """Return whether the group's filter selects the task."""
    judge = member.judge if isinstance(member, Group) else judge_of(member.settings)
    return judge is None or judge.wants(row)


def earliest(members: Iterable[M]) -> list[M]:
    """Return the groups with the earliest start that are not being deleted."""
    live = [member for member in members if not is_closed(member)]
    since_ms = min((member.since_ms for member in live), default=0)
    return [member for member in live if member.since_ms == since_ms]


def moved_before(members: Iterable[M], since_ms: int) -> tuple[list[M], int]:
    """Return (the earliest groups if a new group begins before them, their new start)."""
    later = [member for member in earliest(members) if member.since_ms > since_ms]
    return later, max(0, since_ms - 1)


def owing(members: Mapping[str, M], row: TaskRow, recorded: Collection[str]) -> list[M]:
    """Return the groups that are or were owed the task, including groups that have finished it or
    are being deleted. ``recorded`` contains the names of groups with a record of the task."""
    owed = list(members.values())
    if named_group(row) is not None:
        owed = [member for member in owed if owes(member, row)]
    elif len(owed) > 1:
        owed = [member for member in owed if owes(member, row)] or earliest(owed)
    owed = [member for member in owed if wants(member, row)]
    return [member for name, member in members.items() if member in owed or name in recorded]


def needs_place(members: Iterable[Member], row: TaskRow) -> bool:
    """Return whether a rescheduled task needs a new place, because it would wrongly miss a group,
    be held by a group that is being deleted, or be judged by a former filter."""
    named = named_group(row)
    return any(
        owes(member, row)
        if is_closed(member)
        else (member.since_id != BY_DUE_ALONE and not owes(member, row))
        or (member.settings is not None and any(is_before(f, row) for f in member.settings.former))
        for member in members
        if named is None or member.name == named
    )


def keeps_place(members: Iterable[Member], first_id: int) -> bool:
    """Return whether ``needs_place`` is certainly False for all tasks with ids from ``first_id`` on
    and without an ``order_id``, for any due times."""
    return not any(
        is_closed(member)
        or BY_DUE_ALONE > member.since_id >= first_id
        or (member.settings is not None and any(f.id >= first_id for f in member.settings.former))
        for member in members
    )


def is_done(snapshot: TaskSnapshot, group: Group) -> bool:
    """Return whether the group has finished a task that other groups have not finished."""
    progress = snapshot.progress.get(group.name)
    return progress is not None and progress.state.is_over


def newer_of(snapshot: TaskSnapshot) -> int | None:
    """Return the id of the newer task that has replaced a due task: 0 if the id is unknown, None if
    no task has replaced it. Groups without a record of a replaced task must not receive it."""
    rows = snapshot.progress.values()
    newer_id = max((row.replaced_by for row in rows), default=0)
    is_replaced = newer_id or any(row.state is ProgressState.REPLACED for row in rows)
    return newer_id if is_replaced else None


# --- the engine: groups and tasks in memory --------------------------------------------------


class Ownership:
    """Decides where groups start and end, which groups get a task, and when a task ends."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.unloaded_ms: int | None = None
        """Stored tasks due from this time on have not been put on the wheel; None if all have."""
        self.replays: list[Replay] = []
        """Replays that the shard has not begun."""
        self.stopped_ms = 0
        """The wheel's position before this start of the daemon."""
        self.started_ms = 0
        """The time of this start of the daemon, or ``stopped_ms`` if that is later."""

    # --- where groups begin and end ----------------------------------------------------------

    def unfired_ms(self) -> int:
        """Return a time before which every due task has fired."""
        core = self._core
        times = (
            core.wheel.first_ms(),
            self.unloaded_ms,
            min(core.firing.values(), default=None),
            min((ms for d in core.refiring.values() for ms in d.released.values()), default=None),
            min((row.due_ms for row in core.replaced.values()), default=None),
        )
        return min((at_ms for at_ms in times if at_ms is not None), default=ID_MAX)

    def start_from_now_ms(self, now_ms: int) -> int:
        """Return the start of a group that is owed tasks that come due from now on: the first due
        time that has not fired, or now if the clock is behind it."""
        core = self._core
        position_ms, first_ms = core.wheel.position_ms, self.unfired_ms()
        if now_ms < position_ms and core.ids.last > core.wheel_id:
            first_ms = now_ms  # staged tasks have not fired either
        return min(position_ms + 1, max(now_ms, first_ms))

    def begin(self, group: Group, since_ms: int, *, by_due: bool) -> None:
        """Set the start of a further group. ``by_due`` means that the start is in the future."""
        core, topic = self._core, group.topic
        group.since_ms = since_ms
        group.since_id = BY_DUE_ALONE if by_due else core.ids.last
        before, before_ms = moved_before(topic.groups.values(), since_ms)
        for other in before:
            other.since_ms = before_ms
            core.open.effects.put(GROUP, other.row())
        topic.made += 1
        if topic.live_groups and since_ms <= max(core.wheel.position_ms, core.acted_ms):
            replay = topic.replays[group] = Replay(group, core.ids.last, topic.made)
            self.replays.append(replay)

    def begin_first(self, group: Group, since_ms: int) -> None:
        """Set the start of a topic's first group, which is owed tasks that have already fired."""
        group.since_ms, group.since_id = since_ms, self._core.ids.last
        group.topic.made += 1

    def restore_start(self, group: Group, since_id: int) -> bool:
        """Restore the start of a group. Return whether a start in the future has now passed."""
        core = self._core
        group.topic.made += 1
        has_come = group.since_ms <= core.wheel.position_ms and not group.is_closed
        if since_id == BY_DUE_ALONE and has_come:
            group.since_id = core.ids.last
            return True
        group.since_id = since_id
        return False

    def end(self, group: Group) -> None:
        """Mark the group as being deleted, and record its place in the order."""
        core = self._core
        closed_ms = min(core.wheel.position_ms, self.unfired_ms() - 1)
        group.settings = group.settings._replace(closed_ms=closed_ms, closed_id=core.wheel_id)
        group.topic.closing += 1
        group.topic.replays.pop(group, None)

    def has_fired_all(self, group: Group) -> bool:
        """Return whether no task that the group held before a restart can still fire again."""
        closed_ms = group.settings.closed_ms
        return not group.was_restored or closed_ms is None or self.unfired_ms() > closed_ms

    def with_place(self, row: TaskRow, now_ms: int) -> TaskRow:
        """Return the row of a rescheduled task, with a new place if it needs one."""
        core = self._core
        if not needs_place(core.topic(row.topic).groups.values(), row):
            return row
        options = row.options or TaskOptions()
        return row._replace(options=options._replace(order_id=core.ids.take(1, now_ms)))

    def forget(self, task_id: int) -> None:
        """Forget the groups of a rescheduled task. They are determined again when it fires."""
        self._core.owed.pop(task_id, None)

    # --- filters -----------------------------------------------------------------------------

    def former_filters(self, group: Group, now_ms: int) -> tuple[FormerFilter, ...]:
        """Return the former filters of a group whose filter changes now, if a task needs them."""
        core, topic = self._core, group.topic
        due_ms = max(core.wheel.position_ms, self.stopped_ms, now_ms)
        # ``wheel_id`` is not enough: a rescheduled task on the wheel can have a later place.
        former_filters = with_former(group.settings, due_ms, core.ids.last)
        last_due_ms = max(former.due_ms for former in former_filters)
        if self.unfired_ms() > last_due_ms and not topic.deferred:
            if not any(each.holds_any for each in topic.groups.values()):
                return ()
        return former_filters

    def _wanting(self, topic: Topic, groups: list[Group], row: TaskRow) -> list[Group]:
        """Return the groups whose filters select the task. If no filter does, end the task."""
        self._core.steps_left -= topic.steps()
        wanting = [group for group in groups if group.judge is None or group.judge.wants(row)]
        if len(wanting) == len(groups):
            return wanting
        others = [group for group in groups if group not in wanting]
        for group in others:
            self._count_excluded(group, row, last=not wanting and group is others[-1])
        if not wanting:
            core = self._core
            core.lifetimes.end(row)
            core.end(row.id, Outcome.FILTERED, topic.name, key_of(row))
        return wanting

    def exclude_by_filter(self, group: Group, rows: list[TaskRow]) -> list[TaskRow]:
        """Return the rows that the group's filter selects, and end the other tasks. The tasks must
        be owed to this group alone, have no time to live, and not be created by a reset."""
        core, topic = self._core, group.topic.name
        if group.judge is None:
            return rows
        ours, others = group.judge.divided(rows)
        if others:
            group.filtered += len(others)
            core.totals.filtered += len(others)
            if core.is_recorded:
                for row in others:
                    core.recorder.ended(topic, group.name, FILTERED, row.id, last=True)
            for row in others:
                core.drop(row.id)
            keys = {row.id: key for row in others if (key := key_of(row)) is not None}
            core.end_plain([row.id for row in others], Outcome.FILTERED, topic, keys)
        return ours

    def exclude(self, group: Group, row: TaskRow) -> None:
        """Finish a task for ``group``, whose filter excludes it. It must already have been removed
        from the group's queues."""
        self._core.lifetimes.end(row)
        self._count_excluded(group, row, last=self.finish(group, row, Outcome.FILTERED))

    def _count_excluded(self, group: Group, row: TaskRow, *, last: bool) -> None:
        core = self._core
        group.filtered += 1
        core.totals.filtered += 1
        core.recorder.ended(group.topic.name, group.name, FILTERED, row.id, last=last)

    # --- a task fires ------------------------------------------------------------------------

    def assign(self, topic: Topic, live: list[Group], row: TaskRow) -> list[Group]:
        """Return the groups of ``live`` that get a fired task of a topic with several groups or
        filters. If no group gets it, end the task."""
        core = self._core
        core.steps_left -= len(live)
        order, due_ms = row.id if row.options is None else order_of(row), row.due_ms
        groups = live
        if len(live) > 1:
            groups = [group for group in live if order > group.since_id or due_ms >= group.since_ms]
            groups = groups or earliest(live)
        if topic.closing and self.owners_are_closed(topic, row):
            core.lifetimes.end(row)
            core.end_unowed(row)
            return []
        if topic.filtering:
            groups = self._wanting(topic, groups, row)
        # A running replay must know that the task fired after its group was created.
        if groups and (len(groups) > 1 or groups[0] is not topic.first_group or topic.replays):
            core.owed[row.id] = PendingGroups({group.name for group in groups}, topic.made)
        for _ in groups[1:]:
            core.lifetimes.begin(row)
        return groups

    def assign_replayed(self, topic: Topic, row: TaskRow) -> list[Group]:
        """Return the group that a reset's task names. If no group gets the task, end it."""
        core = self._core
        group = topic.groups.get(named_group(row) or "")
        if group is None or group.is_closed:
            core.lifetimes.end(row)
            core.end_unowed(row)
            return []
        groups = [group]
        if group.judge is not None:
            groups = self._wanting(topic, groups, row)
        if groups and group is not topic.first_group:
            core.owed[row.id] = PendingGroups({group.name}, topic.made)
        return groups

    def owners_are_closed(self, topic: Topic, row: TaskRow) -> bool:
        """Return whether a task fired again after a restart is owed only to groups being
        deleted."""
        owed = [group for group in topic.groups.values() if owes(group, row)]
        return bool(owed) and all(group.was_restored for group in owed)

    def restore(self, snapshot: TaskSnapshot) -> list[Group]:
        """Restore a task that has fired. Return the groups that have not finished it."""
        core, row = self._core, snapshot.row
        topic = core.topic(row.topic)
        groups = owing(topic.groups, row, snapshot.progress.keys() | snapshot.dead.keys())
        is_shared = len(groups) > 1 or groups[:1] != [topic.first_group]
        left = [g for g in groups if g.name not in snapshot.dead and not is_done(snapshot, g)]
        letters = self.keepers(snapshot)
        if is_shared and topic.default_backlog is None and (left or letters):
            owed = core.owed[row.id] = PendingGroups({group.name for group in left}, topic.made)
            owed.dead_lettered = len(letters)
        return left

    # --- the groups of a fired task ----------------------------------------------------------

    def groups_of(self, snapshot: TaskSnapshot) -> list[Group]:
        """Return the groups that have not finished a fired task."""
        core = self._core
        topic = core.topic(snapshot.row.topic)
        if topic.default_backlog is not None:
            return [topic.default_backlog]
        owed = core.owed.get(snapshot.row.id)
        if owed is not None:
            return [topic.groups[name] for name in owed.remaining]
        first = topic.first_group
        return [first] if first is not None and first.name not in snapshot.dead else []

    def keepers(self, snapshot: TaskSnapshot) -> list[Group]:
        """Return the existing groups that keep the task as a dead letter."""
        groups = self._core.topic(snapshot.row.topic).groups
        return [groups[name] for name in snapshot.dead if name in groups]

    def is_owed(self, group: Group, task_id: int) -> bool:
        """Return whether the group must still finish a fired task. Dead letters do not count."""
        owed = self._core.owed.get(task_id)
        return group is group.topic.first_group if owed is None else group.name in owed.remaining

    def shared_ids(self) -> Container[int]:
        """Return the ids of tasks that may be owed to groups other than their topic's first."""
        return self._core.owed

    def may_share(self, group: Group) -> bool:
        """Return whether the group's tasks might be owed to other groups as well."""
        return bool(self._core.owed or group.topic.replays)

    # --- a group finishes a task -------------------------------------------------------------

    def finish(
        self,
        group: Group,
        of: Lease | TaskRow,
        outcome: Outcome = Outcome.ACKED,
        *,
        offers: bool = True,
    ) -> bool:
        """Finish a task for ``group``. Return whether the task has ended. ``offers``: replays that
        have not examined it can get it."""
        core, task_id, made = self._core, of.id, 0
        owed = core.owed.get(task_id)
        if owed is not None:
            was_owed = group.name in owed.remaining
            owed.remaining.discard(group.name)
            if not owed.remaining:
                core.drop(task_id)
            if owed.remaining or owed.dead_lettered:
                if was_owed and not owed.remaining:
                    core.count_unfinished(group.topic.name, -1)
                return False
            made = owed.made
        if offers and group.topic.replays and self._give_to_replays(group, of, made):
            return False
        key = of.traits.key if isinstance(of, Lease) else key_of(of)
        core.end(task_id, outcome, group.topic.name, key)
        return True

    def give_way(
        self, group: Group, of: Lease | TaskRow, attempt: int, by: int, after: str = ""
    ) -> None:
        """Finish a task for ``group`` that the newer task ``by`` (0: unknown) replaces. It must
        already have been removed from the group's queues. ``after`` describes how its last delivery
        ended."""
        core, topic = self._core, group.topic
        last = self.finish(group, of, Outcome.CANCELLED, offers=False)
        if last:
            core.totals.cancelled += 1
            topic.cancelled += 1
        else:
            core.note_done(of.id, group, attempt, 0, ProgressState.REPLACED)
        reason = f"replaced by {by or 'a newer task'}" + (f"; {after}" if after else "")
        core.recorder.ended(topic.name, group.name, CANCELLED, of.id, last=last, reason=reason)

    def to_dead_letters(self, group: Group, task_id: int) -> None:
        """Record that the task is a dead letter of the group, which is no longer owed it."""
        owed = self._core.owed.get(task_id)
        if owed is not None:
            owed.remaining.discard(group.name)
            owed.dead_lettered += 1
            if not owed.remaining:
                self._core.drop(task_id)
        if owed is None or not owed.remaining:
            self._core.schedule_heap.ended((task_id,))
            self._core.count_unfinished(group.topic.name, -1)

    def from_dead_letters(self, group: Group, task_id: int, *, is_owed: bool) -> None:
        """Record that the task is no longer a dead letter of the group. If ``is_owed`` is
        true, the group is owed it again; if not, the caller must finish it."""
        owed = self._core.owed.get(task_id)
        if owed is None:
            self._core.count_unfinished(group.topic.name, 1)
            return
        owed.dead_lettered -= 1
        if not owed.remaining and (is_owed or not owed.dead_lettered):
            self._core.count_unfinished(group.topic.name, 1)
        if is_owed:
            owed.remaining.add(group.name)

    # --- replays -----------------------------------------------------------------------------

    def _give_to_replays(self, group: Group, of: Lease | TaskRow, made: int) -> bool:
        """Give a task that its last group finishes to the replays that have not examined it. Return
        whether a replay claims it. The task waits in ``loading``, where acks and cancels find it,
        until the replay reaches it."""
        core, topic, task_id = self._core, group.topic, of.id
        traits = of.traits if isinstance(of, Lease) else traits_of(of)
        if traits.is_replayed or (isinstance(of, Lease) and of.past.replaced_by):
            return False
        claiming = [
            replay
            for replay in topic.replays.values()
            if replay.group is not group and replay.claims(task_id, of.due_ms, made)
        ]
        if not claiming:
            return False
        core.drop(task_id)
        core.owed[task_id] = PendingGroups({replay.group.name for replay in claiming}, topic.made)
        for replay in claiming:
            replay.given += 1
            replay.group.loading[task_id] = traits.priority
            if traits.ttl_end_ms is not None:
                core.lifetimes.add(task_id, traits.ttl_end_ms)
        return True

    def examine_page(
        self, replay: Replay, page: Sequence[TaskSnapshot], last_id: int | None, now_ms: int
    ) -> None:
        """Examine the next page of tasks, by id, for a replay. ``last_id`` is the last id of the
        page, or None if the page is the last one."""
        group, replays = replay.group, replay.group.topic.replays
        if replays.get(group) is not replay:
            return
        for snapshot in page:
            if snapshot.row.id <= replay.mark:
                self._examine(replay, snapshot, now_ms)
        replay.note_page(page[0].row.id if page else 0, len(page), last_id)
        if replay.is_over:
            del replays[group]
            if group.is_ordered:
                self._core.orderings.by_group[group].keys.replay_ended()
        self._core.wake(group)

    def examine_ahead(self, snapshot: TaskSnapshot, now_ms: int) -> None:
        """Let replays examine a task ahead of a change that must apply to all of its groups."""
        for replay in self._core.topic(snapshot.row.topic).replays.values():
            if replay.is_ahead(snapshot.row.id):
                self._examine(replay, snapshot, now_ms)
                replay.seen.add(snapshot.row.id)

    def _examine(self, replay: Replay, snapshot: TaskSnapshot, now_ms: int) -> None:
        """Give a task to a replay's group if the group is owed it and missed its firing."""
        core, row, group = self._core, snapshot.row, replay.group
        owed = core.owed.get(row.id)
        if row.id in replay.seen or (owed is not None and owed.made >= replay.made):
            # The task fired, or reached this group, after the group was created.
            if row.id in core.orderings.rejoining_ids(group):
                return  # the task becomes ready when the notes of its key are durable
            if group.loading.pop(row.id, None) is not None:
                self._settle(group, snapshot, now_ms)
            return
        if not owes(group, row) or group.name in snapshot.dead or is_done(snapshot, group):
            return
        # A durable task that is not on the wheel yet will fire for the group.
        if row.id > core.wheel_id or core.is_scheduled(row):
            return
        owners = self.groups_of(snapshot)
        if group in owners:
            return
        if not wants(group, row):
            self._count_excluded(group, row, last=False)
            return
        if not owners:
            core.count_unfinished(row.topic, 1)  # it was only a dead letter elsewhere
        if owed is None:
            owed = core.owed[row.id] = PendingGroups({owner.name for owner in owners}, 0)
            owed.dead_lettered = len(self.keepers(snapshot))
            for owner in owners:
                if owner in group.topic.replays:
                    group.topic.replays[owner].seen.add(row.id)
        owed.remaining.add(group.name)
        replay.given += 1
        leases = [owner.flight[row.id] for owner in owners if row.id in owner.flight]
        newer_id = max((lease.past.replaced_by for lease in leases), default=0)
        replaced_by = newer_id or newer_of(snapshot)
        if replaced_by is not None:
            self.give_way(group, row, core.take_number(group, row.id), replaced_by)
            return
        core.add_due(group, row, now_ms)
        core.lifetimes.begin(row)

    def _settle(self, group: Group, snapshot: TaskSnapshot, now_ms: int) -> None:
        """Make a task ready that waited in ``loading`` for the replay."""
        core, row = self._core, snapshot.row
        if not is_done(snapshot, group):
            if wants(group, row):
                core.add_due(group, row, now_ms)
            else:
                self.exclude(group, row)
            return
        core.lifetimes.end(row)
        self.finish_done(group, snapshot)

    def finish_done(self, group: Group, snapshot: TaskSnapshot) -> None:
        """Finish a task for a group because a former group of the same name had finished it. The
        task ends as acked if any group has acked it, otherwise as it ended in the former group."""
        task_id, progress = snapshot.row.id, snapshot.progress[group.name]
        is_acked = any(each.is_acked for each in snapshot.progress.values())
        last = self.finish(group, snapshot.row, Outcome.ACKED if is_acked else progress.outcome)
        recorder = self._core.recorder
        if progress.is_acked:
            recorder.acked_without_lease(group, task_id, progress.attempt, ended=last)
        else:
            event = EXPIRED if progress.outcome is Outcome.EXPIRED else DELETED
            recorder.ended(group.topic.name, group.name, event, task_id, last=last)
