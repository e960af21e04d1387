"""Order keys and fair shares, whatever happens: crashes, refused batches, lapsed leases, failures,
cancels, moves, dead letters, bulk operations, groups that begin in the past and are deleted again.

The model knows what is durable and what was handed out. At each delivery it looks at every other
task of the key in that group: none is in flight, none that has had an attempt is left, none that
comes first is due.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.test_engine_ordering import OrderRig
from support.engine_recount import recount
from support.engine_rig import CONFIG, RETRY, Got
from tickwheel.engine.ordering import shared_value
from tickwheel.engine.tasks import KINDS, RESET, TASK_KINDS
from tickwheel.engine.topics import Group
from tickwheel.model.kinds import Bulk, PausedKey, Selection
from tickwheel.model.records import (
    NO_PAST,
    ORDER_FAILURES,
    ProgressState,
    TaskRow,
    TaskSnapshot,
    order_of,
)

STEADY = replace(CONFIG, slots=8, retry=replace(RETRY, base_ms=50, retries_max=10_000))
SMALL = replace(STEADY, resident_bytes_max=0)
GROUPS = ("a", "b", "late")
LIMIT_EACH = 2
delays_ms = st.sampled_from([0, 0, 0, 1, 60, 250, 1_000])
keys = st.sampled_from([None, "k", "k", "l", "m"])
tenants = st.sampled_from([None, "x", "y"])
picks = st.integers(0, 10_000)
DELAY_MS_MAX = 10_000
"""Maximum delay of a task that a bulk operation moves."""


class OrderMachine(RuleBasedStateMachine):
    """One topic. Group "a" keeps order alone, "b" is shared by tenant besides, "late" begins in
    the past some time."""

    names = GROUPS[:2]
    """Groups that are there from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = OrderRig(STEADY)
        self.had: list[Got] = []
        """Deliveries, some of which have ended."""
        self.newest: dict[tuple[int, str], Got | None] = {}
        """(id, group) → the last one of those; None: it was given back, or the task begins anew, so
        that no answer to any of them counts."""
        self.receipts: set[tuple[int, Group, int, int]] = set()
        """Of all of them."""
        self.paused: set[tuple[str, str | None, str]] = set()
        """(group, what the value is of, value) of the keys that are paused."""

    @initialize(small=st.booleans(), failure=st.sampled_from(ORDER_FAILURES))
    def begin(self, small: bool, failure: str) -> None:
        self.rig = OrderRig(SMALL if small else STEADY)
        for name in self.names:
            self.rig.create_group("t", name)
            self.rig.configure(
                "t", name, order_failure=failure, order_attempts=2, order_retry_ms=50
            )
        if "b" in self.names:
            self.rig.configure("t", "b", fair_by="tenant", limit_each=LIMIT_EACH)
        self.rig.commit()
        self.subscribe()

    def teardown(self) -> None:
        """Deliver and finish the remaining tasks."""
        for restart in (False, True):
            if restart:
                self.crash(down_ms=0)
            for name in GROUPS:
                self.pause(name, paused=False)
            for name, fair_by, value in list(self.paused):
                self.resume_key(name, fair_by, value)
            for _ in range(400):
                self.replay(100)
                self.drain_late()
                self.let_go_of_held()
                self.rig.pass_time(500)
                self.consume()
                for got in self.had:
                    if self.rig.lease(got) is not None:
                        self.rig.ack(got)
                self.rig.commit()
                if not self.rig.rows.tasks.keys() - {i for i, _ in self.rig.rows.dead}:
                    break
            left = self.rig.rows.tasks.keys() - {i for i, _ in self.rig.rows.dead}
            assert not left, f"{len(left)} are never handed out"

    # --- what is looked at ---------------------------------------------------------------------

    def consume(self) -> None:
        for got in self.rig.tick():
            assert not self.paused & self.keys_of(got), "its key is paused"
            self.look_at(got)
            self.had.append(got)
            self.newest[got.id, got.group.name] = got
            receipt = got.id, got.group, got.epoch, got.attempt
            assert receipt not in self.receipts, "two deliveries have one receipt"
            self.receipts.add(receipt)

    def keys_of(self, got: Got) -> set[tuple[str, str | None, object]]:
        """The keys of the delivered task, as its group sees them now."""
        known = self.rig.find(got.id)
        assert known is not None
        options, by = known.row.options, got.group.settings.shares.fair_by
        key = None if options is None else options.order_key
        results: set[tuple[str, str | None, object]] = {(got.group.name, None, key)}
        return (
            results if by is None else results | {(got.group.name, by, shared_value(known.row, by))}
        )

    def look_at(self, got: Got) -> None:
        group = got.group
        known = self.rig.known(list(self.rig.rows.tasks))
        mine = known[got.id].row
        if mine.options is None or mine.options.order_key is None:
            return
        for row in self.rig.rows.tasks.values():
            if row.id == got.id or row.options is None:
                continue
            if row.options.order_key != mine.options.order_key:
                continue
            other = known.get(row.id)
            comes_first = self.is_first(got) and is_before(row, mine)
            if other is not None:
                self.compare(group, got, mine, other)
                is_moved = other.row.due_ms != row.due_ms and row.id not in group.waiting
                assert not (comes_first and is_moved), "that it was moved is not durable"
            elif (row.id, group.name) not in self.rig.rows.dead:
                stored = self.rig.rows.progress.get((row.id, group.name))
                is_over = stored is not None and stored.state.is_over
                was_had = (row.id, group.name) in self.newest
                # That it was moved is durable: it was nobody's predecessor any more.
                is_late = stored is not None and stored.state is ProgressState.WAITING
                is_first = comes_first and not is_late
                assert is_over or not (is_first or was_had), "its end is not durable"

    def compare(self, group: Group, got: Got, mine: TaskRow, other: TaskSnapshot) -> None:
        row, name = other.row, group.name
        assert row.id not in group.flight, "two of a key are in flight"
        stored = self.rig.rows.progress.get((row.id, name))
        if (row.id, name) in self.rig.rows.dead:
            return
        if stored is not None and stored.state is ProgressState.DONE:
            return
        if not self.rig.engine.ownership.is_owed(group, row.id):
            done = other.progress.get(name)
            is_over = done is not None and done.state is ProgressState.DONE
            assert not is_over or (row.id, name) not in self.newest, "its end is not durable"
            return
        attempts = group.delivery_attempts.get(row.id)
        assert attempts is None or attempts.past == NO_PAST, "one that has failed is left"
        if not self.is_first(got) or row.id in group.waiting:
            return  # it is the key holder, or the other one was moved
        is_due = row.due_ms <= self.rig.now_ms and not self.rig.core.is_scheduled(row)
        assert not (is_due and is_before(row, mine)), "one that comes first is left"

    def is_first(self, got: Got) -> bool:
        """Nobody in its group has had it; else it is the key holder."""
        return self.rig.held(got).past == NO_PAST

    def held(self) -> bool:
        groups = (self.rig.core.find_group("t", name) for name in GROUPS)
        return any(group is not None and group.held for group in groups)

    def live(self, name: str) -> list[Got]:
        group = self.rig.core.find_group("t", name)
        if group is None or group.is_closed:
            return []
        return [item for item in self.had if item.group.name == name and self.rig.lease(item)]

    # --- producers and operators -----------------------------------------------------------------

    @rule(
        delay_ms=delays_ms,
        key=keys,
        tenant=tenants,
        priority=st.sampled_from([0, 0, 3]),
        ttl_ms=st.sampled_from([None, None, None, 500]),
        end=st.sampled_from(["lands", "lands", "open", "refused"]),
    )
    def put(
        self,
        delay_ms: int,
        key: str | None,
        tenant: str | None,
        priority: int,
        ttl_ms: int | None,
        end: str,
    ) -> None:
        more = {} if tenant is None else {"tenant": tenant}
        rig = self.rig
        if end == "refused":
            rig.commit()
        rig.put(key, delay_ms, lands=False, priority=priority, ttl_ms=ttl_ms, **more)
        if end == "lands":
            rig.commit()
        elif end == "refused":
            rig.seal()
            rig.refuse()
            rig.commit()

    @rule(
        pick=picks,
        delay_ms=delays_ms,
        what=st.sampled_from(["cancel", "move", "run now"]),
        is_had=st.booleans(),
        fires=st.booleans(),
    )
    def change(self, pick: int, delay_ms: int, what: str, is_had: bool, fires: bool) -> None:
        ids = self.landed(is_had=is_had)
        if not ids:
            return
        task_id = ids[pick % len(ids)]
        if what == "cancel":
            self.rig.cancel(task_id)
        else:
            self.rig.reschedule(task_id, delay_ms if what == "move" else 0)
        if fires:
            self.rig.fire()

    def landed(self, *, is_had: bool = False) -> list[int]:
        """The tasks there are; ``is_had``: those that one group has had, and another has not."""
        had = Counter(task_id for task_id, _ in self.newest)
        groups = sum(self.rig.core.find_group("t", name) is not None for name in GROUPS)
        ids = (i for i in self.rig.rows.tasks if i <= self.rig.core.landed_id)
        return sorted(i for i in ids if not is_had or 0 < had[i] < groups)

    @precondition(lambda self: "b" in self.names)
    @rule(key=keys, name=st.sampled_from(GROUPS[:2]))
    def one_group_is_ahead(self, key: str | None, name: str) -> None:
        """It is done with what the other one, which is paused, has ready."""
        self.pause(*(group for group in GROUPS[:2] if group != name), paused=True)
        self.pause(name, paused=False)
        for _ in range(2):
            self.rig.put(key)
        self.consume()
        for got in self.live(name):
            self.rig.ack(got)
        self.rig.commit()

    @rule(kind=st.sampled_from(KINDS), pick=picks, count=st.integers(1, 12), delay_ms=delays_ms)
    def step_of_a_bulk(self, kind: str, pick: int, count: int, delay_ms: int) -> None:
        """What one read has found, changed in one step."""
        rig, bulks = self.rig, self.rig.engine.bulks
        if kind == RESET:
            return  # makes other tasks, without order keys' places: see ``test_resets``
        if kind not in TASK_KINDS:
            for task_id, name in sorted(rig.rows.dead)[:count]:
                rig.engine.control.settle_dead(kind, task_id, name, rig.find(task_id), rig.now_ms)
            return
        ids = self.landed()
        begin = pick % len(ids) if ids else 0
        known = rig.known(ids[begin : begin + count])
        arguments = (("shift_ms", delay_ms),) if kind == "reschedule" else ()
        bulk = Bulk("j", kind, "t", Selection(), arguments, None, rig.now_ms, rig.core.landed_id)
        matched = [known[task_id] for task_id in sorted(known)]
        bulks.act(bulk, matched, "t", {}, {}, rig.now_ms, DELAY_MS_MAX)

    @rule(name=st.sampled_from(GROUPS), paused=st.booleans())
    def pause(self, name: str, paused: bool) -> None:
        """Pause a group, so that ready tasks stay ready for long."""
        group = self.rig.core.find_group("t", name)
        if group is not None and not group.is_closed:
            self.rig.configure("t", name, paused=paused)

    @rule(
        name=st.sampled_from(GROUPS),
        key=st.sampled_from([(None, "k"), (None, "l"), (None, "new"), ("tenant", "x")]),
        resumes=st.booleans(),
    )
    def pause_key(self, name: str, key: tuple[str | None, str], resumes: bool) -> None:
        group = self.rig.core.find_group("t", name)
        if group is None or group.is_closed:
            return
        if resumes:
            self.resume_key(name, *key)
            return
        if key[0] not in (None, group.settings.shares.fair_by):
            return  # it cannot be named
        wanted = PausedKey("t", name, *key, self.rig.now_ms, "ops")
        result = self.rig.engine.key_control.pause(group, wanted)
        assert (result is wanted) == ((name, *key) not in self.paused), "the first one counts"
        self.paused.add((name, *key))

    def resume_key(self, name: str, fair_by: str | None, value: str) -> None:
        group, known = self.rig.group(name=name), (name, fair_by, value) in self.paused
        result = self.rig.engine.key_control.resume(group, fair_by, value, self.rig.now_ms)
        assert (result is not None) == known
        self.paused.discard((name, fair_by, value))

    @precondition(lambda self: "b" in self.names)
    @rule(by=st.sampled_from([None, "tenant", "tag"]), rate=st.sampled_from([None, None, 3.0]))
    def share(self, by: str | None, rate: float | None) -> None:
        limit = None if by is None else LIMIT_EACH
        rate = None if by is None else rate
        if by != self.rig.group(name="b").settings.shares.fair_by:
            self.paused = {row for row in self.paused if row[0] != "b" or row[1] is None}
        self.rig.configure("t", "b", fair_by=by, limit_each=limit, rate_each=rate)

    @precondition(lambda self: self.rig.rows.dead)
    @rule(pick=picks)
    def requeue(self, pick: int) -> None:
        dead = sorted(self.rig.rows.dead)
        if dead:
            key = dead[pick % len(dead)]
            if self.rig.requeue(*key) == "requeued":
                self.newest[key] = None

    @precondition(lambda self: self.held())
    @rule()
    def let_go_of_held(self) -> None:
        for name in GROUPS:
            group = self.rig.core.find_group("t", name)
            if group is None:
                continue
            for at, held in enumerate(self.rig.engine.key_control.held_keys(group)):
                known = self.rig.find(held.task_id)
                assert known is not None
                act = (
                    self.rig.engine.key_control.release
                    if at % 2
                    else self.rig.engine.key_control.skip
                )
                act(group, known, self.rig.now_ms)
                self.newest[held.task_id, name] = None

    @precondition(lambda self: "b" in self.names and self.late() is None)
    @rule()
    def begin_late(self) -> None:
        self.rig.create_group("t", "late", 1, replays=False)
        self.rig.subscribe(group="late")

    @precondition(lambda self: self.late() is not None)
    @rule()
    def delete_late(self) -> None:
        group = self.late()
        if group is not None and not group.is_closed:
            self.rig.close_group("t", "late")
            self.newest = {key: one for key, one in self.newest.items() if key[1] != "late"}
            self.had = [item for item in self.had if item.group.name != "late"]
            self.paused = {row for row in self.paused if row[0] != "late"}

    @precondition(lambda self: self.late() is not None)
    @rule()
    def drain_late(self) -> None:
        group = self.late()
        if group is not None and group.is_closed:
            self.rig.drain(group, 3)

    def late(self) -> Group | None:
        return self.rig.core.find_group("t", "late")

    @precondition(lambda self: self.rig.core.topic("t").replays)
    @rule(limit=st.integers(1, 5))
    def replay(self, limit: int) -> None:
        group = self.late()
        if group is not None:
            self.rig.replay(group, limit)

    # --- consumers -------------------------------------------------------------------------------

    @rule(pick=picks, prefetch=st.sampled_from([None, 1, 100]))
    def come_or_go(self, pick: int, prefetch: int | None) -> None:
        group = self.names[pick % len(self.names)]
        subscribers = list(self.rig.group(name=group).subscribers)
        if prefetch is None and len(subscribers) > 1:
            self.rig.disconnect(subscribers[pick % len(subscribers)])
        elif prefetch is not None and len(subscribers) < 4:
            self.rig.subscribe(group=group, prefetch=prefetch)

    @precondition(lambda self: self.rig.core.in_flight)
    @rule(
        name=st.sampled_from(GROUPS),
        pick=picks,
        what=st.sampled_from(["ack", "ack", "ack", "nack", "reject", "release", "snooze"]),
    )
    def settle(self, name: str, pick: int, what: str) -> None:
        live = self.live(name) or [item for name in GROUPS for item in self.live(name)]
        if not live:
            return
        got = live[pick % len(live)]
        if what == "ack":
            assert self.rig.ack(got) == "acked"
        elif what == "nack":
            self.rig.nack(got)
        elif what == "reject":
            self.rig.reject(got)
        elif what == "snooze":
            self.rig.snooze(got, 70)
            self.newest[got.id, got.group.name] = None
        else:
            self.rig.release(got)
            self.newest[got.id, got.group.name] = None

    @precondition(lambda self: self.rig.core.in_flight)
    @rule(pick=picks, count=st.integers(1, 20))
    def ack_many(self, pick: int, count: int) -> None:
        """Ack tasks of one group and epoch in one step, as a frame does."""
        live = self.live(self.names[pick % len(self.names)])[:count]
        some = [item for item in live if item.epoch == live[0].epoch]
        if some:
            ids, attempts = [task.id for task in some], [delivery.attempt for delivery in some]
            group, ack = self.rig.group(name=some[0].group.name), self.rig.engine.settlement.ack
            assert ack(group, some[0].epoch, ids, attempts) == []

    @precondition(lambda self: self.had)
    @rule(pick=picks)
    def ack_old(self, pick: int) -> None:
        """A receipt that may not be the current one."""
        got = self.had[pick % len(self.had)]
        row = self.rig.rows.tasks.get(got.id)
        ordered = row is not None and row.options is not None and row.options.order_key is not None
        if self.rig.ack(got) == "acked" and ordered:
            newest = self.newest[got.id, got.group.name]
            assert newest is got, "an answer to an earlier delivery counts"

    # --- time, commits, restarts -----------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 50, 300, 31_000]), fires=st.booleans())
    def time(self, ms: int, fires: bool) -> None:
        self.rig.pass_time(ms)
        if fires:
            self.rig.fire()

    @rule()
    def tick(self) -> None:
        self.consume()

    @rule(what=st.sampled_from(["commit", "commit", "seal", "refuse"]))
    def commit(self, what: str) -> None:
        rig = self.rig
        if what == "commit" or rig.core.sealed is not None:
            rig.commit()
        elif rig.seal() is not None and what == "refuse":
            rig.refuse()

    @rule(down_ms=st.sampled_from([0, 100, 6_000]), clean=st.booleans())
    def restart(self, down_ms: int, clean: bool) -> None:
        if clean:
            self.rig.stop_and_start(down_ms=down_ms)
            self.subscribe()
        else:
            self.crash(down_ms)

    def crash(self, down_ms: int) -> None:
        self.rig.crash(down_ms=down_ms)
        rows = self.rig.rows.paused_keys.values()
        self.paused = {(row.group, row.fair_by, str(row.value)) for row in rows}
        for got in self.had:
            if self.rig.lease(got) is not None:  # that it was given back was not durable
                self.newest[got.id, got.group.name] = got
        self.subscribe()

    def subscribe(self) -> None:
        for name in GROUPS:
            group = self.rig.core.find_group("t", name)
            if group is not None and not group.is_closed:
                self.rig.subscribe(group=name)
                self.rig.subscribe(group=name, prefetch=3)

    @invariant()
    def only_the_newest_receipt_is_current(self) -> None:
        """What needs the current one (nack, reject, extend, release) is refused for all others."""
        for got in self.had:
            newest = self.newest[got.id, got.group.name]
            assert newest is got or self.rig.lease(got) is None, "an earlier receipt is current"

    @invariant()
    def counts_are_right(self) -> None:
        recount(self.rig)
        for name in GROUPS:
            group = self.rig.core.find_group("t", name)
            if group is None:
                continue
            flying: dict[object, int] = {}
            for lease in group.flight.values():
                known = self.rig.find(lease.id)
                assert known is not None
                options = known.row.options
                if options is not None and options.order_key is not None:
                    key = options.order_key
                    assert flying.setdefault(key, lease.id) == lease.id, "two of a key in flight"
            ordering = self.rig.core.orderings.by_group.get(group)
            if ordering is not None:
                for share in ordering.shares.by_mark.values():
                    assert share.in_flight + share.called <= max(LIMIT_EACH, share.in_flight)


def is_before(one: TaskRow, other: TaskRow) -> bool:
    return (one.due_ms, order_of(one)) < (other.due_ms, order_of(other))


class LoneOrderMachine(OrderMachine):
    """A group that is its topic's only one: its tasks become ready together, and are handed out in
    lease batches."""

    names = GROUPS[:1]


SETTINGS = settings(max_examples=200, stateful_step_count=60, deadline=None)
OrderMachine.TestCase.settings = LoneOrderMachine.TestCase.settings = SETTINGS
TestOrder = OrderMachine.TestCase
TestLoneOrder = LoneOrderMachine.TestCase
