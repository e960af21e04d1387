"""Order keys and fair shares of a group: which of its due tasks may be handed out.

A task that a group gets passes two stages before it is ready. If it has an order key, it waits
until every task of that key before it is done (``Order``). If the group is shared by a property, it
waits until its value has a place (``Share``). A group that has neither has none of this
(``Group.is_ordered``).

Invariants:

* Of a key one task is the *key holder*: it is ready, in flight, waiting for a retry or held. It
  stays so until it is done for the group, and the next one follows it when that is durable. So no
  crash makes an earlier task come again after a later one was handed out.
* A task that has had an attempt stays key holder, also when somebody moves it; one that nobody has
  had gives way to a task that came after it and is due before it.
* A task in a key queue is ready as far as counts go (``Group.in_key_queues``), and in no other
  queue of the group.
* With ``limit_each``, what is in flight of a value and what is called are never more together.
"""

from __future__ import annotations

from heapq import heappop, heappush, nlargest
from itertools import compress, islice, repeat
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.queues import NOBODY, Bucket, KeyPartitions, Order, Share, changed
from tickwheel.engine.topics import PLAIN, WAITED, Group, Lease, Subscriber, Traits, traits_of
from tickwheel.model.lateness import LATE_MS
from tickwheel.model.records import FAIR_BY_KEY, FAIR_BY_TAG, columns_of, is_absent, order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tickwheel.engine.delivery import LeaseBatch
    from tickwheel.model.records import GroupSettings, TaskRow

CALLED_MAX, CALLED_IN_ALL = 64, 256
"""How many tasks of one value, and of all values together, about, are called at a time."""
HAD_MAX = 65_536
"""How many keys have their last subscriber remembered."""
QUEUES_LOOKED_AT, AGES_LOOKED_AT = 50_000, 256
NEVER_MS = 1 << 62
"""The time of the next attempt of a held task: never."""
EVERY_KEY = 1 << 64
"""The mark that stands for all keys of a group; the marks of keys have 64 bits."""


class Waiting(NamedTuple):
    """What is remembered of a task that waits for its next attempt."""

    order: int
    share: int
    due_ms: int
    place: int


Ended = tuple["Ordering", list[int]]
"""(ordering, marks): keys whose tasks have changed, and that go on when the batch is durable."""


class KeyQueueState(NamedTuple):
    """How many tasks wait for one order key, or for one value of a fairly shared group."""

    task_id: int
    """One task of the key or value."""
    state: str
    """The state of that task, or what holds back the value: "limited", "throttled"."""
    in_flight: int
    waiting: int
    kind: str
    """"order" or "fair"."""


class HeldKey(NamedTuple):
    """An order key whose group holds it until an operator acts."""

    task_id: int
    since_ms: int
    attempt: int
    waiting: int
    """How many tasks wait behind the held task."""


class FailingKey(NamedTuple):
    """An order key whose first task fails again and again."""

    task_id: int
    failures: int
    waiting: int
    """How many tasks wait behind the failing task."""
    reason: str
    """The reason of the last failure."""


class Ordering:
    """The order keys and fair shares of one group."""

    __slots__ = (
        "_again",
        "_called",
        "_ending",
        "_group",
        "_had",
        "_heap",
        "_mono_ms",
        "_notes",
        "_now_ms",
        "_odd",
        "_orderings",
        "_partitions",
        "_plain_left",
        "_strange",
        "_waited",
        "_waits",
        "coming",
        "held",
        "order",
        "shares",
    )

    def __init__(self, orderings: Orderings, group: Group) -> None:
        self._orderings = orderings
        self._group = group
        self.order = Order()
        self.shares: dict[int, Share] = {}
        """Mark → the share of each value that holds tasks, or has a rate."""
        self.held: dict[int, int] = {}
        """Id of a held task → since when (wall ms); an operator has to act on it."""
        self._odd: dict[int, tuple[int, int]] = {}
        """Id → (priority, mark of its share), of tasks in key queues that have either."""
        self._called: dict[int, Share] = {}
        """Id → share, of the tasks in the ready queue that have one."""
        self._again: dict[int, list[tuple[int, Waiting, bool]]] = {}
        """Mark → (id, what is known of it, whether it goes to the front) of each task that comes
        again when a batch is durable: see ``_come_when_durable``."""
        self.coming: set[int] = set()
        """Ids of tasks of ``_again`` that have not left. They lie in ``loading`` unread."""
        self._waits: dict[int, Waiting] = {}
        self._waited: set[int] = set()
        """Ready tasks that stood in a key queue when they would have been late already."""
        self._ending: dict[int, int] = {}
        """Mark → the head that has ended or 0, of keys of which something is not durable: the end
        of the head, or that another one has left its queue."""
        self._notes: dict[int, int] = {}
        """Mark → how many batches have to be durable before the key goes on, of those keys of
        ``_ending`` of which more is to be said than that the head is done."""
        self._heap: list[tuple[int, int]] = []
        """(steady ms, mark) of shares that wait for a token."""
        self._plain_left = 0
        """Tasks in the ready queue that are of the time before the group was shared as it is, at
        most: they have no share."""
        self._now_ms = self._mono_ms = 0
        """The latest times, by the wall and the steady clock, that the group was told."""
        self._strange = False
        """Whether more than one task of some key was in flight before a restart."""
        self._partitions = KeyPartitions[Subscriber]()
        self._had: dict[int, Subscriber] = {}
        for subscriber in group.subscribers:
            self.join(subscriber)

    # --- marks -------------------------------------------------------------------------------

    def order_of(self, row: TaskRow) -> int:
        """The mark of the order key of a task; 0: it has none."""
        options = row.options
        if options is None or options.order_key is None:
            return 0
        return hash(options.order_key) or 1

    def _share_of(self, row: TaskRow) -> int:
        """The mark of the value of a task; 0: the group is not shared."""
        by, options = self._group.settings.fair_by, row.options
        if by is None:
            return 0
        value = shared_value(row, by) if options is not None else None
        return hash((by, type(value) is bool, value)) or 1

    # --- a task comes ------------------------------------------------------------------------

    def arrive(self, row: TaskRow, now_ms: int) -> None:
        """The group has got the task: it is ready as soon as it is the key holder."""
        if now_ms > self._now_ms:
            self._now_ms = now_ms
        options, task_id, share = row.options, row.id, self._share_of(row)
        priority = 0 if options is None else options.priority
        if options is None or options.order_key is None:
            self._call(task_id, share, priority, front=False)
            return
        mark = hash(options.order_key) or 1
        if share or priority or mark in self._ending or self._gathers:
            known = Waiting(mark, share, row.due_ms, order_of(row))
            self._come(task_id, known, priority, front=False)
        elif self.order.arrive(mark, task_id, row.due_ms, options.order_id or task_id):
            self._group.ready.push(task_id, 0, now_ms)
        else:
            self._group.in_key_queues += 1

    def arrive_all(self, rows: Sequence[TaskRow], now_ms: int) -> None:
        """``arrive`` for each of these tasks, at least one."""
        marks = self._marks_of_usual(rows)
        if marks is None:
            for row in rows:
                self.arrive(row, now_ms)
            return
        self._now_ms = max(self._now_ms, now_ms)
        holders = self.order.arrive_all(marks, [row[0] for row in rows], [row[1] for row in rows])
        self._group.ready.push_all(holders, self._now_ms)
        self._group.in_key_queues += len(rows) - len(holders)

    def _marks_of_usual(self, rows: Sequence[TaskRow]) -> list[int] | None:
        """The marks of tasks that have an order key and nothing else to decide about; None: some
        of them are not so."""
        if self._group.settings.fair_by is not None or self._gathers:
            return None
        options = [row[4] for row in rows]
        if not all(options):
            return None
        columns = columns_of(options)
        if any(columns.priority) or not is_absent(columns.order_id) or not all(columns.order_key):
            return None
        marks = list(map(hash, columns.order_key))
        return marks if all(marks) and self._notes.keys().isdisjoint(marks) else None

    def again(self, lease: Lease, now_ms: int, *, front: bool) -> None:
        """The task of a lease that has ended is ready again."""
        self._now_ms = max(self._now_ms, now_ms)
        known, priority = _of_lease(lease), lease.traits.priority
        if known.order:
            self.keep_from_going_on(known.order)
            self._come_when_durable(lease.id, known, priority, front=front)
        else:
            self._come(lease.id, known, priority, front=front)

    def retry(self, task_id: int, priority: int, now_ms: int) -> None:
        """The wait of a task for its next attempt is over."""
        self._now_ms = max(self._now_ms, now_ms)
        self._unhold(task_id)
        known = self._waits.pop(task_id, None)
        if known is None:
            self._call(task_id, 0, priority, front=False)
        elif known.order in self._ending:
            self._come_when_durable(task_id, known, priority, front=False)
        else:
            self._come(task_id, known, priority, front=False)

    def _come_when_durable(
        self, task_id: int, known: Waiting, priority: int, *, front: bool
    ) -> None:
        """A task gets its next attempt when it is durable that it has had the one before: otherwise
        a crash could make an answer to that one count for this one. Until then the task lies in
        ``loading``."""
        self._group.loading[task_id] = priority
        self.coming.add(task_id)
        self._again.setdefault(known.order, []).append((task_id, known, front))

    def _come(self, task_id: int, known: Waiting, priority: int, *, front: bool) -> None:
        order, share, due_ms, place = known
        if order:
            if self._gathers:
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
        self._call(task_id, share, priority, front=front)

    def _call(self, task_id: int, mark: int, priority: int, *, front: bool) -> None:
        """The task has no order key, or is its holder: it is ready, if its value has a place."""
        group = self._group
        if mark:
            share = self._share(mark)
            if not self._has_place(share) or (share.queue is not None and not front):
                share.put(task_id, priority, self._now_ms, front=front)
                group.in_key_queues += 1
                return
            share.called += 1
            self._called[task_id] = share
        elif group.settings.fair_by is not None:
            self._plain_left += 1
        if front:
            group.ready.push_front(task_id, priority)
        else:
            group.ready.push(task_id, priority, self._now_ms)

    def waits(self, of: Lease | TaskRow, *, is_new: bool = True) -> None:
        """The group waits for the task's next attempt. It stays key holder, if it is. ``is_new``:
        no batch says so yet."""
        if isinstance(of, Lease):
            known = _of_lease(of)
        else:
            known = Waiting(self.order_of(of), self._share_of(of), of.due_ms, order_of(of))
        if known.order or known.share:
            self._waits[of.id] = known
            if known.order and is_new:
                self.keep_from_going_on(known.order)

    # --- a task is handed out ------------------------------------------------------------------

    def hand_out(
        self, row: TaskRow, mark: int, subscriber: Subscriber, mono_ms: int, *, is_first: bool
    ) -> Traits | None:
        """The traits of a task that was taken from the ready queue and is being leased. None, if
        nobody has had it (``is_first``) and one of its key has come since that is due before it:
        that one is ready now, and this one in its key queue. ``mark``: of its order key, or 0."""
        if mark:
            is_odd = mark in self.order.overtaken or mark in self._notes
            if is_odd and is_first and self._gives_way(row, mark):
                return None
            self.remember((mark,), subscriber)
        share = None
        if self._called or self._plain_left:
            share = self._leave_ready(row.id, mono_ms)
        waited = row.id in self._waited
        if waited:
            self._waited.remove(row.id)
        traits = traits_of(row)
        return traits._replace(share=share, waited=waited) if share or waited else traits

    @property
    def has_shares(self) -> bool:
        """Whether some ready task has a share, or may have had one."""
        return bool(self._called or self._plain_left or self._group.settings.fair_by is not None)

    def takes(self, lease_batch: LeaseBatch) -> bool:
        """Whether ``hand_out`` can only say of these tasks whether they waited."""
        marks, odd = lease_batch.marks, (self.order.overtaken, self._notes.keys())
        return marks is None or all(some.isdisjoint(marks) for some in odd if some)

    def hand_out_all(self, lease_batch: LeaseBatch) -> None:
        """``hand_out`` for each task of a batch, whoever gets it."""
        ids = lease_batch.ids
        waited = self._waited.intersection(ids) if self._waited else None
        if not waited:
            return
        self._waited -= waited
        traits = lease_batch.traits
        if len(waited) == len(ids) and traits is None:
            lease_batch.traits = [WAITED] * len(ids)
            return
        lease_batch.traits = [
            one if task_id not in waited else WAITED if one is PLAIN else one._replace(waited=True)
            for task_id, one in zip(ids, traits or repeat(PLAIN), strict=traits is not None)
        ]

    def _leave_ready(self, task_id: int, mono_ms: int) -> Share | None:
        """A ready task is in flight now; the share of its value, if it has one."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        share = self._called.pop(task_id, None)
        if share is not None:
            share.called -= 1
            share.in_flight += 1
            if share.bucket is not None:
                share.bucket.left(mono_ms)
                share.bucket.take(1)
            self._admit(share)
        elif self._plain_left:
            self._plain_left -= 1
        return share

    def _gives_way(self, row: TaskRow, mark: int) -> bool:
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
        self._uncall(row.id)
        share = self._share_of(row)
        priority = row.options.priority if row.options is not None else 0
        if priority or share:
            self._odd[row.id] = (priority, share)
        if first:
            priority, share = self._odd.pop(first, (0, 0))
            self._call(first, share, priority, front=True)
        return True

    def restored(self, row: TaskRow) -> tuple[int, Traits]:
        """A task was in flight before a restart: (mark of its order key or 0, traits)."""
        order, mark = self.order_of(row), self._share_of(row)
        if order and not self.order.claim(order, row.id):
            self._strange = True
        share = self._share(mark) if mark else None
        if share is not None:
            share.in_flight += 1
        return order, traits_of(row)._replace(share=share)

    def claim(self, row: TaskRow) -> None:
        """A task that waited for a retry before a restart is the holder of its key."""
        order = self.order_of(row)
        if order:
            self.order.claim(order, row.id)

    def returned(self, leases: Collection[Lease], *, done: bool) -> None:
        """These leases have ended; ``done``: their tasks are done for the group."""
        if self.shares:
            for lease in leases:
                share = lease.traits.share
                if share is not None:
                    share.in_flight -= 1
                    self._admit(share)
        if done:
            self._done(leases)
        self._orderings.wake(self._group)

    def _done(self, leases: Iterable[Lease]) -> None:
        """The tasks of these leases are done: their keys go on when that is durable."""
        marks = [lease.order for lease in leases]
        ids = [lease.id for lease in leases]
        if all(marks) and not self._strange and self._notes.keys().isdisjoint(marks):
            self._ending.update(zip(marks, ids, strict=True))
            self._orderings.goes_on((self, marks))
            return
        for mark, task_id in zip(marks, ids, strict=True):
            if mark:
                self._end(mark, task_id)

    def died(self, lease: Lease) -> None:
        """The task of a lease has become a dead letter."""
        if lease.order:
            self._end(lease.order, lease.id)

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
        known = self._waits.get(task_id)
        if known is not None and known.order:
            self.keep_from_going_on(known.order)
        self.retry(task_id, priority, now_ms)

    def let_go(self, task_id: int) -> None:
        """A held task leaves in another way, and its key goes on without it."""
        self._unhold(task_id)
        known = self._waits.pop(task_id, None)
        if known is not None and known.order:
            self._end(known.order, task_id)

    # --- a task leaves -------------------------------------------------------------------------

    def leave(self, row: TaskRow, *, stays_holder: bool = False) -> bool:
        """A task that is ready or waits leaves the group's queues. Whether it stood in a key
        queue, and so in no other. ``stays_holder``: it leaves only to wait."""
        task_id, group = row.id, self._group
        self._waited.discard(task_id)
        self.coming.discard(task_id)
        self._unhold(task_id)
        waited = self._waits.pop(task_id, None) is not None
        order = self.order_of(row)
        if order:
            if self.order.head(order) == task_id:
                if not stays_holder:
                    self._end(order, task_id)
            elif self.order.remove(order, task_id, row.due_ms):
                self._odd.pop(task_id, None)
                group.in_key_queues -= 1
                self.keep_from_going_on(order)
                return True
        if waited or task_id in group.waiting or self._uncall(task_id):
            return False
        share = self.shares.get(self._share_of(row))
        if share is None or share.queue is None or task_id in group.loading:
            return False
        if self._plain_left and not share.queue.holds(task_id):
            self._plain_left -= 1
            return False
        share.withdraw(task_id)
        group.in_key_queues -= 1
        self._prune(share)
        return True

    def taken(self, row: TaskRow, *, stays_holder: bool = False) -> None:
        """``leave`` for a task that was taken from the ready queue and is not handed out."""
        order = self.order_of(row)
        self._waited.discard(row.id)
        if order and not stays_holder:
            self._end(order, row.id)
        if not self._uncall(row.id) and self._plain_left:
            self._plain_left -= 1

    def _uncall(self, task_id: int) -> bool:
        """A task is in the ready queue no more; whether it was called."""
        share = self._called.pop(task_id, None)
        if share is None:
            return False
        share.called -= 1
        self._admit(share)
        return True

    def _end(self, mark: int, task_id: int) -> None:
        if self.order.is_head(mark, task_id):
            self._note(mark, task_id)

    def keep_from_going_on(self, mark: int) -> None:
        """Something of the key has changed that a crash would undo: nobody who has had no attempt
        is handed out before that is durable. 0: there is no key."""
        if mark:
            self._note(mark, self._ending.get(mark, 0))

    def _note(self, mark: int, head: int) -> None:
        """Note that a key goes on when the open batch is durable, and not before."""
        before = self._notes.get(mark)
        if before is None:
            before = int(mark in self._ending)
        self._notes[mark] = before + 1
        self._ending[mark] = head
        self._orderings.goes_on((self, [mark]))

    def _was_last_note(self, mark: int) -> bool:
        """One note about a key is durable; whether all of them are."""
        left = self._notes.pop(mark, 1) - 1
        if left:
            self._notes[mark] = left
        return not left

    def durable(self, ended: Sequence[int], now_ms: int) -> None:
        """The notes of these order keys are durable: the next task of each may be the holder."""
        if now_ms > self._now_ms:
            self._now_ms = now_ms
        if self._notes:
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
        return bool(head) or (self.order.head(mark) == NOBODY and not self._gathers)

    def _comes_again(self, mark: int) -> None:
        """The tasks of a key that wait for it, and have not left, get their next attempts."""
        for task_id, known, front in self._again.pop(mark):
            if task_id in self.coming:
                self.coming.remove(task_id)
                self._come(task_id, known, self._group.loading.pop(task_id), front=front)

    def _follow(self, marks: Sequence[int]) -> None:
        """Make the next task of each of these order keys its key holder."""
        group, odd = self._group, self._odd
        heads, dues_ms = self.order.follow(marks)
        if not heads:
            return
        group.in_key_queues -= len(heads)
        late_ms = self._now_ms - LATE_MS
        if max(dues_ms) < late_ms:
            self._waited.update(heads)
        elif min(dues_ms) < late_ms:
            pairs = zip(heads, dues_ms, strict=True)
            self._waited.update([head for head, due_ms in pairs if due_ms < late_ms])
        if odd or group.settings.fair_by is not None:
            for head in heads:
                priority, share = odd.pop(head, (0, 0))
                self._call(head, share, priority, front=False)
        else:
            group.ready.push_all(heads, self._now_ms)

    @property
    def _gathers(self) -> bool:
        """Whether no task becomes key holder: a replay may still bring earlier tasks of any key,
        or a crash those that had ended before it and were not among them."""
        return self._group in self._group.topic.replays or EVERY_KEY in self._ending

    def gathered(self) -> None:
        """The replay of the group is over."""
        self.keep_from_going_on(EVERY_KEY)

    def _may_all_go_on(self) -> None:
        queues = self.order.queues.items()
        self._orderings.gathered[self._group] = [mark for mark, one in queues if one.head == NOBODY]

    def go_on(self, limit: int, now_ms: int) -> None:
        """Let up to ``limit`` of the keys go on that were held up during a replay."""
        self._now_ms = max(self._now_ms, now_ms)
        marks = self._orderings.gathered[self._group]
        if self._gathers or not marks:
            del self._orderings.gathered[self._group]
            return
        ending, head = self._ending, self.order.head
        self._follow([one for one in marks[-limit:] if one not in ending and head(one) == NOBODY])
        del marks[-limit:]
        self._orderings.wake(self._group)

    def some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks out of key queues, for a group that is being deleted."""
        taken = self.order.pop_some(limit)
        for share in list(self.shares.values()):
            while len(taken) < limit and (found := share.next()) is not None:
                taken.append(found[0])
            self._prune(share)
        for task_id in taken:
            self._odd.pop(task_id, None)
        self._group.in_key_queues -= len(taken)
        return taken

    # --- shares --------------------------------------------------------------------------------

    def _share(self, mark: int) -> Share:
        found = self.shares.get(mark)
        if found is None:
            rate, bucket = self._group.settings.rate_each, None
            if rate is not None:
                bucket = Bucket(rate, None, self._mono_ms)
            found = self.shares[mark] = Share(mark, bucket)
        return found

    def _has_place(self, share: Share) -> bool:
        """Whether one more task of a value may be called."""
        limit, called = self._group.settings.limit_each, share.called
        if limit is not None and called + share.in_flight >= limit:
            return False
        if called and called >= min(CALLED_MAX, CALLED_IN_ALL // len(self.shares)):
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
            self._waited.add(task_id)
            group.in_key_queues -= 1
            share.called += 1
            self._called[task_id] = share
            group.ready.push(task_id, priority, self._now_ms)
        self._prune(share)

    def _prune(self, share: Share) -> None:
        """Forget a value that has nothing to remember."""
        if not share.is_idle or self.shares.get(share.mark) is not share:
            return
        bucket = share.bucket
        if bucket is None or bucket.left(self._mono_ms) >= int(bucket.burst):
            del self.shares[share.mark]

    def pace(self, mono_ms: int) -> None:
        """Let values whose token has come go on."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        heap = self._heap
        while heap and heap[0][0] <= mono_ms:
            _, mark = heappop(heap)
            share = self.shares.get(mark)
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
        for share in list(self.shares.values()):
            self._prune(share)

    def shared_by(self, former: GroupSettings, mono_ms: int) -> None:
        """The group has other settings than the ``former`` ones. Another ``fair_by`` holds for
        what comes from now on: what is there goes out as it came."""
        self._mono_ms = max(self._mono_ms, mono_ms)
        settings, group = self._group.settings, self._group
        self._heap.clear()
        self._orderings.paced.pop(group, None)
        if settings.fair_by != former.fair_by:
            self._dissolve()
        for share in list(self.shares.values()):
            share.bucket = changed(share.bucket, settings.rate_each, None, mono_ms)
            share.is_paced = False
            self._admit(share)
        self._orderings.wake(group)

    def _dissolve(self) -> None:
        """Take its share from every task that has one."""
        group = self._group
        for share in self.shares.values():
            share.mark = 0  # of those in flight, too
            if share.queue is not None:
                group.in_key_queues -= share.waiting
                group.ready.absorb(share.queue, self._now_ms)
                group.add_stale(share.stale)
                share.clear()
        self.shares, self._called = {}, {}
        self._odd = {i: (priority, 0) for i, (priority, _) in self._odd.items() if priority}
        self._waits = {i: known._replace(share=0) for i, known in self._waits.items()}
        for comes in self._again.values():
            comes[:] = [(i, known._replace(share=0), front) for i, known, front in comes]
        self._plain_left = len(group.ready) + len(group.loading)

    # --- who is preferred ----------------------------------------------------------------------

    def join(self, subscriber: Subscriber) -> None:
        """The subscriber may be preferred. A pull is not: it is gone after one delivery."""
        if not subscriber.once:
            self._partitions.join(subscriber)

    def part(self, subscriber: Subscriber) -> None:
        """The subscriber gets no more deliveries."""
        self._partitions.leave(subscriber)

    @property
    def has_preferences(self) -> bool:
        return len(self.order) > 0 and len(self._partitions) > 1

    def preferred(self, marks: Sequence[int]) -> tuple[Sequence[Subscriber | None], bool]:
        """The subscriber that each key prefers: the one that had it last, if it is there, else
        the one to which the key's partition belongs, of mark 0 nobody; and whether all of them had
        it last."""
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

    # --- what is shown ---------------------------------------------------------------------------

    def held_keys(self, limit: int) -> list[HeldKey]:
        """Up to ``limit`` of the keys that are held, oldest first."""
        found: list[HeldKey] = []
        for task_id, since_ms in islice(self.held.items(), limit):
            attempts, known = self._group.delivery_attempts.get(task_id), self._waits.get(task_id)
            queue = self.order.queues.get(known.order) if known is not None else None
            attempt = attempts.attempt if attempts is not None else 0
            found.append(HeldKey(task_id, since_ms, attempt, 0 if queue is None else queue.waiting))
        return found

    def key_queues(self, limit: int) -> list[KeyQueueState]:
        """The keys and values for which most tasks wait, of so many as a look may take."""
        queues = islice(self.order.queues.values(), QUEUES_LOOKED_AT)
        shares = islice(self.shares.values(), QUEUES_LOOKED_AT)
        found = [
            KeyQueueState(queue.head, self._state(queue.head), 0, queue.waiting, "order")
            for queue in nlargest(limit, queues, key=lambda queue: queue.waiting)
        ]
        for share in nlargest(limit, shares, key=lambda share: share.waiting):
            if share.queue is not None and (head := share.queue.peek()):
                held_back = self._held_back(share)
                found.append(KeyQueueState(head, held_back, share.in_flight, share.waiting, "fair"))
        found = [one._replace(in_flight=1) if one.state == "in_flight" else one for one in found]
        return sorted(found, key=lambda one: -one.waiting)[:limit]

    def failing(self, failures_min: int) -> FailingKey | None:
        """Of the keys whose first task has failed so often and is not held, the one behind which
        most tasks wait. So many keys are looked at, those first that have had a queue for
        longest: one that is stuck is among them."""
        group, found = self._group, None
        for queue in islice(self.order.queues.values(), AGES_LOOKED_AT):
            head = queue.head
            if head in self.held or (found is not None and queue.waiting <= found.waiting):
                continue
            of = group.flight.get(head) or group.delivery_attempts.get(head)
            if of is None or of.past.failed < failures_min:
                continue
            reason = of.past.failures[-1].reason if of.past.failures else ""
            found = FailingKey(head, of.past.failed, queue.waiting, reason)
        return found

    def since_ms(self) -> int:
        """About since when the task waits that has waited longest of those in key queues: of so
        many queues, the oldest ones."""
        times = [queue.first()[0] for queue in islice(self.order.queues.values(), AGES_LOOKED_AT)]
        for share in islice(self.shares.values(), AGES_LOOKED_AT):
            if share.queue is not None:
                ages = (level.since_ms for level in share.queue.levels() if len(level))
                times += [since_ms for since_ms in ages if since_ms is not None]
        return min(times, default=self._now_ms)

    def _state(self, task_id: int) -> str:
        group = self._group
        if task_id in group.flight:
            return "in_flight"
        if task_id in self.held:
            return "held"
        return "retrying" if task_id in group.waiting else "ready"

    def _held_back(self, share: Share) -> str:
        limit = self._group.settings.limit_each
        if limit is not None and share.called + share.in_flight >= limit:
            return "limited"
        return "throttled" if share.is_paced else "ready"


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
        return () if found is None else found.coming

    def forget(self, group: Group) -> None:
        """Forget the order keys and shares of a group that is gone."""
        for names in (self.of, self.gathered, self.paced):
            names.pop(group, None)

    def tick(self, limit: int, now_ms: int, mono_ms: int) -> None:
        """Let keys held up by a replay, and values whose token has come, go on."""
        for group in list(self.gathered):
            self.of[group].go_on(limit, now_ms)
        for group in [group for group, at_ms in self.paced.items() if at_ms <= mono_ms]:
            self.of[group].pace(mono_ms)

    def sweep(self) -> None:
        """``Ordering.sweep`` of each group; done once in a while."""
        for ordering in self.of.values():
            if ordering.shares:
                ordering.sweep()


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
