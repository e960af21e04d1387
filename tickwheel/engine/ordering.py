"""Order keys and fair shares of a group: which of its due tasks may be handed out.

A task that a group gets passes two stages before it is ready. If it has an order key, it waits
until every task of that key before it is done (``KeyHolders``). If the group is shared by a
property, it waits until its value has a place (``FairShares``). ``Ordering`` is both stages of one
group, and a group that needs neither has none (``Group.is_ordered``). Which subscriber gets the
tasks of a key is said by ``Preferences``. What operators see and do is in ``tasks.py``.

A key that an operator has *paused* (``KeyPauses``), an order key or a value that shares the group,
is another thing than one that is *held*: its task has failed for good, and that task waits
(``Ordering.held``). A key may be both. The tasks of a paused key come due and wait for their turn
as ever; one that is about to be handed out is *kept back* instead, until its key is resumed. What
is in flight stays so, and its end counts.

Invariants:

* Of a key one task is the *key holder*: it is ready, in flight, waiting for a retry or held. It
  stays so until it is done for the group, and the next one follows it when that is durable. So no
  crash makes an earlier task come again after a later one was handed out.
* A task that has had an attempt stays key holder, also when somebody moves it; one that nobody has
  had gives way to a task that came after it and is due before it.
* A task in a key queue is ready as far as counts go (``Group.in_key_queues``), and in no other
  queue of the group.
* With ``limit_each``, what is in flight of a value and what is called are never more together.
* A task that is kept back counts as ready (``Group.in_key_queues``), is in no queue of the group,
  and has no place of its value. It stays the holder of its order key, if it is. Nothing of this is
  looked at while no key of the group is paused.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import compress, islice, repeat
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.queues import NOBODY, Bucket, KeyPartitions, Order, Share, changed
from tickwheel.engine.topics import PLAIN, WAITED, Group, Lease, Subscriber, Traits, traits_of
from tickwheel.model.lateness import LATE_MS, Cause, HoldIntervals
from tickwheel.model.records import FAIR_BY_KEY, FAIR_BY_TAG, columns_of, is_absent, order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tickwheel.model.kinds import PausedKey
    from tickwheel.model.records import Columns, GroupSettings, TaskRow

CALLED_MAX, CALLED_IN_ALL = 64, 256
"""How many tasks of one value, and of all values together, about, are called at a time."""
HAD_MAX = 65_536
"""How many keys have their last subscriber remembered."""
AGES_LOOKED_AT = 256
"""How many queues, and values, are looked at for the oldest task."""
NEVER_MS = 1 << 62
"""A time that never comes, such as that of the next attempt of a held task."""
EVERY_KEY = 1 << 64
"""The mark that stands for all keys of a group; the marks of keys have 64 bits."""
REMEMBERED_MAX = 64
"""How many keys of a group that were resumed have the time of their pause remembered, which says
why their tasks are late."""


class Waiting(NamedTuple):
    """What is remembered of a task that waits for its next attempt."""

    order: int
    share: int
    due_ms: int
    place: int


Ended = tuple["KeyHolders", list[int]]
"""(key holders, marks): keys whose tasks have changed, and that go on when the batch is durable."""


def mark_of(row: TaskRow) -> int:
    """The mark of the order key of a task; 0: it has none."""
    options = row.options
    if options is None or options.order_key is None:
        return 0
    return hash(options.order_key) or 1


def marks_of(columns: Columns) -> list[int] | None:
    """The marks of the order keys of many tasks; None: no task has one. A 0 among them stands for a
    task that has to be looked at, and then the marks of the others may be missing."""
    if is_absent(columns.order_key):
        return None
    return list(map(hash, columns.order_key)) if all(columns.order_key) else [0]


def mark_of_key(fair_by: str | None, value: object) -> int:
    """The mark of an order key (``fair_by`` None), or of a value that shares a group."""
    what = value if fair_by is None else (fair_by, type(value) is bool, value)
    return hash(what) or 1


class FairShares:
    """The fair shares of one group: which of its values have places in the ready queue, and how
    many. A task without a value, or of a group that is not shared, is ready at once."""

    def __init__(self, orderings: Orderings, group: Group) -> None:
        self._orderings = orderings
        self._group = group
        self._paused = group.paused_keys
        self.of: dict[int, Share] = {}
        """Mark → the share of each value that holds tasks, or has a rate."""
        self.called: dict[int, Share] = {}
        """Id → share, of the tasks in the ready queue that have one."""
        self.plain_left = 0
        """Tasks in the ready queue that are of the time before the group was shared as it is, at
        most: they have no share."""
        self._heap: list[tuple[int, int]] = []
        """(steady ms, mark) of shares that wait for a token."""
        self.waited: set[int] = set()
        """Ready tasks that stood in a key queue, or waited for a place of their value, when they
        would have been late already."""
        self.now_ms = self._mono_ms = 0
        """The latest times, by the wall and the steady clock, that the group was told."""

    def mark_of(self, row: TaskRow) -> int:
        """The mark of the value of a task; 0: the group is not shared."""
        by = self._group.settings.shares.fair_by
        return 0 if by is None else mark_of_key(by, shared_value(row, by))

    @property
    def are_looked_at(self) -> bool:
        """Whether some ready task has a share, or may have had one."""
        return bool(
            self.called or self.plain_left or self._group.settings.shares.fair_by is not None
        )

    # --- a task comes ------------------------------------------------------------------------

    def call(self, task_id: int, mark: int, priority: int, *, front: bool) -> None:
        """The task has no order key, or is its holder: it is ready, if its value has a place."""
        group = self._group
        if mark:
            share = self._share(mark)
            if not self._has_place(share) or (share.queue is not None and not front):
                share.put(task_id, priority, self.now_ms, front=front)
                group.in_key_queues += 1
                return
            share.called += 1
            self.called[task_id] = share
        elif group.settings.shares.fair_by is not None:
            self.plain_left += 1
        if front:
            group.ready.push_front(task_id, priority)
        else:
            group.ready.push(task_id, priority, self.now_ms)

    def restored(self, mark: int) -> Share | None:
        """A task of the value was in flight before a restart; its share, if it has a value."""
        share = self._share(mark) if mark else None
        if share is not None:
            share.in_flight += 1
        return share

    # --- a task leaves -------------------------------------------------------------------------

    def leave_ready(self, task_id: int, mono_ms: int) -> Share | None:
        """A ready task is in flight now; the share of its value, if it has one. Nothing is to be
        done where no task is ``called`` and none is left of ``plain_left``."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        share = self.called.pop(task_id, None)
        if share is not None:
            share.called -= 1
            share.in_flight += 1
            if share.bucket is not None:
                share.bucket.left(mono_ms)
                share.bucket.take(1)
            self._admit(share)
        elif self.plain_left:
            self.plain_left -= 1
        return share

    def uncall(self, task_id: int) -> bool:
        """A task is in the ready queue no more; whether it was called."""
        share = self.called.pop(task_id, None)
        if share is None:
            return False
        share.called -= 1
        self._admit(share)
        return True

    def taken(self, task_id: int) -> None:
        """A task was taken from the ready queue and is not handed out."""
        self.waited.discard(task_id)
        if not self.uncall(task_id) and self.plain_left:
            self.plain_left -= 1

    def withdraw(self, row: TaskRow) -> bool:
        """A ready task that is not called leaves. Whether it waited for a place of its value, and
        so is not in the ready queue."""
        share = self.of.get(self.mark_of(row))
        if share is None or share.queue is None or row.id in self._group.loading:
            return False
        if self.plain_left and not share.queue.holds(row.id):
            self.plain_left -= 1
            return False
        share.withdraw(row.id)
        self._group.in_key_queues -= 1
        self._prune(share)
        return True

    def returned(self, leases: Collection[Lease]) -> None:
        """These leases have ended: their values have places again."""
        for lease in leases if self.of else ():
            share = lease.traits.share
            if share is not None:
                share.in_flight -= 1
                self._admit(share)

    def some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks that wait for a place of their value, taken out, for a group that
        is being deleted."""
        taken: list[int] = []
        for share in list(self.of.values()):
            while len(taken) < limit and (found := share.next()) is not None:
                taken.append(found[0])
            self._prune(share)
        self._group.in_key_queues -= len(taken)
        return taken

    # --- places ------------------------------------------------------------------------------

    def _share(self, mark: int) -> Share:
        found = self.of.get(mark)
        if found is None:
            rate, bucket = self._group.settings.shares.rate_each, None
            if rate is not None:
                bucket = Bucket(rate, None, self._mono_ms)
            found = self.of[mark] = Share(mark, bucket)
        return found

    def _has_place(self, share: Share) -> bool:
        """Whether one more task of a value may be called."""
        if self._paused and share.mark in self._paused:
            return False
        limit, called = self._group.settings.shares.limit_each, share.called
        if limit is not None and called + share.in_flight >= limit:
            return False
        if called and called >= min(CALLED_MAX, CALLED_IN_ALL // len(self.of)):
            return False
        bucket = share.bucket
        if bucket is None or bucket.left(self._mono_ms) > called:
            return True
        if not share.is_paced and not called:
            share.is_paced = True
            heappush(self._heap, (bucket.next_mono_ms(), share.mark))
            self._orderings.paced[self._group] = self._heap[0][0]
        return False

    def _admit(self, share: Share) -> None:
        """Call those tasks of a value that may be called now."""
        group = self._group
        while share.queue is not None and self._has_place(share):
            found = share.next()
            if found is None:
                break
            task_id, priority = found
            self.waited.add(task_id)
            group.in_key_queues -= 1
            share.called += 1
            self.called[task_id] = share
            group.ready.push(task_id, priority, self.now_ms)
        self._prune(share)

    def resumed(self, mark: int) -> None:
        """A value is not paused any more, if it is one."""
        share = self.of.get(mark)
        if share is not None:
            self._admit(share)

    def _prune(self, share: Share) -> None:
        """Forget a value that has nothing to remember."""
        if not share.is_idle or self.of.get(share.mark) is not share:
            return
        bucket = share.bucket
        if bucket is None or bucket.left(self._mono_ms) >= int(bucket.burst):
            del self.of[share.mark]

    def pace(self, mono_ms: int) -> None:
        """Let values whose token has come go on."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        heap = self._heap
        while heap and heap[0][0] <= mono_ms:
            _, mark = heappop(heap)
            share = self.of.get(mark)
            if share is not None:
                share.is_paced = False
                self._admit(share)
        if heap:
            self._orderings.paced[self._group] = heap[0][0]
        else:
            self._orderings.paced.pop(self._group, None)
        self._orderings.wake(self._group)

    def sweep(self) -> None:
        """Forget values that wait for nothing but their tokens; done once in a while."""
        for share in list(self.of.values()):
            self._prune(share)

    def resettle(self, former: GroupSettings, mono_ms: int) -> None:
        """The group has other settings than the ``former`` ones, and its shares follow them."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        settings, group = self._group.settings, self._group
        self._heap.clear()
        self._orderings.paced.pop(group, None)
        if settings.shares.fair_by != former.shares.fair_by:
            self._dissolve()
        for share in list(self.of.values()):
            share.bucket = changed(share.bucket, settings.shares.rate_each, None, mono_ms)
            share.is_paced = False
            self._admit(share)
        self._orderings.wake(group)

    def _dissolve(self) -> None:
        """Take its share from every task that has one."""
        group = self._group
        for share in self.of.values():
            share.mark = 0  # of those in flight, too
            if share.queue is not None:
                group.in_key_queues -= share.waiting
                group.ready.absorb(share.queue, self.now_ms)
                share.queue = None
        self.of, self.called = {}, {}
        self.plain_left = len(group.ready) + len(group.loading)


class KeyHolders:
    """The order keys of one group: which task of each is the key holder, and when the next one is.

    A key *goes on* when a batch is durable. What has to be known of it until then is *noted*: that
    its head has ended, or that something else of it has changed that a crash would undo.
    """

    def __init__(self, orderings: Orderings, group: Group, shares: FairShares) -> None:
        self._orderings = orderings
        self._group = group
        self._shares = shares
        """Where a task goes that is key holder."""
        self.order = Order()
        self._odd: dict[int, tuple[int, int]] = {}
        """Id → (priority, mark of its share), of tasks in key queues that have either."""
        self._again: dict[int, list[tuple[int, Waiting, bool]]] = {}
        """Mark → (id, what is known of it, whether it goes to the front) of each task that comes
        again when a batch is durable: see ``come_when_durable``."""
        self.coming: set[int] = set()
        """Ids of tasks of ``_again`` that have not left. They lie in ``loading`` unread."""
        self._ending: dict[int, int] = {}
        """Mark → the head that has ended or 0, of keys of which something is not durable: the end
        of the head, or that another one has left its queue."""
        self.notes: dict[int, int] = {}
        """Mark → how many batches have to be durable before the key goes on, of those keys of
        ``_ending`` of which more is to be said than that the head is done."""
        self._strange = False
        """Whether more than one task of some key was in flight before a restart."""

    # --- a task comes ------------------------------------------------------------------------

    def arrive(self, row: TaskRow, mark: int, share: int, priority: int) -> None:
        """The group has got a task of the key, which is ready as soon as it is the key holder."""
        if share or priority or mark in self._ending or self.gathers:
            known = Waiting(mark, share, row.due_ms, order_of(row))
            self.come(row.id, known, priority, front=False)
        elif self.order.arrive(mark, row.id, row.due_ms, order_of(row)):
            self._group.ready.push(row.id, 0, self._shares.now_ms)
        else:
            self._group.in_key_queues += 1

    def arrive_all(self, rows: Sequence[TaskRow], marks: Sequence[int]) -> None:
        """``arrive`` for tasks that have nothing but their keys: see ``are_noted``."""
        holders = self.order.arrive_all(marks, [row[0] for row in rows], [row[1] for row in rows])
        self._group.ready.push_all(holders, self._shares.now_ms)
        self._group.in_key_queues += len(rows) - len(holders)

    def are_noted(self, marks: Collection[int]) -> bool:
        """Whether something else than the end of its head is noted of one of these keys."""
        return not self.notes.keys().isdisjoint(marks)

    def come_when_durable(
        self, task_id: int, known: Waiting, priority: int, *, front: bool
    ) -> None:
        """A task gets its next attempt when it is durable that it has had the one before: otherwise
        a crash could make an answer to that one count for this one. Until then the task lies in
        ``loading``."""
        self._group.loading[task_id] = priority
        self.coming.add(task_id)
        self._again.setdefault(known.order, []).append((task_id, known, front))

    def come(self, task_id: int, known: Waiting, priority: int, *, front: bool) -> None:
        """A task is ready for its next attempt, or for its first one: it is called, if it has no
        order key or is its holder."""
        order, share, due_ms, place = known
        if order:
            if self.gathers:
                self.order.queue(order, task_id, due_ms, place)
                is_holder = False
            else:
                if self._ending.get(order) == task_id:
                    # A head that had ended has come again before its end was durable.
                    self._ending[order] = 0
                is_holder = self.order.arrive(order, task_id, due_ms, place)
            if not is_holder:
                self._group.in_key_queues += 1
                if priority or share:
                    self._odd[task_id] = (priority, share)
                return
        self._shares.call(task_id, share, priority, front=front)

    def come_after_wait(self, task_id: int, known: Waiting, priority: int) -> None:
        """The wait of a task for its next attempt is over: it comes as soon as what is noted of its
        key is durable."""
        if known.order in self._ending:
            self.come_when_durable(task_id, known, priority, front=False)
        else:
            self.come(task_id, known, priority, front=False)

    def restored(self, mark: int, task_id: int) -> None:
        """A task of the key was in flight before a restart."""
        if not self.order.claim(mark, task_id):
            self._strange = True

    # --- a task is handed out ------------------------------------------------------------------

    def are_odd(self, marks: Collection[int]) -> bool:
        """Whether a task of one of these keys may have to give way when it is handed out."""
        odd = (self.order.overtaken, self.notes.keys())
        return not all(some.isdisjoint(marks) for some in odd if some)

    def gives_way(self, row: TaskRow, mark: int) -> bool:
        """Whether a task gives way to an earlier one of its key, or to one that has left the key
        and that a crash would bring back."""
        place = order_of(row)
        if mark in self._ending and self.order.head(mark) == row.id:
            self.order.park(mark, row.id, row.due_ms, place)
            self._group.in_key_queues += 1
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
            self._odd[row.id] = (priority, share)
        if first:
            priority, share = self._odd.pop(first, (0, 0))
            self._shares.call(first, share, priority, front=True)
        return True

    # --- a task leaves -------------------------------------------------------------------------

    def done(self, leases: Iterable[Lease]) -> None:
        """The tasks of these leases are done: their keys go on when that is durable."""
        marks = [lease.order for lease in leases]
        ids = [lease.id for lease in leases]
        if all(marks) and not self._strange and self.notes.keys().isdisjoint(marks):
            self._ending.update(zip(marks, ids, strict=True))
            self._orderings.goes_on((self, marks))
            return
        for mark, task_id in zip(marks, ids, strict=True):
            if mark:
                self.end(mark, task_id)

    def end(self, mark: int, task_id: int) -> None:
        """A task of the key has ended for the group, as key holder or not."""
        if self.order.head(mark) == task_id:
            self._note(mark, task_id)

    def leave(self, row: TaskRow, mark: int, *, stays_holder: bool) -> bool:
        """A task of the key leaves; whether it stood in the key queue."""
        task_id = row.id
        if self.order.head(mark) == task_id:
            if not stays_holder:
                self.end(mark, task_id)
        elif self.order.remove(mark, task_id, row.due_ms):
            self._odd.pop(task_id, None)
            self._group.in_key_queues -= 1
            self.keep_from_going_on(mark)
            return True
        return False

    def some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks out of key queues, for a group that is being deleted."""
        taken = self.order.pop_some(limit)
        for task_id in taken:
            self._odd.pop(task_id, None)
        self._group.in_key_queues -= len(taken)
        return taken

    def forget_shares(self) -> None:
        """The tasks of the group have no shares any more."""
        self._odd = {i: (priority, 0) for i, (priority, _) in self._odd.items() if priority}
        for comes in self._again.values():
            comes[:] = [(i, known._replace(share=0), front) for i, known, front in comes]

    # --- a key goes on -------------------------------------------------------------------------

    def keep_from_going_on(self, mark: int) -> None:
        """Something of the key has changed that a crash would undo: nobody who has had no attempt
        is handed out before that is durable. 0: there is no key."""
        if mark:
            self._note(mark, self._ending.get(mark, 0))

    def _note(self, mark: int, head: int) -> None:
        """Note that a key goes on when the open batch is durable, and not before."""
        before = self.notes.get(mark)
        if before is None:
            before = int(mark in self._ending)
        self.notes[mark] = before + 1
        self._ending[mark] = head
        self._orderings.goes_on((self, [mark]))

    def _was_last_note(self, mark: int) -> bool:
        """One note about a key is durable; whether all of them are."""
        left = self.notes.pop(mark, 1) - 1
        if left:
            self.notes[mark] = left
        return not left

    def durable(self, ended: Sequence[int], now_ms: int) -> None:
        """The notes of these order keys are durable: the next task of each may be the holder."""
        if now_ms > self._shares.now_ms:
            self._shares.now_ms = now_ms
        if self.notes:
            ended = [mark for mark in ended if self._was_last_note(mark)]
        if self._again:
            # A head among them takes its end back, which is pending still.
            for mark in [mark for mark in ended if mark in self._again]:
                self._comes_again(mark)
        heads = list(map(self._ending.pop, ended))
        if not all(heads):
            pairs = zip(ended, heads, strict=True)
            ended = [mark for mark, head in pairs if self._may_go_on(mark, head)]
        self._follow(ended)
        self._orderings.wake(self._group)

    def _may_go_on(self, mark: int, head: int) -> bool:
        """Whether another task may be the key holder now that the change is durable. ``head``: the
        holder that has ended, or 0."""
        if mark == EVERY_KEY:
            self._may_all_go_on()
            return False
        return bool(head) or (self.order.head(mark) == NOBODY and not self.gathers)

    def _comes_again(self, mark: int) -> None:
        """The tasks of a key that wait for it, and have not left, get their next attempts."""
        for task_id, known, front in self._again.pop(mark):
            if task_id in self.coming:
                self.coming.remove(task_id)
                self.come(task_id, known, self._group.loading.pop(task_id), front=front)

    def _follow(self, marks: Sequence[int]) -> None:
        """Make the next task of each of these order keys its key holder."""
        group, odd = self._group, self._odd
        heads, dues_ms = self.order.follow(marks)
        if not heads:
            return
        group.in_key_queues -= len(heads)
        late_ms = self._shares.now_ms - LATE_MS
        if max(dues_ms) < late_ms:
            self._shares.waited.update(heads)
        elif min(dues_ms) < late_ms:
            pairs = zip(heads, dues_ms, strict=True)
            self._shares.waited.update([head for head, due_ms in pairs if due_ms < late_ms])
        if odd or group.settings.shares.fair_by is not None:
            for head in heads:
                priority, share = odd.pop(head, (0, 0))
                self._shares.call(head, share, priority, front=False)
        else:
            group.ready.push_all(heads, self._shares.now_ms)

    @property
    def gathers(self) -> bool:
        """Whether no task becomes key holder: a replay may still bring earlier tasks of any key,
        or a crash those that had ended before it and were not among them."""
        return self._group in self._group.topic.replays or EVERY_KEY in self._ending

    def gathered(self) -> None:
        """The replay of the group is over."""
        self.keep_from_going_on(EVERY_KEY)

    def _may_all_go_on(self) -> None:
        if self._group not in self._orderings.of:
            return  # it was deleted in the batch in which its replay ended
        queues = self.order.queues.items()
        self._orderings.gathered[self._group] = [mark for mark, one in queues if one.head == NOBODY]

    def go_on(self, limit: int, now_ms: int) -> None:
        """Let up to ``limit`` of the keys go on that were held up during a replay."""
        self._shares.now_ms = max(self._shares.now_ms, now_ms)
        marks = self._orderings.gathered[self._group]
        if self.gathers or not marks:
            del self._orderings.gathered[self._group]
            return
        ending, head = self._ending, self.order.head
        self._follow([one for one in marks[-limit:] if one not in ending and head(one) == NOBODY])
        del marks[-limit:]
        self._orderings.wake(self._group)


class KeptBack(NamedTuple):
    """A task that would have been handed out, and waits until a key is resumed."""

    mark: int
    """Of the paused key."""
    share: int
    """The mark of the task's value; 0: it has none."""
    priority: int
    due_ms: int


class KeyPauses:
    """The paused keys of one group, and their tasks that are kept back."""

    __slots__ = ("_group", "_shares", "kept")

    def __init__(self, group: Group, shares: FairShares) -> None:
        self._group = group
        self._shares = shares
        self.kept: dict[int, KeptBack] = {}
        """Id → what is known of a task that is kept back, in the order of their turns."""

    # --- a key is paused and resumed ----------------------------------------------------------

    def pause(self, mark: int, key: PausedKey) -> None:
        """Keep the tasks of a key back from now on, or since before a restart."""
        group = self._group
        group.paused_keys[mark] = key
        intervals = group.key_intervals.setdefault(mark, HoldIntervals())
        intervals.turn(Cause.KEY_PAUSED, key.since_ms, None)

    def resume(self, mark: int, now_ms: int) -> None:
        """Let the tasks of a paused key be handed out again."""
        group = self._group
        del group.paused_keys[mark]
        intervals = group.key_intervals.pop(mark)
        intervals.turn(None, now_ms, None)
        group.key_intervals[mark] = intervals  # behind those that ended before
        if len(group.key_intervals) - len(group.paused_keys) > REMEMBERED_MAX:
            oldest = next(m for m in group.key_intervals if m not in group.paused_keys)
            del group.key_intervals[oldest]
        self._let_go([i for i, kept in self.kept.items() if kept.mark == mark])
        self._shares.resumed(mark)

    def are_odd(self, marks: Collection[int]) -> bool:
        """Whether one of these order keys is paused."""
        paused = self._group.paused_keys
        return bool(paused) and not paused.keys().isdisjoint(marks)

    # --- a task comes, and leaves -------------------------------------------------------------

    def keeps(self, row: TaskRow, order: int) -> bool:
        """Whether a task that was taken from the ready queue is kept back. ``order``: the mark of
        its order key, or 0."""
        paused, share = self._group.paused_keys, self._shares.mark_of(row)
        mark = order if order in paused else share
        if mark not in paused:
            return False
        self._shares.taken(row.id)
        priority = 0 if row.options is None else row.options.priority
        self.kept[row.id] = KeptBack(mark, share, priority, row.due_ms)
        self._group.in_key_queues += 1
        return True

    def leave(self, task_id: int) -> bool:
        """A task leaves the group's queues; whether it was kept back."""
        if self.kept.pop(task_id, None) is None:
            return False
        self._group.in_key_queues -= 1
        return True

    def some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks that were kept back, for a group that is being deleted."""
        taken = list(self.kept)[: max(0, limit)]
        for task_id in taken:
            self.leave(task_id)
        return taken

    def forget_shares(self) -> list[PausedKey]:
        """The group is shared by something else, and its tasks have no shares any more: its values
        go on, and those of them that were paused are returned."""
        values = {mark: key for mark, key in self._group.paused_keys.items() if key.fair_by}
        for mark in values:
            self.resume(mark, self._shares.now_ms)
        self.kept = {i: kept._replace(share=0) for i, kept in self.kept.items()}
        return list(values.values())

    def _let_go(self, ids: list[int]) -> None:
        """These tasks are ready before all others, and in the order of their turns."""
        for task_id in reversed(ids):
            kept = self.kept.pop(task_id)
            self._group.in_key_queues -= 1
            self._shares.waited.add(task_id)
            self._shares.call(task_id, kept.share, kept.priority, front=True)


class Preferences:
    """Which subscriber of a group gets the tasks of an order key: the one that had the key last, if
    it is there, else the one to which the key's partition belongs."""

    __slots__ = ("_had", "_partitions")

    def __init__(self, subscribers: Iterable[Subscriber]) -> None:
        self._partitions = KeyPartitions[Subscriber]()
        self._had: dict[int, Subscriber] = {}
        """Mark → the subscriber that had the key last, of so many keys."""
        for subscriber in subscribers:
            self.join(subscriber)

    def __len__(self) -> int:
        """How many subscribers may be preferred."""
        return len(self._partitions)

    def join(self, subscriber: Subscriber) -> None:
        """The subscriber may be preferred. A pull is not: it is gone after one delivery."""
        if not subscriber.once:
            self._partitions.join(subscriber)

    def part(self, subscriber: Subscriber) -> None:
        """The subscriber gets no more deliveries."""
        self._partitions.leave(subscriber)

    def preferred(self, marks: Sequence[int]) -> tuple[Sequence[Subscriber | None], bool]:
        """The subscriber that each key prefers, of mark 0 nobody; and whether all of them had it
        last."""
        before = list(map(self._had.get, marks))
        if self._partitions.has_all(before):
            return before, True
        return self._partitions.of(marks, self._had), False

    def remember(self, marks: Sequence[int], subscriber: Subscriber) -> None:
        """The subscriber has these keys now, and is preferred for them."""
        had = self._had
        if subscriber not in self._partitions or len(self._partitions) < 2:
            return
        before = list(map(had.get, marks))
        if before.count(subscriber) == len(before):
            return
        for mark in compress(marks, [one is not subscriber for one in before]):
            had.pop(mark, None)
            if len(had) >= HAD_MAX:
                del had[next(iter(had))]
            had[mark] = subscriber


class Ordering:
    """The order keys and fair shares of one group: what a task passes on its way to the ready
    queue, and what its leaving does to the others."""

    def __init__(self, orderings: Orderings, group: Group) -> None:
        self._orderings = orderings
        self._group = group
        self.shares = FairShares(orderings, group)
        self.keys = KeyHolders(orderings, group, self.shares)
        self.pauses = KeyPauses(group, self.shares)
        self.preferences = Preferences(group.subscribers)
        self.waiting: dict[int, Waiting] = {}
        """Id → what is remembered of a task that waits for its next attempt."""
        self.held: dict[int, int] = {}
        """Id of a held task → since when (wall ms); an operator has to act on it."""

    def _told(self, now_ms: int) -> None:
        if now_ms > self.shares.now_ms:
            self.shares.now_ms = now_ms

    # --- a task comes ------------------------------------------------------------------------

    def arrive(self, row: TaskRow, now_ms: int) -> None:
        """The group has got the task: it is ready as soon as it is the key holder."""
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
        """``arrive`` for each of these tasks, at least one."""
        marks = self._marks_of_usual(rows)
        if marks is None:
            for row in rows:
                self.arrive(row, now_ms)
            return
        self._told(now_ms)
        self.keys.arrive_all(rows, marks)

    def _marks_of_usual(self, rows: Sequence[TaskRow]) -> list[int] | None:
        """The marks of tasks that have an order key and nothing else to decide about; None: some
        of them are not so."""
        if self._group.settings.shares.fair_by is not None or self.keys.gathers:
            return None
        options = [row[4] for row in rows]
        if not all(options):
            return None
        columns = columns_of(options)
        if any(columns.priority) or not is_absent(columns.order_id):
            return None
        marks = marks_of(columns)
        return marks if marks and all(marks) and not self.keys.are_noted(marks) else None

    def again(self, lease: Lease, now_ms: int, *, front: bool) -> None:
        """The task of a lease that has ended is ready again."""
        self._told(now_ms)
        known, priority = _of_lease(lease), lease.traits.priority
        if known.order:
            self.keys.keep_from_going_on(known.order)
            self.keys.come_when_durable(lease.id, known, priority, front=front)
        else:
            self.keys.come(lease.id, known, priority, front=front)

    def retry(self, task_id: int, priority: int, now_ms: int) -> None:
        """The wait of a task for its next attempt is over."""
        self._told(now_ms)
        self._unhold(task_id)
        known = self.waiting.pop(task_id, None)
        if known is None:
            self.shares.call(task_id, 0, priority, front=False)
        else:
            self.keys.come_after_wait(task_id, known, priority)

    def waits(self, of: Lease | TaskRow, *, is_new: bool = True) -> None:
        """The group waits for the task's next attempt. It stays key holder, if it is. ``is_new``:
        no batch says so yet."""
        if isinstance(of, Lease):
            known = _of_lease(of)
        else:
            known = Waiting(mark_of(of), self.shares.mark_of(of), of.due_ms, order_of(of))
        if known.order or known.share:
            self.waiting[of.id] = known
            if known.order and is_new:
                self.keys.keep_from_going_on(known.order)

    # --- a task is handed out ------------------------------------------------------------------

    def hand_out(
        self, row: TaskRow, mark: int, subscriber: Subscriber, mono_ms: int, *, is_first: bool
    ) -> Traits | None:
        """The traits of a task that was taken from the ready queue and is being leased. None, if
        its key is paused, or if nobody has had it (``is_first``) and one of its key has come since
        that is due before it: that one is ready now, and this one in its key queue. ``mark``: of
        its order key, or 0."""
        shares, keys = self.shares, self.keys
        if self._group.paused_keys and self.pauses.keeps(row, mark):
            return None
        if mark:
            is_odd = mark in keys.order.overtaken or mark in keys.notes
            if is_odd and is_first and keys.gives_way(row, mark):
                return None
            self.preferences.remember((mark,), subscriber)
        share = None
        if shares.called or shares.plain_left:
            share = shares.leave_ready(row.id, mono_ms)
        waited = row.id in shares.waited
        if waited:
            shares.waited.remove(row.id)
        traits = traits_of(row)
        return traits._replace(share=share, waited=waited) if share or waited else traits

    def takes(self, marks: Collection[int] | None) -> bool:
        """Whether ``hand_out`` can only say of tasks without shares whether they waited. ``marks``:
        of their order keys; None: they have none."""
        if marks is None:
            return True
        return not (self.keys.are_odd(marks) or self.pauses.are_odd(marks))

    def hand_out_all(self, ids: Sequence[int], traits: list[Traits] | None) -> list[Traits] | None:
        """``hand_out`` for each of these tasks, whoever gets it; returns their traits. None: all
        are ``PLAIN``."""
        waited = self.shares.waited.intersection(ids) if self.shares.waited else None
        if not waited:
            return traits
        self.shares.waited -= waited
        if len(waited) == len(ids) and traits is None:
            return [WAITED] * len(ids)
        return [
            one if task_id not in waited else WAITED if one is PLAIN else one._replace(waited=True)
            for task_id, one in zip(ids, traits or repeat(PLAIN), strict=traits is not None)
        ]

    def restored(self, row: TaskRow) -> tuple[int, Traits]:
        """A task was in flight before a restart: (mark of its order key or 0, traits)."""
        mark = mark_of(row)
        if mark:
            self.keys.restored(mark, row.id)
        return mark, traits_of(row)._replace(share=self.shares.restored(self.shares.mark_of(row)))

    def claim(self, row: TaskRow) -> None:
        """A task that waited for a retry before a restart is the holder of its key."""
        mark = mark_of(row)
        if mark:
            self.keys.order.claim(mark, row.id)

    # --- a task leaves -------------------------------------------------------------------------

    def returned(self, leases: Collection[Lease], *, done: bool) -> None:
        """These leases have ended; ``done``: their tasks are done for the group."""
        self.shares.returned(leases)
        if done:
            self.keys.done(leases)
        self._orderings.wake(self._group)

    def died(self, lease: Lease) -> None:
        """The task of a lease has become a dead letter."""
        if lease.order:
            self.keys.end(lease.order, lease.id)

    def leave(self, row: TaskRow, *, stays_holder: bool = False) -> bool:
        """A task that is ready or waits leaves the group's queues. Whether it stood in a key
        queue, and so in no other. ``stays_holder``: it leaves only to wait."""
        task_id, mark = row.id, mark_of(row)
        self.shares.waited.discard(task_id)
        self.keys.coming.discard(task_id)
        self._unhold(task_id)
        waited = self.waiting.pop(task_id, None) is not None
        if mark and self.keys.leave(row, mark, stays_holder=stays_holder):
            return True
        if self.pauses.leave(task_id):
            return True
        if waited or task_id in self._group.waiting or self.shares.uncall(task_id):
            return False
        return self.shares.withdraw(row)

    def taken(self, row: TaskRow, *, stays_holder: bool = False) -> None:
        """``leave`` for a task that was taken from the ready queue and is not handed out."""
        mark = mark_of(row)
        if mark and not stays_holder:
            self.keys.end(mark, row.id)
        self.shares.taken(row.id)

    def some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks out of key queues, for a group that is being deleted."""
        taken = self.keys.some(limit)
        taken += self.pauses.some(limit - len(taken))
        return taken + self.shares.some(limit - len(taken))

    # --- a key is held -------------------------------------------------------------------------

    def hold(self, lease: Lease, now_ms: int) -> None:
        """The task of a lease is held: its key waits for an operator."""
        self.held_since(lease.id, now_ms)
        self.waits(lease)

    def held_since(self, task_id: int, since_ms: int) -> None:
        self.held[task_id] = since_ms
        self._group.held = len(self.held)

    def _unhold(self, task_id: int) -> None:
        if self.held.pop(task_id, None) is not None:
            self._group.held = len(self.held)

    def release(self, task_id: int, priority: int, now_ms: int) -> None:
        """A held task is tried again."""
        known = self.waiting.get(task_id)
        if known is not None:
            self.keys.keep_from_going_on(known.order)
        self.retry(task_id, priority, now_ms)

    def let_go(self, task_id: int) -> None:
        """A held task leaves in another way, and its key goes on without it."""
        self._unhold(task_id)
        known = self.waiting.pop(task_id, None)
        if known is not None and known.order:
            self.keys.end(known.order, task_id)

    # --- of the whole group --------------------------------------------------------------------

    @property
    def has_preferences(self) -> bool:
        """Whether it matters which subscriber gets a ready task."""
        return len(self.keys.order) > 0 and len(self.preferences) > 1

    def shared_by(self, former: GroupSettings, mono_ms: int) -> list[PausedKey]:
        """The group has other settings than the ``former`` ones. Another ``fair_by`` holds for
        what comes from now on: what is there goes out as it came. Returns the values that were
        paused and are not any more."""
        resumed: list[PausedKey] = []
        if self._group.settings.shares.fair_by != former.shares.fair_by:
            self.keys.forget_shares()
            resumed = self.pauses.forget_shares()
            self.waiting = {i: known._replace(share=0) for i, known in self.waiting.items()}
        self.shares.resettle(former, mono_ms)
        return resumed

    def since_ms(self) -> int:
        """About since when the task waits that has waited longest of those in key queues: of so
        many queues, the oldest ones."""
        queues = islice(self.keys.order.queues.values(), AGES_LOOKED_AT)
        times = [queue.first()[0] for queue in queues]
        for share in islice(self.shares.of.values(), AGES_LOOKED_AT):
            if share.queue is not None:
                ages = (level.since_ms for level in share.queue.levels() if len(level))
                times += [since_ms for since_ms in ages if since_ms is not None]
        times += [kept.due_ms for kept in islice(self.pauses.kept.values(), AGES_LOOKED_AT)]
        return min(times, default=self.shares.now_ms)


class Orderings:
    """The ``Ordering`` of each group that has one, and what the next ticks have to do about it."""

    def __init__(self, wake: Callable[[Group], None], goes_on: Callable[[Ended], None]) -> None:
        """``wake``: a group may be able to deliver; ``goes_on``: to be told ``durable`` when the
        open batch is."""
        self.wake = wake
        self.goes_on = goes_on
        self.of: dict[Group, Ordering] = {}
        """The ``Ordering`` of each group that is ``is_ordered``."""
        self.behind: dict[int, TaskRow] = {}
        """Tasks that have fired and have their rows, and wait: with an order key for others that
        are due before and are being read, or all until more may be judged by filters. They are in
        ``Core.firing``, too."""
        self.gathered: dict[Group, list[int]] = {}
        """Groups whose replay is over → their keys that go on, a few at a time."""
        self.paced: dict[Group, int] = {}
        """Groups with values held back by ``rate_each`` → when the first may go on."""

    def begin(self, group: Group) -> Ordering:
        """The ``Ordering`` of the group, made on first use."""
        found = self.of.get(group)
        if found is None:
            found = self.of[group] = Ordering(self, group)
            group.is_ordered, group.key_queues_since_ms = True, found.since_ms
        return found

    def coming(self, group: Group) -> Collection[int]:
        """The tasks of the group that are ready again when a batch is durable."""
        found = self.of.get(group)
        return () if found is None else found.keys.coming

    def forget(self, group: Group) -> None:
        """Forget the order keys and shares of a group that is gone."""
        for names in (self.of, self.gathered, self.paced):
            names.pop(group, None)

    def tick(self, limit: int, now_ms: int, mono_ms: int) -> None:
        """Let keys held up by a replay, and values whose token has come, go on."""
        for group in list(self.gathered):
            self.of[group].keys.go_on(limit, now_ms)
        for group in [group for group, at_ms in self.paced.items() if at_ms <= mono_ms]:
            self.of[group].shares.pace(mono_ms)

    def sweep(self) -> None:
        """``FairShares.sweep`` of each group; done once in a while."""
        for ordering in self.of.values():
            ordering.shares.sweep()


def shared_value(row: TaskRow, by: str) -> object:
    """The value of a task by which a group is shared; None: it has none."""
    options = row.options
    if options is None:
        return None
    if by == FAIR_BY_KEY:
        return options.key if options.replayed is None else options.replayed.key
    if by == FAIR_BY_TAG:
        return options.tag
    return (options.properties or {}).get(by)


def _of_lease(lease: Lease) -> Waiting:
    share = lease.traits.share
    return Waiting(lease.order, 0 if share is None else share.mark, lease.due_ms, lease.id)
