"""Order keys and fair shares of a group, which determine which due tasks can be delivered.

A task passes two stages before it is ready. If it has an order key, it waits until every earlier
task of that key is finished (``KeyHolders``). If the group has ``fair_by``, it waits until its
value has a place (``FairShares``). ``Ordering`` combines both stages for a group; a group that
needs neither has no ``Ordering`` (``Group.is_ordered``). ``Preferences`` selects the subscriber for
the tasks of a key. Operators' commands are in ``tasks.py``.

A *paused* key was paused by an operator (``KeyPauses``); it is an order key or a value of
``fair_by``. A *held* key is an order key whose task has failed for good and waits for an operator
(``Ordering.held``). A key can be both. The tasks of a paused key come due and wait for their turn;
instead of being delivered they are *kept back* until the key is resumed. Tasks in flight stay in
flight and can be settled.

Invariants:

* One task of each order key is the *key holder*. It is ready, in flight, waiting for a retry or
  held, and stays the holder until the group has finished it. The next task becomes the holder when
  the end is durable. So even after a crash, no earlier task is delivered again after a later one.
* A task that was attempted stays the holder even if it is rescheduled. A holder that has no
  attempts gives way to a task that arrived after it and is due before it.
* A task in a key queue counts as ready (``Group.awaiting_turn``) and is in no other queue.
* With ``limit_each``, the *called* tasks of a value (those in the ready queue) and its tasks in
  flight together never exceed the limit.
* A task that is kept back counts as ready (``Group.awaiting_turn``), is in no queue of the group,
  and takes no place of its value. It can be the holder of its order key. While no key of the group
  is paused, this costs nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain, compress, islice, repeat
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.queues import NOBODY, Bucket, KeyPartitions, Order, Share, adjusted_bucket
from tickwheel.engine.topics import (
    PLAIN,
    WAITED,
    Group,
    Lease,
    Subscriber,
    Traits,
    priority_of,
    traits_of,
)
from tickwheel.model.lateness import LATE_MS, Cause, HoldIntervals
from tickwheel.model.records import FAIR_BY_KEY, FAIR_BY_TAG, columns_of, is_absent, order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tickwheel.model.kinds import PausedKey
    from tickwheel.model.records import Columns, GroupSettings, TaskRow

CALLED_MAX, CALLED_TOTAL_MAX = 64, 256
"""Maximum number of called tasks of one value, and approximate maximum for all values together."""
LAST_SUBSCRIBERS_MAX = 65_536
"""Maximum number of keys whose last subscriber is remembered."""
AGES_EXAMINED_MAX = 256
"""Maximum number of queues, and of values, that are searched for the oldest task."""
NEVER_MS = 1 << 62
"""A time in the unreachable future, such as the next attempt of a held task."""
EVERY_KEY = 1 << 64
"""A mark that stands for all keys of a group. The marks of keys have only 64 bits."""
REMEMBERED_MAX = 64
"""Maximum resumed keys of a group whose pause is remembered in order to explain late tasks."""


class Waiting(NamedTuple):
    """The key and the share of a task that waits for its next attempt."""

    key_mark: int
    share_mark: int
    due_ms: int
    position: int


KeysToAdvance = tuple["KeyHolders", list[int]]
"""(key holders, marks of changed keys that can advance when the batch is durable)."""


def mark_of(row: TaskRow) -> int:
    """Return the mark of a task's order key, or 0 if it has none."""
    options = row.options
    if options is None or options.order_key is None:
        return 0
    return hash(options.order_key) or 1


def marks_of(columns: Columns) -> list[int] | None:
    """Return the marks of the order keys of these tasks, or None if no task has a key. If the
    result contains a 0, it is incomplete, and the tasks must be examined one by one."""
    if is_absent(columns.order_key):
        return None
    return list(map(hash, columns.order_key)) if all(columns.order_key) else [0]


def mark_of_key(fair_by: str | None, value: object) -> int:
    """Return the mark of an order key (``fair_by`` is None) or of a value of ``fair_by``."""
    hashed = value if fair_by is None else (fair_by, type(value) is bool, value)
    return hash(hashed) or 1


class FairShares:
    """The fair shares of a group: how many places in the ready queue each value of ``fair_by``
    gets. Without ``fair_by``, a task is ready at once."""

    def __init__(self, orderings: Orderings, group: Group) -> None:
        self._orderings = orderings
        self._group = group
        self._paused = group.paused_keys
        self.by_mark: dict[int, Share] = {}
        """Mark → share of each value that has tasks or a rate."""
        self.called: dict[int, Share] = {}
        """Id → share of each task in the ready queue that has a share."""
        self.unshared: set[int] | None = None
        """Ids of the ready tasks that have no share, perhaps because they entered the ready queue
        before ``fair_by`` was set. ``withdraw`` builds the set when it first needs it."""
        self._heap: list[tuple[int, int]] = []
        """(steady ms, mark) of shares that wait for a token."""
        self.waited_ids: set[int] = set()
        """Ids of ready tasks that became late while they waited in a key queue or for a place."""
        self.now_ms = self._mono_ms = 0
        """The latest times of the wall clock and of the steady clock passed to this object."""

    def mark_of(self, row: TaskRow) -> int:
        """Return the mark of a task's value, or 0 without ``fair_by``."""
        by = self._group.settings.shares.fair_by
        return 0 if by is None else mark_of_key(by, shared_value(row, by))

    @property
    def may_apply(self) -> bool:
        """Whether a ready task might have a share."""
        return bool(self.called) or self._group.settings.shares.fair_by is not None

    # --- a task arrives ----------------------------------------------------------------------

    def call(self, task_id: int, mark: int, priority: int, *, front: bool) -> None:
        """Make a task ready if its value has a place; otherwise let it wait for one. The task must
        have no order key or be the holder of its key."""
        group, unshared = self._group, self.unshared
        if mark:
            if unshared:
                unshared.discard(task_id)
            share = self._share(mark)
            if not self._has_place(share) or (share.queue is not None and not front):
                share.put(task_id, priority, self.now_ms, front=front)
                group.awaiting_turn += 1
                return
            share.called += 1
            self.called[task_id] = share
        elif unshared is not None:
            unshared.add(task_id)
        if front:
            group.ready.push_front(task_id, priority)
        else:
            group.ready.push(task_id, priority, self.now_ms)

    def restored(self, mark: int) -> Share | None:
        """Count a task that was in flight before a restart. Return its share, if it has one."""
        share = self._share(mark) if mark else None
        if share is not None:
            share.in_flight += 1
        return share

    # --- a task leaves -------------------------------------------------------------------------

    def leave_ready(self, task_id: int, mono_ms: int) -> Share | None:
        """Count a task that goes from the ready queue into flight. Return its share, or None if it
        has none. The call can be skipped while ``called`` and ``unshared`` are empty."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        share = self.called.pop(task_id, None)
        if share is not None:
            share.called -= 1
            share.in_flight += 1
            if share.bucket is not None:
                share.bucket.left(mono_ms)
                share.bucket.take(1)
            self._admit(share)
        elif self.unshared:
            self.unshared.discard(task_id)
        return share

    def uncall(self, task_id: int) -> bool:
        """Remove a task from the called tasks. Return whether it was called."""
        share = self.called.pop(task_id, None)
        if share is None:
            return False
        share.called -= 1
        self._admit(share)
        return True

    def drop_undelivered(self, task_id: int) -> None:
        """Uncount a task that was taken from the ready queue but is not delivered."""
        self.waited_ids.discard(task_id)
        if not self.uncall(task_id) and self.unshared:
            self.unshared.discard(task_id)

    def withdraw(self, row: TaskRow) -> bool:
        """Remove a task that is not called. Return whether it was waiting for a place of its value,
        and so was not in the ready queue."""
        share = self.by_mark.get(self.mark_of(row))
        if (
            share is None
            or share.queue is None
            or row.id in self._group.loading
            or row.id in self._find_unshared()
        ):
            if self.unshared:
                self.unshared.discard(row.id)
            return False
        share.withdraw(row.id, priority_of(row))
        self._group.awaiting_turn -= 1
        self._prune(share)
        return True

    def _find_unshared(self) -> set[int]:
        """Return ``unshared``, after building it if needed."""
        if self.unshared is None:
            ready = self._group.ready
            ready.drop_stale()
            ids = chain.from_iterable(level.peek(len(level)) for level in ready.levels().values())
            self.unshared = {*ids, *self._group.loading} - self.called.keys()
        return self.unshared

    def leases_ended(self, leases: Collection[Lease]) -> None:
        """Free the places of ended leases."""
        for lease in leases if self.by_mark else ():
            share = lease.traits.share
            if share is not None:
                share.in_flight -= 1
                self._admit(share)

    def take_some(self, limit: int) -> list[int]:
        """Remove and return up to ``limit`` tasks that wait for a place, to delete the group."""
        ids: list[int] = []
        for share in list(self.by_mark.values()):
            while len(ids) < limit and (following := share.next()) is not None:
                ids.append(following[0])
            self._prune(share)
        self._group.awaiting_turn -= len(ids)
        return ids

    # --- places ------------------------------------------------------------------------------

    def _share(self, mark: int) -> Share:
        share = self.by_mark.get(mark)
        if share is None:
            rate, bucket = self._group.settings.shares.rate_each, None
            if rate is not None:
                bucket = Bucket(rate, None, self._mono_ms)
            share = self.by_mark[mark] = Share(mark, bucket)
        return share

    def _has_place(self, share: Share) -> bool:
        """Return whether one more task of a value can be called now."""
        if self._paused and share.mark in self._paused:
            return False
        limit, called = self._group.settings.shares.limit_each, share.called
        if limit is not None and called + share.in_flight >= limit:
            return False
        if called and called >= min(CALLED_MAX, CALLED_TOTAL_MAX // len(self.by_mark)):
            return False
        bucket = share.bucket
        if bucket is None or bucket.left(self._mono_ms) > called:
            return True
        if not share.is_paced and not called:
            share.is_paced = True
            heappush(self._heap, (bucket.next_mono_ms(), share.mark))
            self._orderings.next_tokens[self._group] = self._heap[0][0]
        return False

    def _admit(self, share: Share) -> None:
        """Call as many tasks of a value as it has places for now."""
        group = self._group
        while share.queue is not None and self._has_place(share):
            following = share.next()
            if following is None:
                break
            task_id, priority = following
            self.waited_ids.add(task_id)
            group.awaiting_turn -= 1
            share.called += 1
            self.called[task_id] = share
            group.ready.push(task_id, priority, self.now_ms)
        self._prune(share)

    def call_resumed(self, mark: int) -> None:
        """Call the tasks of a resumed value. The mark of an order key has no effect."""
        share = self.by_mark.get(mark)
        if share is not None:
            self._admit(share)

    def _prune(self, share: Share) -> None:
        """Forget a value if it has no tasks, and its bucket is full."""
        if not share.is_idle or self.by_mark.get(share.mark) is not share:
            return
        bucket = share.bucket
        if bucket is None or bucket.left(self._mono_ms) >= int(bucket.burst):
            del self.by_mark[share.mark]

    def resume_paced(self, mono_ms: int) -> None:
        """Call the tasks of values that have a token again."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        heap = self._heap
        while heap and heap[0][0] <= mono_ms:
            _, mark = heappop(heap)
            share = self.by_mark.get(mark)
            if share is not None:
                share.is_paced = False
                self._admit(share)
        if heap:
            self._orderings.next_tokens[self._group] = heap[0][0]
        else:
            self._orderings.next_tokens.pop(self._group, None)
        self._orderings.wake(self._group)

    def sweep(self) -> None:
        """Forget values that have no tasks and full buckets. Call this periodically."""
        if not self.unshared:
            self.unshared = None  # an emptied set can still take much memory
        for share in list(self.by_mark.values()):
            self._prune(share)

    def apply_settings(self, former: GroupSettings, mono_ms: int) -> None:
        """Adapt the shares to new settings of the group. ``former`` are its previous settings."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        settings, group = self._group.settings, self._group
        self._heap.clear()
        self._orderings.next_tokens.pop(group, None)
        if settings.shares.fair_by != former.shares.fair_by:
            self._remove_shares()
        for share in list(self.by_mark.values()):
            share.bucket = adjusted_bucket(share.bucket, settings.shares.rate_each, None, mono_ms)
            share.is_paced = False
            self._admit(share)
        self._orderings.wake(group)

    def _remove_shares(self) -> None:
        """Remove the shares of all tasks."""
        group = self._group
        for share in self.by_mark.values():
            share.mark = 0  # leases of tasks in flight refer to the share
            if share.queue is not None:
                group.awaiting_turn -= share.waiting
                group.ready.absorb(share.queue, self.now_ms)
                share.queue = None
        self.by_mark, self.called = {}, {}
        self.unshared = None


class KeyHolders:
    """The order keys of a group: tracks the holder of each key, and when the next task becomes the
    holder. A key *advances* when a batch is durable. Before that, a *note* records that its holder
    has ended, or that another change of the key could be undone by a crash."""

    def __init__(self, orderings: Orderings, group: Group, shares: FairShares) -> None:
        self._orderings = orderings
        self._group = group
        self._shares = shares
        """The stage that follows when a task becomes a key holder."""
        self.order = Order()
        self._extras: dict[int, tuple[int, int]] = {}
        """Id → (priority, mark of the share) of tasks in key queues that have either of them."""
        self._rejoining: dict[int, list[tuple[int, Waiting, bool]]] = {}
        """Mark → (id, key and share, whether it goes to the front) of each task that becomes ready
        again when a batch is durable; see ``rejoin_when_durable``."""
        self.rejoining_ids: set[int] = set()
        """Ids of the tasks of ``_rejoining`` that have not left. They are in ``loading`` although
        their rows are not being read."""
        self._ending: dict[int, int] = {}
        """Mark → id of the ended holder, or 0, for keys with a change that is not durable: the
        holder has ended, or another task has left."""
        self.notes: dict[int, int] = {}
        """Mark → number of notes that must become durable before the key can advance. A key of
        ``_ending`` that is missing here has one note: the end of its holder."""
        self._had_concurrent_tasks = False
        """Whether several tasks of a key were in flight before a restart."""

    # --- a task arrives ----------------------------------------------------------------------

    def arrive(self, row: TaskRow, mark: int, share: int, priority: int) -> None:
        """Add a task of the key. It becomes ready when it is the key holder."""
        if share or priority or mark in self._ending or self.awaits_replay:
            waiting = Waiting(mark, share, row.due_ms, order_of(row))
            self.add_ready(row.id, waiting, priority, front=False)
        elif self.order.arrive(mark, row.id, row.due_ms, order_of(row)):
            self._group.ready.push(row.id, 0, self._shares.now_ms)
        else:
            self._group.awaiting_turn += 1

    def arrive_all(self, rows: Sequence[TaskRow], marks: Sequence[int]) -> None:
        """Add tasks that have only an order key. ``any_in_notes`` must be False for their keys."""
        holders = self.order.arrive_all(marks, [row[0] for row in rows], [row[1] for row in rows])
        self._group.ready.push_all(holders, self._shares.now_ms)
        self._group.awaiting_turn += len(rows) - len(holders)

    def any_in_notes(self, marks: Collection[int]) -> bool:
        """Return whether one of these keys is in ``notes``."""
        return not self.notes.keys().isdisjoint(marks)

    def rejoin_when_durable(
        self, task_id: int, waiting: Waiting, priority: int, *, front: bool
    ) -> None:
        """Make a task ready again when the end of its previous attempt is durable. If it were ready
        earlier, a crash could make a receipt of the previous attempt valid for the next one. Until
        then the task waits in ``loading``."""
        self._group.loading[task_id] = priority
        self.rejoining_ids.add(task_id)
        self._rejoining.setdefault(waiting.key_mark, []).append((task_id, waiting, front))

    def add_ready(self, task_id: int, waiting: Waiting, priority: int, *, front: bool) -> None:
        """Add a task that is ready for an attempt. Call it if it has no order key or becomes the
        holder of its key; otherwise put it into the key queue."""
        mark, share, due_ms, position = waiting
        if mark:
            if self.awaits_replay:
                self.order.queue(mark, task_id, due_ms, position)
                is_holder = False
            else:
                if self._ending.get(mark) == task_id:
                    # The ended holder is ready again before its end has become durable.
                    self._ending[mark] = 0
                is_holder = self.order.arrive(mark, task_id, due_ms, position)
            if not is_holder:
                self._group.awaiting_turn += 1
                if priority or share:
                    self._extras[task_id] = (priority, share)
                return
        self._shares.call(task_id, share, priority, front=front)

    def rejoin_after_wait(self, task_id: int, waiting: Waiting, priority: int) -> None:
        """Add a task whose wait is over, once the notes of its key are durable."""
        if waiting.key_mark in self._ending:
            self.rejoin_when_durable(task_id, waiting, priority, front=False)
        else:
            self.add_ready(task_id, waiting, priority, front=False)

    def restored(self, mark: int, task_id: int) -> None:
        """Make a task that was in flight before a restart the holder of its key."""
        if not self.order.claim(mark, task_id):
            self._had_concurrent_tasks = True

    # --- a task is delivered -------------------------------------------------------------------

    def might_give_way(self, marks: Collection[int]) -> bool:
        """Return whether a ready task of one of these keys might have to give way."""
        checked_marks = (self.order.overtaken, self.notes.keys())
        return not all(some.isdisjoint(marks) for some in checked_marks if some)

    def give_way(self, row: TaskRow, mark: int) -> bool:
        """Let a task give way to an earlier task of its key, or to a task that has left the key but
        would return after a crash. Return whether it gave way."""
        place = order_of(row)
        if mark in self._ending and self.order.head(mark) == row.id:
            self.order.park(mark, row.id, row.due_ms, place)
            self._group.awaiting_turn += 1
            first = 0
        else:
            first = self.order.exchange(mark, row.id, row.due_ms, place)
            if first == row.id:
                self.order.overtaken.discard(mark)
                return False
        self._shares.uncall(row.id)
        share = self._shares.mark_of(row)
        priority = row.options.priority if row.options is not None else 0
        if priority or share:
            self._extras[row.id] = (priority, share)
        if first:
            priority, share = self._extras.pop(first, (0, 0))
            self._shares.call(first, share, priority, front=True)
        return True

    # --- a task leaves -------------------------------------------------------------------------

    def finish(self, leases: Iterable[Lease]) -> None:
        """Record that these leases' tasks are finished. Their keys advance once that is durable."""
        marks = [lease.order for lease in leases]
        ids = [lease.id for lease in leases]
        if all(marks) and not self._had_concurrent_tasks and self.notes.keys().isdisjoint(marks):
            self._ending.update(zip(marks, ids, strict=True))
            self._orderings.call_when_durable((self, marks))
            return
        for mark, task_id in zip(marks, ids, strict=True):
            if mark:
                self.end(mark, task_id)

    def end(self, mark: int, task_id: int) -> None:
        """Record that the group finished a task of the key. A holder's key can then advance."""
        if self.order.head(mark) == task_id:
            self._note(mark, task_id)

    def leave(self, row: TaskRow, mark: int, *, stays_holder: bool) -> bool:
        """Remove a task of the key. Return whether the task was in the key queue."""
        task_id = row.id
        if self.order.head(mark) == task_id:
            if not stays_holder:
                self.end(mark, task_id)
        elif self.order.remove(mark, task_id, row.due_ms):
            self._extras.pop(task_id, None)
            self._group.awaiting_turn -= 1
            self.hold_until_durable(mark)
            return True
        return False

    def take_some(self, limit: int) -> list[int]:
        """Remove and return up to ``limit`` tasks of key queues, to delete the group."""
        ids = self.order.take_some(limit)
        for task_id in ids:
            self._extras.pop(task_id, None)
        self._group.awaiting_turn -= len(ids)
        return ids

    def forget_shares(self) -> None:
        """Remove the shares of all tasks."""
        self._extras = {i: (priority, 0) for i, (priority, _) in self._extras.items() if priority}
        for entries in self._rejoining.values():
            entries[:] = [(i, task._replace(share_mark=0), front) for i, task, front in entries]

    # --- a key advances ------------------------------------------------------------------------

    def hold_until_durable(self, mark: int) -> None:
        """Do not deliver unattempted tasks of the key before the open batch is durable, because a
        crash would undo a change of the key. Mark 0 means no key."""
        if mark:
            self._note(mark, self._ending.get(mark, 0))

    def _note(self, mark: int, head: int) -> None:
        """Prevent a key from advancing before the open batch is durable. ``head`` may be 0."""
        before = self.notes.get(mark)
        if before is None:
            before = int(mark in self._ending)
        self.notes[mark] = before + 1
        self._ending[mark] = head
        self._orderings.call_when_durable((self, [mark]))

    def _remove_note(self, mark: int) -> bool:
        """Remove a note that has become durable. Return whether it was the last note of the key."""
        left = self.notes.pop(mark, 1) - 1
        if left:
            self.notes[mark] = left
        return not left

    def advance(self, ended: Sequence[int], now_ms: int) -> None:
        """Advance these order keys, each of which has a note that is now durable."""
        if now_ms > self._shares.now_ms:
            self._shares.now_ms = now_ms
        if self.notes:
            ended = [mark for mark in ended if self._remove_note(mark)]
        if self._rejoining:
            # If the holder itself is ready again, its end no longer counts.
            for mark in [mark for mark in ended if mark in self._rejoining]:
                self._rejoin(mark)
        heads = list(map(self._ending.pop, ended))
        if not all(heads):
            pairs = zip(ended, heads, strict=True)
            ended = [mark for mark, head in pairs if self._may_advance(mark, head)]
        self._promote(ended)
        self._orderings.wake(self._group)

    def _may_advance(self, mark: int, head: int) -> bool:
        """Return whether another task can become the holder of a key now that its change is
        durable. ``head`` is the ended holder, or 0."""
        if mark == EVERY_KEY:
            self._advance_all_later()
            return False
        return bool(head) or (self.order.head(mark) == NOBODY and not self.awaits_replay)

    def _rejoin(self, mark: int) -> None:
        """Make the tasks of ``_rejoining`` with this mark ready, unless they have left."""
        for task_id, waiting, front in self._rejoining.pop(mark):
            if task_id in self.rejoining_ids:
                self.rejoining_ids.remove(task_id)
                self.add_ready(task_id, waiting, self._group.loading.pop(task_id), front=front)

    def _promote(self, marks: Sequence[int]) -> None:
        """Make the next task of each of these order keys its holder."""
        group, extras = self._group, self._extras
        heads, dues_ms = self.order.promote(marks)
        if not heads:
            return
        group.awaiting_turn -= len(heads)
        late_ms = self._shares.now_ms - LATE_MS
        if max(dues_ms) < late_ms:
            self._shares.waited_ids.update(heads)
        elif min(dues_ms) < late_ms:
            pairs = zip(heads, dues_ms, strict=True)
            self._shares.waited_ids.update([head for head, due_ms in pairs if due_ms < late_ms])
        if extras or group.settings.shares.fair_by is not None:
            for head in heads:
                priority, share = extras.pop(head, (0, 0))
                self._shares.call(head, share, priority, front=False)
        else:
            group.ready.push_all(heads, self._shares.now_ms)

    @property
    def awaits_replay(self) -> bool:
        """Whether no task can become a holder yet, because a replay can still find earlier tasks of
        any key, or a crash could bring back tasks that ended during the replay."""
        return self._group in self._group.topic.replays or EVERY_KEY in self._ending

    def replay_ended(self) -> None:
        """Let keys advance when the batch in which the group's replay ended is durable."""
        self.hold_until_durable(EVERY_KEY)

    def _advance_all_later(self) -> None:
        if self._group not in self._orderings.by_group:
            return  # the group was deleted in the batch in which its replay ended
        queues = self.order.queues.items()
        self._orderings.to_advance[self._group] = [m for m, queue in queues if queue.head == NOBODY]

    def advance_after_replay(self, limit: int, now_ms: int) -> None:
        """Advance up to ``limit`` keys that waited for the end of a replay."""
        self._shares.now_ms = max(self._shares.now_ms, now_ms)
        marks = self._orderings.to_advance[self._group]
        if self.awaits_replay or not marks:
            del self._orderings.to_advance[self._group]
            return
        ending, head = self._ending, self.order.head
        self._promote([m for m in marks[-limit:] if m not in ending and head(m) == NOBODY])
        del marks[-limit:]
        self._orderings.wake(self._group)


class KeptBack(NamedTuple):
    """A task that would have been delivered but waits until its key is resumed."""

    mark: int
    """The mark of the paused key."""
    share: int
    """The mark of the task's value, or 0 if it has none."""
    priority: int
    due_ms: int


class KeyPauses:
    """The paused keys of a group, and the tasks that are kept back because of them."""

    __slots__ = ("_group", "_shares", "kept_back")

    def __init__(self, group: Group, shares: FairShares) -> None:
        self._group = group
        self._shares = shares
        self.kept_back: dict[int, KeptBack] = {}
        """Id → task that is kept back, in the order of the intended deliveries."""

    # --- a key is paused and resumed ----------------------------------------------------------

    def pause(self, mark: int, key: PausedKey) -> None:
        """Pause a key now, or restore its pause after a restart."""
        group = self._group
        group.paused_keys[mark] = key
        intervals = group.key_intervals.setdefault(mark, HoldIntervals())
        intervals.set_current(Cause.KEY_PAUSED, key.since_ms, None)

    def resume(self, mark: int, now_ms: int) -> None:
        """Resume a paused key."""
        group = self._group
        del group.paused_keys[mark]
        intervals = group.key_intervals.pop(mark)
        intervals.set_current(None, now_ms, None)
        group.key_intervals[mark] = intervals  # move it behind earlier pauses
        if len(group.key_intervals) - len(group.paused_keys) > REMEMBERED_MAX:
            oldest = next(m for m in group.key_intervals if m not in group.paused_keys)
            del group.key_intervals[oldest]
        self._make_ready([i for i, kept in self.kept_back.items() if kept.mark == mark])
        self._shares.call_resumed(mark)

    def any_paused(self, marks: Collection[int]) -> bool:
        """Return whether one of these order keys is paused."""
        paused = self._group.paused_keys
        return bool(paused) and not paused.keys().isdisjoint(marks)

    # --- a task arrives, and leaves -----------------------------------------------------------

    def hold_back(self, row: TaskRow, order: int) -> bool:
        """Keep back a task that was taken from the ready queue if its key is paused. Return whether
        it was kept back. ``order`` is the mark of its order key, or 0."""
        paused, share = self._group.paused_keys, self._shares.mark_of(row)
        mark = order if order in paused else share
        if mark not in paused:
            return False
        self._shares.drop_undelivered(row.id)
        priority = 0 if row.options is None else row.options.priority
        self.kept_back[row.id] = KeptBack(mark, share, priority, row.due_ms)
        self._group.awaiting_turn += 1
        return True

    def leave(self, task_id: int) -> bool:
        """Remove a task that might be kept back. Return whether it was."""
        if self.kept_back.pop(task_id, None) is None:
            return False
        self._group.awaiting_turn -= 1
        return True

    def take_some(self, limit: int) -> list[int]:
        """Remove and return up to ``limit`` tasks that are kept back, to delete the group."""
        ids = list(self.kept_back)[: max(0, limit)]
        for task_id in ids:
            self.leave(task_id)
        return ids

    def forget_shares(self) -> list[PausedKey]:
        """Remove all shares after a change of ``fair_by``. Resume and return the paused values."""
        values = {mark: key for mark, key in self._group.paused_keys.items() if key.fair_by}
        for mark in values:
            self.resume(mark, self._shares.now_ms)
        self.kept_back = {i: kept._replace(share=0) for i, kept in self.kept_back.items()}
        return list(values.values())

    def _make_ready(self, ids: list[int]) -> None:
        """Make these tasks ready ahead of all others, in their order."""
        for task_id in reversed(ids):
            kept = self.kept_back.pop(task_id)
            self._group.awaiting_turn -= 1
            self._shares.waited_ids.add(task_id)
            self._shares.call(task_id, kept.share, kept.priority, front=True)


class Preferences:
    """The preferred subscriber for each order key: the last subscriber of the key if it is still
    subscribed, otherwise the subscriber of the key's partition."""

    __slots__ = ("_last_subscribers", "_partitions")

    def __init__(self, subscribers: Iterable[Subscriber]) -> None:
        self._partitions = KeyPartitions[Subscriber]()
        self._last_subscribers: dict[int, Subscriber] = {}
        """Mark → last subscriber of the key, for at most ``LAST_SUBSCRIBERS_MAX`` keys."""
        for subscriber in subscribers:
            self.join(subscriber)

    def __len__(self) -> int:
        """Return the number of subscribers that can be preferred."""
        return len(self._partitions)

    def join(self, subscriber: Subscriber) -> None:
        """Add a subscriber. A pull is never preferred, because it leaves after one delivery."""
        if not subscriber.once:
            self._partitions.join(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        self._partitions.leave(subscriber)

    def preferred(self, marks: Sequence[int]) -> tuple[Sequence[Subscriber | None], bool]:
        """Return (the preferred subscriber of each key, or None for mark 0; whether each of them
        was also the last subscriber of its key)."""
        before = list(map(self._last_subscribers.get, marks))
        if self._partitions.has_all(before):
            return before, True
        return self._partitions.of(marks, self._last_subscribers), False

    def remember(self, marks: Sequence[int], subscriber: Subscriber) -> None:
        """Remember the subscriber as the last one of these keys."""
        last_subscribers = self._last_subscribers
        if subscriber not in self._partitions or len(self._partitions) < 2:
            return
        before = list(map(last_subscribers.get, marks))
        if before.count(subscriber) == len(before):
            return
        for mark in compress(marks, [former is not subscriber for former in before]):
            last_subscribers.pop(mark, None)
            if len(last_subscribers) >= LAST_SUBSCRIBERS_MAX:
                del last_subscribers[next(iter(last_subscribers))]
            last_subscribers[mark] = subscriber


class Ordering:
    """The order keys and fair shares of one group: the stages on a task's way to the ready queue,
    and what happens to other tasks when it leaves."""

    def __init__(self, orderings: Orderings, group: Group) -> None:
        self._orderings = orderings
        self._group = group
        self.shares = FairShares(orderings, group)
        self.keys = KeyHolders(orderings, group, self.shares)
        self.pauses = KeyPauses(group, self.shares)
        self.preferences = Preferences(group.subscribers)
        self.waiting: dict[int, Waiting] = {}
        """Id → key and share of each task that waits for its next attempt."""
        self.held: dict[int, int] = {}
        """Id of each held task → when it became held (wall ms). It waits for an operator."""

    def _note_time(self, now_ms: int) -> None:
        if now_ms > self.shares.now_ms:
            self.shares.now_ms = now_ms

    # --- a task arrives ----------------------------------------------------------------------

    def arrive(self, row: TaskRow, now_ms: int) -> None:
        """Add a task. It becomes ready when it is the key holder and has a place."""
        options, shares = row.options, self.shares
        if now_ms > shares.now_ms:
            shares.now_ms = now_ms
        share = 0 if self._group.settings.shares.fair_by is None else shares.mark_of(row)
        priority = 0 if options is None else options.priority
        if options is None or options.order_key is None:
            shares.call(row.id, share, priority, front=False)
        else:
            self.keys.arrive(row, hash(options.order_key) or 1, share, priority)

    def arrive_all(self, rows: Sequence[TaskRow], now_ms: int) -> None:
        """Call ``arrive`` for each of these tasks, of which there is at least one."""
        marks = self._marks_of_usual(rows)
        if marks is None:
            for row in rows:
                self.arrive(row, now_ms)
            return
        self._note_time(now_ms)
        self.keys.arrive_all(rows, marks)

    def _marks_of_usual(self, rows: Sequence[TaskRow]) -> list[int] | None:
        """Return the marks of tasks that have only an order key, or None if one is different."""
        if self._group.settings.shares.fair_by is not None or self.keys.awaits_replay:
            return None
        options = [row[4] for row in rows]
        if not all(options):
            return None
        columns = columns_of(options)
        if any(columns.priority) or not is_absent(columns.order_id):
            return None
        marks = marks_of(columns)
        return marks if marks and all(marks) and not self.keys.any_in_notes(marks) else None

    def make_ready_again(self, lease: Lease, now_ms: int, *, front: bool) -> None:
        """Make the task of an ended lease ready again."""
        self._note_time(now_ms)
        waiting, priority = _waiting_of(lease), lease.traits.priority
        if waiting.key_mark:
            self.keys.hold_until_durable(waiting.key_mark)
            self.keys.rejoin_when_durable(lease.id, waiting, priority, front=front)
        else:
            self.keys.add_ready(lease.id, waiting, priority, front=front)

    def retry(self, task_id: int, priority: int, now_ms: int) -> None:
        """Make ready a task whose wait for its next attempt is over."""
        self._note_time(now_ms)
        self._unhold(task_id)
        waiting = self.waiting.pop(task_id, None)
        if waiting is None:
            self.shares.call(task_id, 0, priority, front=False)
        else:
            self.keys.rejoin_after_wait(task_id, waiting, priority)

    def note_wait(self, of: Lease | TaskRow, *, is_new: bool = True) -> None:
        """Record that the task waits for its next attempt. A key holder stays the holder.
        ``is_new`` means that no earlier batch contains the wait."""
        if isinstance(of, Lease):
            waiting = _waiting_of(of)
        else:
            waiting = Waiting(mark_of(of), self.shares.mark_of(of), of.due_ms, order_of(of))
        if waiting.key_mark or waiting.share_mark:
            self.waiting[of.id] = waiting
            if waiting.key_mark and is_new:
                self.keys.hold_until_durable(waiting.key_mark)

    # --- a task is delivered -------------------------------------------------------------------

    def hand_out(
        self, row: TaskRow, mark: int, subscriber: Subscriber, mono_ms: int, *, is_first: bool
    ) -> Traits | None:
        """Return the traits of a task from the ready queue that is being leased. Return None if its
        key is paused, or if the task has no attempts (``is_first``) and gives way to a newer task
        of its key that is due before it. ``mark`` is the mark of its order key, or 0."""
        shares, keys = self.shares, self.keys
        if self._group.paused_keys and self.pauses.hold_back(row, mark):
            return None
        if mark:
            is_odd = mark in keys.order.overtaken or mark in keys.notes
            if is_odd and is_first and keys.give_way(row, mark):
                return None
            self.preferences.remember((mark,), subscriber)
        share = None
        if shares.called or shares.unshared:
            share = shares.leave_ready(row.id, mono_ms)
        waited = row.id in shares.waited_ids
        if waited:
            shares.waited_ids.remove(row.id)
        traits = traits_of(row)
        return traits._replace(share=share, waited=waited) if share or waited else traits

    def can_lease_together(self, marks: Collection[int] | None) -> bool:
        """Return whether tasks without shares can be leased by ``hand_out_all``. ``marks`` are the
        marks of their order keys, or None if they have no keys."""
        if marks is None:
            return True
        return not (self.keys.might_give_way(marks) or self.pauses.any_paused(marks))

    def hand_out_all(self, ids: Sequence[int], traits: list[Traits] | None) -> list[Traits] | None:
        """``hand_out`` these tasks. Return their traits; None if all are ``PLAIN``."""
        waited = self.shares.waited_ids.intersection(ids) if self.shares.waited_ids else None
        if not waited:
            return traits
        self.shares.waited_ids -= waited
        if len(waited) == len(ids) and traits is None:
            return [WAITED] * len(ids)
        return [
            task_traits
            if task_id not in waited
            else WAITED
            if task_traits is PLAIN
            else task_traits._replace(waited=True)
            for task_id, task_traits in zip(ids, traits or repeat(PLAIN), strict=traits is not None)
        ]

    def restored(self, row: TaskRow) -> tuple[int, Traits]:
        """Restore a task in flight. Return (mark of its order key or 0, its traits)."""
        mark = mark_of(row)
        if mark:
            self.keys.restored(mark, row.id)
        return mark, traits_of(row)._replace(share=self.shares.restored(self.shares.mark_of(row)))

    def claim(self, row: TaskRow) -> None:
        """Make a task that waited for a retry before a restart the holder of its key."""
        mark = mark_of(row)
        if mark:
            self.keys.order.claim(mark, row.id)

    # --- a task leaves -------------------------------------------------------------------------

    def leases_ended(self, leases: Collection[Lease], *, done: bool) -> None:
        """Record that these leases have ended. ``done`` means that their tasks are finished."""
        self.shares.leases_ended(leases)
        if done:
            self.keys.finish(leases)
        self._orderings.wake(self._group)

    def end_dead(self, lease: Lease) -> None:
        """Record that the task of a lease has become a dead letter."""
        if lease.order:
            self.keys.end(lease.order, lease.id)

    def leave(self, row: TaskRow, *, stays_holder: bool = False) -> bool:
        """Remove a ready or waiting task from the group's queues. Return whether it was in a queue
        of this object, and so in no other. ``stays_holder`` means that it leaves only to wait."""
        task_id, mark = row.id, mark_of(row)
        self.shares.waited_ids.discard(task_id)
        self.keys.rejoining_ids.discard(task_id)
        self._unhold(task_id)
        waited = self.waiting.pop(task_id, None) is not None
        if mark and self.keys.leave(row, mark, stays_holder=stays_holder):
            return True
        if self.pauses.leave(task_id):
            return True
        if waited or task_id in self._group.waiting or self.shares.uncall(task_id):
            return False
        return self.shares.withdraw(row)

    def drop_undelivered(self, row: TaskRow, *, stays_holder: bool = False) -> None:
        """Remove a task that was taken from the ready queue but is not delivered."""
        mark = mark_of(row)
        if mark and not stays_holder:
            self.keys.end(mark, row.id)
        self.shares.drop_undelivered(row.id)

    def take_some(self, limit: int) -> list[int]:
        """Remove and return up to ``limit`` queued tasks, to delete the group."""
        ids = self.keys.take_some(limit)
        ids += self.pauses.take_some(limit - len(ids))
        return ids + self.shares.take_some(limit - len(ids))

    # --- a key is held -------------------------------------------------------------------------

    def hold(self, lease: Lease, now_ms: int) -> None:
        """Hold the task of a lease. Its key then waits for an operator."""
        self.set_held(lease.id, now_ms)
        self.note_wait(lease)

    def set_held(self, task_id: int, since_ms: int) -> None:
        self.held[task_id] = since_ms
        self._group.held = len(self.held)

    def _unhold(self, task_id: int) -> None:
        if self.held.pop(task_id, None) is not None:
            self._group.held = len(self.held)

    def release_held(self, task_id: int, priority: int, now_ms: int) -> None:
        """Make a held task ready again."""
        waiting = self.waiting.get(task_id)
        if waiting is not None:
            self.keys.hold_until_durable(waiting.key_mark)
        self.retry(task_id, priority, now_ms)

    def skip_held(self, task_id: int) -> None:
        """Remove a held task, so that its key can advance."""
        self._unhold(task_id)
        waiting = self.waiting.pop(task_id, None)
        if waiting is not None and waiting.key_mark:
            self.keys.end(waiting.key_mark, task_id)

    # --- the whole group -----------------------------------------------------------------------

    @property
    def has_preferences(self) -> bool:
        """Whether it matters which subscriber gets a ready task."""
        return len(self.keys.order) > 0 and len(self.preferences) > 1

    def apply_settings(self, former: GroupSettings, mono_ms: int) -> list[PausedKey]:
        """Adapt to new settings of the group. ``former`` are its previous settings. A new
        ``fair_by`` applies to tasks that arrive from now on; present tasks keep their order. Return
        the paused values, which are resumed."""
        resumed: list[PausedKey] = []
        if self._group.settings.shares.fair_by != former.shares.fair_by:
            self.keys.forget_shares()
            resumed = self.pauses.forget_shares()
            self.waiting = {i: it._replace(share_mark=0) for i, it in self.waiting.items()}
        self.shares.apply_settings(former, mono_ms)
        return resumed

    def since_ms(self) -> int:
        """Return the approximate time at which the longest waiting task in the key queues began to
        wait. Only the oldest ``AGES_EXAMINED_MAX`` queues are examined."""
        queues = islice(self.keys.order.queues.values(), AGES_EXAMINED_MAX)
        times = [queue.first()[0] for queue in queues]
        for share in islice(self.shares.by_mark.values(), AGES_EXAMINED_MAX):
            if share.queue is not None:
                ages = (level.since_ms for level in share.queue.levels().values() if len(level))
                times += [since_ms for since_ms in ages if since_ms is not None]
        times += [kept.due_ms for kept in islice(self.pauses.kept_back.values(), AGES_EXAMINED_MAX)]
        return min(times, default=self.shares.now_ms)


class Orderings:
    """The ``Ordering`` of each ordered group, and the work that the next ticks must do for them."""

    def __init__(
        self, wake: Callable[[Group], None], call_when_durable: Callable[[KeysToAdvance], None]
    ) -> None:
        """``wake`` is called with a group that might be able to deliver. ``call_when_durable`` gets
        the keys that must ``advance`` when the open batch is durable."""
        self.wake = wake
        self.call_when_durable = call_when_durable
        self.by_group: dict[Group, Ordering] = {}
        """The ``Ordering`` of each group that is ``is_ordered``."""
        self.delayed: dict[int, TaskRow] = {}
        """Rows of tasks in ``Core.firing`` that wait: tasks with order keys while rows of earlier
        tasks are being read, any task while no steps are left."""
        self.to_advance: dict[Group, list[int]] = {}
        """Group whose replay is over → keys that must still advance."""
        self.next_tokens: dict[Group, int] = {}
        """Group with values delayed by ``rate_each`` → steady time of the first of their tokens."""

    def begin(self, group: Group) -> Ordering:
        """Return the ``Ordering`` of the group, creating it if there is none."""
        ordering = self.by_group.get(group)
        if ordering is None:
            ordering = self.by_group[group] = Ordering(self, group)
            group.is_ordered, group.key_queues_since_ms = True, ordering.since_ms
        return ordering

    def rejoining_ids(self, group: Group) -> Collection[int]:
        """Return the ids of the group's tasks that become ready again when a batch is durable."""
        ordering = self.by_group.get(group)
        return () if ordering is None else ordering.keys.rejoining_ids

    def forget(self, group: Group) -> None:
        """Forget the order keys and shares of a deleted group."""
        for by_group in (self.by_group, self.to_advance, self.next_tokens):
            by_group.pop(group, None)

    def tick(self, limit: int, now_ms: int, mono_ms: int) -> None:
        """Advance keys that waited for a replay, and values that have tokens again."""
        for group in list(self.to_advance):
            self.by_group[group].keys.advance_after_replay(limit, now_ms)
        for group in [group for group, at_ms in self.next_tokens.items() if at_ms <= mono_ms]:
            self.by_group[group].shares.resume_paced(mono_ms)

    def sweep(self) -> None:
        """Call ``FairShares.sweep`` for each group. Call this periodically."""
        for ordering in self.by_group.values():
            ordering.shares.sweep()


def shared_value(row: TaskRow, by: str) -> object:
    """Return a task's value of ``fair_by``, or None if it has none."""
    options = row.options
    if options is None:
        return None
    if by == FAIR_BY_KEY:
        return options.key if options.replayed is None else options.replayed.key
    if by == FAIR_BY_TAG:
        return options.tag
    return (options.properties or {}).get(by)


def _waiting_of(lease: Lease) -> Waiting:
    share = lease.traits.share
    return Waiting(lease.order, 0 if share is None else share.mark, lease.due_ms, lease.id)
