"""Which groups owe a task an end: every rule about it, in one place.

Engine, recovery, restore and tests ask here; nobody else compares a group with a task. What
follows rests on an order that never goes back, and on no clock: ids are assigned in that order
by this daemon, by the next one, and after a clock was set back.

Rules, for what is durable (a group's row, a task's row):

1. **Place.** A task's place in the order is its id. A task that an operator moved to a time at
   which a group would wrongly miss it (or a group being deleted would wrongly hold it) gets a
   new, later place, ``TaskOptions.order_id``; hardly any task has one.
2. **Start.** A group is owed what stands behind ``since_id``, the newest id when it was made,
   and of what stands before that, what is due at ``since_ms`` or later. For a group that begins
   now that is the first due time that the wheel had not fired, wherever the clock was. For a
   start in the future it is that time alone (``BY_DUE_ALONE``), until a restart after it.
3. **End.** A group that is being deleted is owed nothing behind ``closed_id``, and nothing that
   is due after ``closed_ms``: no task that had not fired then, so what is scheduled never ends
   with a group.
4. **Nobody.** What no group is owed by 2 and 3 goes to the live groups that begin earliest by
   due time. Who is earliest stays earliest: when a group is made that begins before it, its
   own start moves before that one.
5. **First.** The first group of a topic begins at 0. While a topic has only one group, that
   group gets everything.
6. **Filter.** Of what a group is owed by 1 to 5 its filter leaves out what it does not want. Which
   filter that is, follows from the task's due time and place (``model.filters``); a task that was
   moved, and that a former filter would wrongly judge, gets a new place. What a group has a record
   of it was owed. A task that every group's filter leaves out ends.
7. **Again.** A task that stands for another (``TaskOptions.replayed``) is owed to the group that
   it names and to nobody else, wherever that group begins. Its filter holds. Without the group
   the task ends.

Rules, for what is in memory:

8. **Firing decides.** When a task fires, the groups that are owed it by the rules get it.
   ``Core.owed`` names them, unless it is the topic's first group alone. After a crash what has
   no record fires anew, and what has one is owed to the groups of the rules and of its records.
9. **Replay.** A group that begins in the past is owed tasks that have fired without it. Every
   task with an id up to ``Replay.mark`` is looked at in the background. Until it has been, the
   replay counts as an owner: what another group ends of its tasks goes on as this group's
   alone. A crash needs no memory of a replay: by 8 the row of the group says the same.
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
    """A group as the rules see it: the engine's group, or its stored row."""

    @property
    def name(self) -> str: ...

    @property
    def since_ms(self) -> int: ...

    @property
    def since_id(self) -> int: ...

    @property
    def settings(self) -> GroupSettings | None: ...


M = TypeVar("M", bound=Member)

# --- the rules: groups and tasks as they are stored ------------------------------------------


def is_closed(member: Member) -> bool:
    """Whether the group is being deleted."""
    return member.settings is not None and member.settings.closed_ms is not None


def owes(member: Member, row: TaskRow) -> bool:
    """Whether the group is owed the task, by its start and its end."""
    order, settings = order_of(row), member.settings
    if settings is not None and settings.closed_ms is not None:
        if row.due_ms > settings.closed_ms or order > settings.closed_id:
            return False
    named = named_group(row)
    if named is not None:
        return member.name == named
    return order > member.since_id or row.due_ms >= member.since_ms


def named_group(row: TaskRow) -> str | None:
    """The one group that is owed a replayed task, which stands for another; None: any may be."""
    options = row.options
    return None if options is None or options.replayed is None else options.replayed.group


def wants(member: Member, row: TaskRow) -> bool:
    """Whether the group's filter lets the task pass."""
    judge = member.judge if isinstance(member, Group) else judge_of(member.settings)
    return judge is None or judge.wants(row)


def earliest(members: Iterable[M]) -> list[M]:
    """The groups with the earliest start, of those that are not being deleted."""
    live = [member for member in members if not is_closed(member)]
    since_ms = min((member.since_ms for member in live), default=0)
    return [member for member in live if member.since_ms == since_ms]


def moved_before(members: Iterable[M], since_ms: int) -> tuple[list[M], int]:
    """The earliest groups, if a new one that begins at ``since_ms`` would be earlier, and when
    they begin then."""
    found = [member for member in earliest(members) if member.since_ms > since_ms]
    return found, max(0, since_ms - 1)


def owing(members: Mapping[str, M], row: TaskRow, recorded: Collection[str]) -> list[M]:
    """The groups that are owed the task or were, finished or not, those that are being deleted
    included. ``recorded``: names of those that have a record of it."""
    owed = list(members.values())
    if named_group(row) is not None:
        owed = [member for member in owed if owes(member, row)]
    elif len(owed) > 1:
        owed = [member for member in owed if owes(member, row)] or earliest(owed)
    owed = [member for member in owed if wants(member, row)]
    return [member for name, member in members.items() if member in owed or name in recorded]


def needs_place(members: Iterable[Member], row: TaskRow) -> bool:
    """Whether a task that is scheduled anew would miss a group that is there, be held by one that
    is being deleted, or be judged by a filter that was changed before."""
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
    """Whether ``needs_place`` is certainly False of tasks without a place of their own whose ids
    are ``first_id`` and above, whatever their due times."""
    return not any(
        is_closed(member)
        or BY_DUE_ALONE > member.since_id >= first_id
        or (member.settings is not None and any(f.id >= first_id for f in member.settings.former))
        for member in members
    )


def is_done(known: TaskSnapshot, group: Group) -> bool:
    """Whether the group has finished the task while other groups still owe an end."""
    progress = known.progress.get(group.name)
    return progress is not None and progress.state.is_over


# --- the engine: groups and tasks in memory --------------------------------------------------


class Ownership:
    """Decides where groups start and end, who gets a firing task, and what ending a share means."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.unloaded_ms: int | None = None
        """Stored tasks due from this time on may not be on the wheel yet; None: all are."""
        self.replays: list[Replay] = []
        """Replays that the shard has not begun."""
        self.stopped_ms = 0
        """The wheel's position, in ms, before this start."""

    # --- where groups begin and end ----------------------------------------------------------

    def unfired_ms(self) -> int:
        """No task that has not fired is due before this time."""
        core = self._core
        times = (
            core.wheel.first_ms(),
            self.unloaded_ms,
            min(core.firing.values(), default=None),
            min((row.due_ms for row in core.replaced.values()), default=None),
        )
        return min((at_ms for at_ms in times if at_ms is not None), default=ID_MAX)

    def from_now_ms(self, now_ms: int) -> int:
        """The start of a group that is owed what comes due from now on: the first due time that
        has not fired, or now if the clock is behind that."""
        core = self._core
        position_ms, first_ms = core.wheel.position_ms, self.unfired_ms()
        if now_ms < position_ms and core.ids.last > core.wheel_id:
            first_ms = now_ms  # what is staged has not fired either
        return min(position_ms + 1, max(now_ms, first_ms))

    def begin(self, group: Group, since_ms: int, *, by_due: bool) -> None:
        """A further group of its topic was made; ``by_due``: its start lies in the future."""
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
        """Begin the first group of a topic, which owns what has fired while there was none."""
        group.since_ms, group.since_id = since_ms, self._core.ids.last
        group.topic.made += 1

    def begin_again(self, group: Group, since_id: int) -> bool:
        """Begin a group after a restart. True: its start was in the future and has come just
        now."""
        core = self._core
        group.topic.made += 1
        has_come = group.since_ms <= core.wheel.position_ms and not group.is_closed
        if since_id == BY_DUE_ALONE and has_come:
            group.since_id = core.ids.last
            return True
        group.since_id = since_id
        return False

    def end(self, group: Group) -> None:
        """Mark the group as being deleted, with its place in the order."""
        core = self._core
        closed_ms = min(core.wheel.position_ms, self.unfired_ms() - 1)
        group.settings = group.settings._replace(closed_ms=closed_ms, closed_id=core.wheel_id)
        group.topic.closing += 1
        group.topic.replays.pop(group, None)

    def is_past(self, group: Group) -> bool:
        """Whether no task that the group held before a restart can still fire anew."""
        closed_ms = group.settings.closed_ms
        return not group.was_restored or closed_ms is None or self.unfired_ms() > closed_ms

    def moved(self, row: TaskRow, now_ms: int) -> TaskRow:
        """The row of a task that has just got another due time, with a new place if needed."""
        core = self._core
        if not needs_place(core.topic(row.topic).groups.values(), row):
            return row
        options = row.options or TaskOptions()
        return row._replace(options=options._replace(order_id=core.ids.take(1, now_ms)))

    def forget(self, task_id: int) -> None:
        """Forget who owes a task that is scheduled anew: that is decided when it fires."""
        self._core.owed.pop(task_id, None)

    # --- filters -----------------------------------------------------------------------------

    def former(self, group: Group, now_ms: int) -> tuple[FormerFilter, ...]:
        """The former filters of a group that gets another one; none while nothing is due."""
        core, topic = self._core, group.topic
        due_ms = max(core.wheel.position_ms, self.stopped_ms, now_ms)
        # Not ``wheel_id``: a task that was moved has a later place, and is on the wheel as well.
        found = with_former(group.settings, due_ms, core.ids.last)
        if self.unfired_ms() > max(one.due_ms for one in found) and not topic.deferred:
            if not any(one.holds_any for one in topic.groups.values()):
                return ()
        return found

    def _wanting(self, topic: Topic, groups: list[Group], row: TaskRow) -> list[Group]:
        """The groups whose filters let the task pass. If none does, the task has ended."""
        self._core.steps_left -= topic.steps()
        found = [group for group in groups if group.judge is None or group.judge.wants(row)]
        if len(found) == len(groups):
            return found
        others = [group for group in groups if group not in found]
        for group in others:
            self._count_left_out(group, row, last=not found and group is others[-1])
        if not found:
            core = self._core
            core.lifetimes.end(row)
            core.end(row.id, Outcome.FILTERED, topic.name, key_of(row))
        return found

    def divide(self, group: Group, rows: list[TaskRow]) -> list[TaskRow]:
        """The rows that the group's filter lets pass; the other tasks have ended. For tasks that
        are its alone, without a time to live, and do not stand for others."""
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

    def leave_out(self, group: Group, row: TaskRow) -> None:
        """End the share of ``group`` in a task that was taken out, and that its filter refuses."""
        self._core.lifetimes.end(row)
        self._count_left_out(group, row, last=self.finish(group, row, Outcome.FILTERED))

    def _count_left_out(self, group: Group, row: TaskRow, *, last: bool) -> None:
        core = self._core
        group.filtered += 1
        core.totals.filtered += 1
        core.recorder.ended(group.topic.name, group.name, FILTERED, row.id, last=last)

    # --- a task fires ------------------------------------------------------------------------

    def assign(self, topic: Topic, live: list[Group], row: TaskRow) -> list[Group]:
        """The groups of ``live`` that get a task on a topic with several groups, or with a filter.
        If there is none, the task has ended."""
        core = self._core
        order, due_ms = row.id if row.options is None else order_of(row), row.due_ms
        groups = live
        if len(live) > 1:
            groups = [group for group in live if order > group.since_id or due_ms >= group.since_ms]
            groups = groups or earliest(live)
        if topic.closing and self.was_closed(topic, row):
            core.lifetimes.end(row)
            core.end_unowed(row)
            return []
        if topic.filtering:
            groups = self._wanting(topic, groups, row)
        if groups and (len(groups) > 1 or groups[0] is not topic.first_group):
            core.owed[row.id] = PendingGroups({group.name for group in groups}, topic.made)
        for _ in groups[1:]:
            core.lifetimes.begin(row)
        return groups

    def assign_again(self, topic: Topic, row: TaskRow) -> list[Group]:
        """The group that a replayed task names, if it is there. If not, the task has ended."""
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

    def was_closed(self, topic: Topic, row: TaskRow) -> bool:
        """Whether only groups that are being deleted owe a task, which a restart made due again."""
        owed = [group for group in topic.groups.values() if owes(group, row)]
        return bool(owed) and all(group.was_restored for group in owed)

    def restore(self, known: TaskSnapshot) -> list[Group]:
        """The groups that still owe a task that had fired before a restart."""
        core, row = self._core, known.row
        topic = core.topic(row.topic)
        groups = owing(topic.groups, row, known.progress.keys() | known.dead.keys())
        is_shared = len(groups) > 1 or groups[:1] != [topic.first_group]
        left = [g for g in groups if g.name not in known.dead and not is_done(known, g)]
        letters = self.keepers(known)
        if is_shared and topic.default_backlog is None and (left or letters):
            owed = core.owed[row.id] = PendingGroups({group.name for group in left}, topic.made)
            owed.dead_lettered = len(letters)
        return left

    # --- who has it --------------------------------------------------------------------------

    def groups_of(self, known: TaskSnapshot) -> list[Group]:
        """The groups that still owe an end for a task that has fired."""
        core = self._core
        topic = core.topic(known.row.topic)
        if topic.default_backlog is not None:
            return [topic.default_backlog]
        owed = core.owed.get(known.row.id)
        if owed is not None:
            return [topic.groups[name] for name in owed.remaining]
        first = topic.first_group
        return [first] if first is not None and first.name not in known.dead else []

    def keepers(self, known: TaskSnapshot) -> list[Group]:
        """The groups that keep the task as a dead letter. Records of groups that are gone do not
        count."""
        groups = self._core.topic(known.row.topic).groups
        return [groups[name] for name in known.dead if name in groups]

    def is_owed(self, group: Group, task_id: int) -> bool:
        """Whether the group owes an end for a task that has fired and is no dead letter."""
        owed = self._core.owed.get(task_id)
        return group is group.topic.first_group if owed is None else group.name in owed.remaining

    def shared(self) -> Container[int]:
        """The ids of tasks that others than the first group of their topic may be owed."""
        return self._core.owed

    def may_share(self, group: Group) -> bool:
        """Whether there may be tasks that the group owes an end and that are not its alone."""
        return bool(self._core.owed or group.topic.replays)

    # --- the end of a share ------------------------------------------------------------------

    def finish(self, group: Group, of: Lease | TaskRow, outcome: Outcome = Outcome.ACKED) -> bool:
        """``group`` is done with a task. True: that ended the task. False: other groups have it."""
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
        if group.topic.replays and self._goes_on(group, of, made):
            return False
        key = of.traits.key if isinstance(of, Lease) else key_of(of)
        core.end(task_id, outcome, group.topic.name, key)
        return True

    def give_way(
        self, group: Group, of: Lease | TaskRow, attempt: int, by: int, after: str = ""
    ) -> None:
        """End the share of ``group`` in a task that the newer task ``by`` replaces; it is out
        already. ``after``: how its last delivery ended."""
        core, topic = self._core, group.topic
        last = self.finish(group, of, Outcome.CANCELLED)
        if last:
            core.totals.cancelled += 1
            topic.cancelled += 1
        else:
            core.note_done(of.id, group, attempt, 0, ProgressState.REPLACED)
        reason = f"replaced by {by}" + (f"; {after}" if after else "")
        core.recorder.ended(topic.name, group.name, CANCELLED, of.id, last=last, reason=reason)

    def to_dead_letters(self, group: Group, task_id: int) -> None:
        """The task is a dead letter of the group now, which owes no end for it any more."""
        owed = self._core.owed.get(task_id)
        if owed is not None:
            owed.remaining.discard(group.name)
            owed.dead_lettered += 1
            if not owed.remaining:
                self._core.drop(task_id)
        if owed is None or not owed.remaining:
            self._core.schedule_heap.ended((task_id,))
            self._core.count_unfinished(group.topic.name, -1)

    def from_dead_letters(self, group: Group, task_id: int, *, owes_it: bool) -> None:
        """The task is no dead letter of the group any more; ``owes_it``: it is the group's again,
        else the caller ends the group's share of it."""
        owed = self._core.owed.get(task_id)
        if owed is None:
            self._core.count_unfinished(group.topic.name, 1)
            return
        owed.dead_lettered -= 1
        if not owed.remaining and (owes_it or not owed.dead_lettered):
            self._core.count_unfinished(group.topic.name, 1)
        if owes_it:
            owed.remaining.add(group.name)

    # --- replays -----------------------------------------------------------------------------

    def _goes_on(self, group: Group, of: Lease | TaskRow, made: int) -> bool:
        """The last share ends before a replay has looked at the task: now it is that group's.

        It lies in ``loading``, where acks and cancels find it, until the replay comes to it.
        """
        core, topic, task_id = self._core, group.topic, of.id
        traits = of.traits if isinstance(of, Lease) else traits_of(of)
        if traits.is_again:
            return False
        heirs = [
            replay
            for replay in topic.replays.values()
            if replay.group is not group and replay.claims(task_id, of.due_ms, made)
        ]
        if not heirs:
            return False
        core.drop(task_id)
        core.owed[task_id] = PendingGroups({replay.group.name for replay in heirs}, topic.made)
        for replay in heirs:
            replay.given += 1
            replay.group.loading[task_id] = traits.priority
            if traits.ttl_end_ms is not None:
                core.lifetimes.add(task_id, traits.ttl_end_ms)
        return True

    def replayed(
        self, replay: Replay, page: Sequence[TaskSnapshot], following: int | None, now_ms: int
    ) -> None:
        """Look at the next tasks, by id, of the topic of a replay; ``following``: the last id of
        the page, or None when there are no more."""
        group, replays = replay.group, replay.group.topic.replays
        if replays.get(group) is not replay:
            return
        for known in page:
            if known.row.id <= replay.mark:
                self._look_at(replay, known, now_ms)
        replay.passed(page[0].row.id if page else 0, len(page), following)
        if replay.is_over:
            del replays[group]
            if group.is_ordered:
                self._core.orderings.of[group].keys.gathered()
        self._core.wake(group)

    def look_ahead(self, known: TaskSnapshot, now_ms: int) -> None:
        """Let replays look at a task whose next change has to happen in all of its groups."""
        for replay in self._core.topic(known.row.topic).replays.values():
            if replay.is_ahead(known.row.id):
                self._look_at(replay, known, now_ms)
                replay.seen.add(known.row.id)

    def _look_at(self, replay: Replay, known: TaskSnapshot, now_ms: int) -> None:
        """Give a task to a replay's group that is owed it and may have missed it when it fired."""
        core, row, group = self._core, known.row, replay.group
        owed = core.owed.get(row.id)
        if row.id in replay.seen or (owed is not None and owed.made >= replay.made):
            # It fired, or came to this group, since the group is there.
            if row.id in core.orderings.coming(group):
                return  # by itself, when what it waits for is durable
            if group.loading.pop(row.id, None) is not None:
                self._settle(group, known, now_ms)
            return
        if not owes(group, row) or group.name in known.dead or is_done(known, group):
            return
        # What is durable and not on the wheel yet fires with the group there, too.
        if row.id > core.wheel_id or core.is_scheduled(row):
            return
        owners = self.groups_of(known)
        if group in owners:
            return
        if not wants(group, row):
            self._count_left_out(group, row, last=False)
            return
        if not owners:
            core.count_unfinished(row.topic, 1)  # it was a dead letter of others only
        if owed is None:
            owed = core.owed[row.id] = PendingGroups({owner.name for owner in owners}, 0)
            owed.dead_lettered = len(self.keepers(known))
            for owner in owners:
                if owner in group.topic.replays:
                    group.topic.replays[owner].seen.add(row.id)
        owed.remaining.add(group.name)
        replay.given += 1
        core.come(group, row, now_ms)
        core.lifetimes.begin(row)

    def _settle(self, group: Group, known: TaskSnapshot, now_ms: int) -> None:
        """Make a task ready that lay in ``loading`` for the replay after others had ended it."""
        core, row = self._core, known.row
        if not is_done(known, group):
            if wants(group, row):
                core.come(group, row, now_ms)
            else:
                self.leave_out(group, row)
            return
        core.lifetimes.end(row)
        self.finish_done(group, known)

    def finish_done(self, group: Group, known: TaskSnapshot) -> None:
        """End the task's share in a group when a former group of the same name was done with it:
        as acked when any group has acked it, else as it ended there."""
        task_id, progress = known.row.id, known.progress[group.name]
        is_acked = any(one.is_acked for one in known.progress.values())
        last = self.finish(group, known.row, Outcome.ACKED if is_acked else progress.outcome)
        recorder = self._core.recorder
        if progress.is_acked:
            recorder.acked_idle(group, task_id, progress.attempt, ended=last)
        else:
            how = EXPIRED if progress.outcome is Outcome.EXPIRED else DELETED
            recorder.ended(group.topic.name, group.name, how, task_id, last=last)
