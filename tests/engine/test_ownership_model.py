"""Who is owed what, against duties that are written down as plainly as a user would say them.

The rules of ``engine/ownership.py`` are not repeated here. What a group was promised when it was
made, or when a task was enqueued, is a pair (task, group) that must be acked in the end, whatever
clocks, restarts, deletions and half-done replays do; what was acked must not come again. Everything
is committed at once, so a crash loses no promise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.engine_recount import recount
from support.engine_rig import CONFIG, RETRY, Rig
from tickwheel.engine.topics import Group, Replay

STEADY = replace(CONFIG, slots=8, retry=replace(RETRY, base_ms=50, retries_max=10_000))
NAMES = ("a", "b", "c")
THERE = ("scheduled", "ready", "in_flight", "waiting", "dead")
DAY_MS = 86_400_000

names = st.sampled_from(NAMES)
picks = st.integers(0, 10_000)
delays_ms = st.sampled_from([0, 0, 1, 60, 250, 1_000, 4_000])


class OwnershipMachine(RuleBasedStateMachine):
    """One topic, three names for groups."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(STEADY)
        self.due_ms: dict[int, int] = {}
        """Every task that there ever was."""
        self.must: set[tuple[int, str]] = set()
        """Promised, and not acked."""
        self.may: set[tuple[int, str]] = set()
        """All that were ever promised; more only where a clock was set."""
        self.loose: set[int] = set()
        """Not due yet when the last group that was promised it was deleted: somebody gets it."""
        self.fired: set[int] = set()
        """What has been seen due. A restart makes some of it scheduled once more; by then a
        group that was deleted may have held it."""
        self.were_loose: set[int] = set()
        self.acked: set[tuple[int, str]] = set()
        self.got: set[tuple[int, str]] = set()
        self.was_set = False
        """A clock was."""

    @initialize(first=names, second=names)
    def begin(self, first: str, second: str) -> None:
        self.create(first, "now", replays=True)
        self.create(second, "now", replays=True)

    # --- what is there -------------------------------------------------------------------------

    @property
    def live(self) -> list[str]:
        return [group.name for group in self.rig.core.topic("t").live_groups]

    @property
    def closing(self) -> list[Group]:
        return [g for g in self.rig.core.topic("t").groups.values() if g.is_closed]

    @property
    def replays(self) -> list[Replay]:
        return list(self.rig.core.topic("t").replays.values())

    def ids(self, *states: str) -> list[int]:
        return [task_id for task_id in self.due_ms if self.rig.state(task_id) in states]

    def promise(self, task_id: int, group: str) -> None:
        self.may.add((task_id, group))
        if (task_id, group) not in self.acked:
            self.must.add((task_id, group))

    # --- producers and operators -----------------------------------------------------------------

    @rule(delay_ms=delays_ms, count=st.integers(1, 3))
    def enqueue(self, delay_ms: int, count: int) -> None:
        for task_id in self.rig.stage(delay_ms=delay_ms, count=count):
            self.due_ms[task_id] = self.rig.now_ms + delay_ms
            for group in self.live:
                self.promise(task_id, group)
            if not self.live:
                self.loose.add(task_id)
        self.rig.commit()

    @rule(
        name=names,
        start=st.sampled_from(["now", "now", "first", "time"]),
        ago_ms=st.sampled_from([0, 30, 500, 2_000]),
        replays=st.booleans(),
    )
    def create(self, name: str, start: str, replays: bool, ago_ms: int = 0) -> None:
        rig = self.rig
        if rig.core.find_group("t", name) is not None:
            return
        others, since_ms = bool(self.live), rig.now_ms - ago_ms
        scheduled, waits = self.ids("scheduled"), [] if self.closing else self.ids(*THERE[1:])
        if self.closing:
            # What one of them held is not the next one's, though a restart made it due anew.
            scheduled = [task_id for task_id in scheduled if task_id not in self.fired]
        start_ms = {"now": None, "first": 0, "time": since_ms}[start]
        if start == "now":
            since_ms = rig.now_ms
        rig.create_group("t", name, start_ms, replays=replays)
        rig.commit()
        for task_id in scheduled if others else ():
            if start == "first" or self.due_ms[task_id] > since_ms:
                self.promise(task_id, name)
            elif self.due_ms[task_id] == since_ms:
                self.may.add((task_id, name))
        for task_id in self.ids(*THERE[1:]) if others else ():
            if start == "first" or (start == "time" and self.due_ms[task_id] >= since_ms):
                self.promise(task_id, name)
            elif self.due_ms[task_id] >= since_ms:
                self.may.add((task_id, name))  # in the very millisecond
        for task_id in () if others else (*waits, *scheduled):
            self.promise(task_id, name)
            self.loose.discard(task_id)

    @rule(name=names, start=st.sampled_from(["first", "time"]), count=st.integers(2, 4))
    def create_behind(self, name: str, start: str, count: int) -> None:
        """What replays are for should happen often: there are tasks that the group missed."""
        self.enqueue(0, count)
        self.pass_time(0)
        self.create(name, start, replays=False, ago_ms=500)

    @rule(count=st.integers(1, 2), delay_ms=delays_ms)
    def enqueue_behind(self, count: int, delay_ms: int) -> None:
        """And so should tasks that are due before the start of the groups that are there."""
        self.set_clock(-5_000, fires=True)
        self.enqueue(delay_ms, count)
        self.pass_time(delay_ms)

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def delete(self, pick: int) -> None:
        name = self.live[pick % len(self.live)]
        scheduled = self.ids("scheduled")
        self.rig.close_group("t", name)
        self.rig.commit()
        self.must = {pair for pair in self.must if pair[1] != name}
        promised = {task_id for task_id, _ in self.must}
        self.loose |= {*scheduled} - promised
        self.loose -= self.fired

    @precondition(lambda self: self.due_ms)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        task_id = list(self.due_ms)[pick % len(self.due_ms)]
        if self.rig.cancel(task_id) == "cancelled":
            self.must = {pair for pair in self.must if pair[0] != task_id}
            self.loose.discard(task_id)
        self.rig.commit()

    @precondition(lambda self: self.due_ms)
    @rule(pick=picks, delay_ms=delays_ms)
    def move(self, pick: int, delay_ms: int) -> None:
        task_id = list(self.due_ms)[pick % len(self.due_ms)]
        if self.rig.reschedule(task_id, delay_ms) == "scheduled":
            if self.rig.state(task_id) == "scheduled":
                # It comes due anew, for everybody who is there.
                self.due_ms[task_id] = self.rig.now_ms + delay_ms
                self.fired.discard(task_id)
                for group in self.live:
                    self.promise(task_id, group)
                if not self.live:
                    self.loose.add(task_id)
        self.rig.commit()

    # --- consumers -----------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(pick=picks, answers=st.lists(st.sampled_from(["ack", "ack", "nack", ""]), max_size=6))
    def consume(self, pick: int, answers: list[str]) -> None:
        """Subscribe to a group, settle some deliveries, and leave."""
        subscriber = self.rig.subscribe(group=self.live[pick % len(self.live)])
        got = self.rig.tick()
        for one, answer in zip(got, [*answers, *["ack"] * len(got)], strict=False):
            pair = one.id, one.group.name
            assert self.due_ms[one.id] <= self.rig.now_ms, "early"
            assert pair not in self.acked, "it comes again after its ack"
            self.got.add(pair)
            if answer == "ack":
                assert self.rig.ack(one) == "acked"
                self.acked.add(pair)
                self.must.discard(pair)
                self.loose.discard(one.id)
            elif answer == "nack":
                assert self.rig.nack(one) == "retrying"
        self.rig.commit()
        self.rig.disconnect(subscriber)
        self.rig.commit()

    # --- time, restarts, the background ----------------------------------------------------------

    @rule(ms=st.sampled_from([0, 1, 50, 300, 2_000, 10_000]))
    def pass_time(self, ms: int) -> None:
        self.rig.pass_time(ms)
        self.rig.fire()
        self.rig.expire()
        self.rig.commit()

    @rule(jump_ms=st.sampled_from([-5_000, -700, -1, 1, 700, 5_000]), fires=st.booleans())
    def set_clock(self, jump_ms: int, fires: bool) -> None:
        self.was_set = True
        self.rig.now_ms += jump_ms
        if fires:
            self.rig.fire()
            self.rig.commit()

    @rule(
        crashes=st.booleans(),
        down_ms=st.sampled_from([0, 10, 3_000]),
        skew_ms=st.sampled_from([0, 0, -4_000, -50, 4_000]),
    )
    def restart(self, crashes: bool, down_ms: int, skew_ms: int) -> None:
        """Perhaps on another machine, whose clock differs."""
        self.was_set |= bool(skew_ms)
        self.rig.now_ms += skew_ms
        if crashes:
            self.rig.crash(down_ms=down_ms)
        else:
            self.rig.stop_and_start(down_ms=down_ms)

    @precondition(lambda self: self.replays)
    @rule(pick=picks, limit=st.sampled_from([1, 2, 50]))
    def replay(self, pick: int, limit: int) -> None:
        self.rig.replay(self.replays[pick % len(self.replays)].group, limit)
        self.rig.commit()

    @precondition(lambda self: self.closing)
    @rule(pick=picks, limit=st.sampled_from([1, 2, 50]))
    def drain(self, pick: int, limit: int) -> None:
        self.rig.drain(self.closing[pick % len(self.closing)], limit)
        self.rig.commit()

    # --- what must be true -----------------------------------------------------------------------

    @invariant()
    def what_is_promised_is_there(self) -> None:
        recount(self.rig)
        self.were_loose |= self.loose
        self.fired |= {*self.ids(*THERE[1:])}
        for task_id in {task_id for task_id, _ in self.must} | self.loose:
            assert self.rig.state(task_id) in THERE, f"{task_id} is {self.rig.state(task_id)}"

    def teardown(self) -> None:
        while self.replays:
            self.replay(0, 50)
        self.pass_time(DAY_MS)
        for _ in range(100):
            if self.closing:
                self.drain(0, 50)
                self.pass_time(0)
        assert not self.closing
        if not self.live:
            self.create("a", "now", replays=True)
        for _ in range(10):
            for index in range(len(self.live)):
                self.consume(index, [])
            self.pass_time(DAY_MS)
        assert not self.must
        assert not self.loose
        assert self.rig.rows.is_empty()
        if not self.was_set:
            extra = {pair for pair in self.got - self.may if pair[0] not in self.were_loose}
            assert not extra, "delivered without a promise"


def test_acks_outlive_a_group_recreated_under_its_name() -> None:
    """The last that owes the task is deleted before the replay of the new group comes to it."""
    machine = OwnershipMachine()
    machine.begin(first="c", second="a")
    machine.create_behind(name="b", start="first", count=2)
    machine.move(pick=1, delay_ms=0)
    machine.consume(pick=2, answers=[])
    machine.delete(pick=2)
    machine.consume(pick=1, answers=[])
    machine.drain(pick=0, limit=1)
    machine.delete(pick=0)
    machine.create_behind(name="b", start="first", count=2)
    machine.drain(pick=0, limit=50)
    machine.what_is_promised_is_there()
    machine.teardown()  # nothing comes a second time, and nothing stays


TestOwnership = OwnershipMachine.TestCase
TestOwnership.settings = settings(max_examples=200, stateful_step_count=40)


class LongOwnershipMachine(OwnershipMachine):
    """The same for minutes."""


TestOwnershipAtLength = pytest.mark.slow(LongOwnershipMachine.TestCase)
TestOwnershipAtLength.settings = settings(max_examples=1_000, stateful_step_count=60)
