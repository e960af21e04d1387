"""Resets against a slow model that is written down as a user would say it: since a moment, what the
group had finished or missed comes again, to it alone, once; whatever is refused, and wherever a
crash comes. The history is what the engine notes; the plan is made anew after each crash, however
much has happened since."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from history.recording_rig import RecordingRig
from support.engine_recount import recount
from support.engine_rig import CONFIG, RETRY, Got
from tickwheel.engine.groups import Original
from tickwheel.history.lines import Renderer
from tickwheel.history.reset_plan import Plan, ResetScope, fill
from tickwheel.model.kinds import Bulk, BulkState, Selection
from tickwheel.server.shard.resets import place_after, place_of, scope_of

STEADY = replace(CONFIG, slots=8, retry=replace(RETRY, base_ms=50, retries_max=10_000))
NAMES = ("a", "b")
DAY_MS = 86_400_000
picks = st.integers(0, 10_000)
delays_ms = st.sampled_from([0, 0, 1, 60, 250, 4_000])
names = st.sampled_from(NAMES)
ANSWERS = st.lists(st.sampled_from(["ack", "ack", "nack", "reject", ""]), max_size=6)


class ResetMachine(RuleBasedStateMachine):
    """One topic, two groups from the beginning, and one that comes late."""

    HAS_HISTORY = True

    def __init__(self) -> None:
        super().__init__()
        self.rig = RecordingRig(STEADY)
        self.due_ms: dict[int, int] = {}
        """Every task but those that stand for others."""
        self.cancelled: set[int] = set()
        self.promised: set[tuple[int, str]] = set()
        self.acked: set[tuple[int, str]] = set()
        self.had: set[int] = set()
        """Somebody has had it: a crash may forget that, and the history does not."""
        self.unsure: set[int] = set()
        """Moved after that: it has two due times."""
        self.plan: Plan | None = None
        self.bulk: Bulk | None = None
        self.expected: set[int] = set()
        self.possible: set[int] = set()
        self.bulks = 0
        self.given: dict[int, tuple[int, str]] = {}
        """Tasks that stand for others, in the history: which, for whom."""
        self.before = 0
        """So many of them are of earlier resets."""
        self.acked_again: set[int] = set()

    @initialize(count=st.integers(2, 5))
    def begin(self, count: int) -> None:
        for name in NAMES:
            self.rig.create_group("t", name)
        self.rig.commit()
        self.enqueue(0, count)
        self.pass_time(1)
        self.consume("a", ["ack"] * count)

    # --- the ordinary life -----------------------------------------------------------------------

    @property
    def live(self) -> list[str]:
        return list(self.rig.core.topic("t").groups)

    @rule(delay_ms=delays_ms, count=st.integers(1, 3))
    def enqueue(self, delay_ms: int, count: int) -> None:
        for task_id in self.rig.stage(delay_ms=delay_ms, count=count, key="k"):
            self.due_ms[task_id] = self.rig.now_ms + delay_ms
            self.promised |= {(task_id, name) for name in self.live}
        self.rig.commit()

    @rule(ms=st.sampled_from([0, 1, 50, 300, 2_000]))
    def pass_time(self, ms: int) -> None:
        self.rig.pass_time(ms)
        self.rig.fire()
        self.rig.expire()
        self.rig.commit()

    @precondition(lambda self: len(self.live) == len(NAMES))
    @rule()
    def come_late(self) -> None:
        """What has come due by now it is not owed."""
        self.pass_time(1)
        scheduled = [i for i in self.due_ms if self.rig.state(i) == "scheduled"]
        self.rig.create_group("t", "late")
        self.rig.commit()
        self.promised |= {(task_id, "late") for task_id in scheduled}

    @rule(name=names, answers=ANSWERS)
    def consume(self, name: str, answers: list[str]) -> None:
        subscriber = self.rig.subscribe(group=name)
        for got, answer in zip(self.rig.tick(), [*answers, *["ack"] * 100], strict=False):
            self.look(got)
            if answer == "ack":
                assert self.rig.ack(got) == "acked"
                if got.id in self.due_ms:
                    self.acked.add((got.id, name))
                else:
                    self.acked_again.add(got.id)
            elif answer == "nack":
                assert self.rig.nack(got) == "retrying"
            elif answer == "reject" and got.id in self.due_ms:
                self.rig.reject(got)
        self.rig.commit()
        self.rig.disconnect(subscriber)
        self.rig.commit()

    def look(self, got: Got) -> None:
        pair = got.id, got.group.name
        if got.id in self.due_ms:
            self.had.add(got.id)
            assert pair in self.promised, "nobody else notices a reset"
            assert pair not in self.acked, "it comes again as itself"
            return
        self.read_history()
        assert self.given[got.id][1] == got.group.name, "it is another group's"
        assert got.id not in self.acked_again

    @precondition(lambda self: self.rig.rows.dead)
    @rule(pick=picks, again=st.booleans())
    def decide(self, pick: int, again: bool) -> None:
        """On a dead letter: the group has it again, or is done with it."""
        task_id, name = sorted(self.rig.rows.dead)[pick % len(self.rig.rows.dead)]
        if again:
            assert self.rig.requeue(task_id, name) == "requeued"
        else:
            assert self.rig.delete_dead(task_id, name) == "deleted"
            self.acked.add((task_id, name))
        self.rig.commit()

    @precondition(lambda self: self.due_ms)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        task_id = list(self.due_ms)[pick % len(self.due_ms)]
        if self.rig.cancel(task_id) == "cancelled":
            self.cancelled.add(task_id)
        self.rig.commit()

    @precondition(lambda self: self.due_ms)
    @rule(pick=picks, delay_ms=delays_ms)
    def move(self, pick: int, delay_ms: int) -> None:
        task_id = list(self.due_ms)[pick % len(self.due_ms)]
        if self.rig.reschedule(task_id, delay_ms) == "scheduled":
            if self.rig.state(task_id) == "scheduled":
                self.due_ms[task_id] = self.rig.now_ms + delay_ms
                self.promised |= {(task_id, name) for name in self.live}
                if task_id in self.had:
                    self.unsure.add(task_id)
        self.rig.commit()

    @rule(crashes=st.booleans(), down_ms=st.sampled_from([0, 10, 3_000]))
    def restart(self, crashes: bool, down_ms: int) -> None:
        if crashes:
            self.rig.crash(down_ms=down_ms)
        else:
            self.rig.stop_and_start(down_ms=down_ms)
        self.plan = None

    # --- the reset -------------------------------------------------------------------------------

    def holds(self, task_id: int, name: str) -> bool:
        return (task_id, name) in self.promised and (task_id, name) not in self.acked

    def owed_again(self, name: str, from_ms: int) -> set[int]:
        """What a user would expect."""
        return {
            task_id
            for task_id, due_ms in self.due_ms.items()
            if from_ms <= due_ms <= self.rig.now_ms
            and task_id not in self.cancelled
            and not self.holds(task_id, name)
            and (self.HAS_HISTORY or task_id in self.rig.rows.tasks)
        }

    @precondition(lambda self: self.bulk is None)
    @rule(pick=picks, ago_ms=st.sampled_from([0, 60, 2_000, DAY_MS]))
    def reset(self, pick: int, ago_ms: int) -> None:
        rig, name = self.rig, self.live[pick % len(self.live)]
        from_ms = rig.now_ms - ago_ms
        self.bulks += 1
        arguments = (("group", name), ("from_ms", from_ms))
        self.bulk = bulk = Bulk(
            f"reset-{self.bulks}", "reset", "t", Selection(), arguments, None, rig.now_ms,
            rig.core.ids.last,
        )  # fmt: skip
        self.expected = self.owed_again(name, from_ms)
        self.read_history()
        self.before = len(self.given)
        rig.engine.resets.begin(rig.group(name=name), bulk, from_ms)
        rig.commit()

    @precondition(lambda self: self.bulk is not None)
    @rule(limit=st.sampled_from([1, 2, 50]), fate=st.sampled_from(["", "", "refused", "crash"]))
    def step(self, limit: int, fate: str) -> None:
        assert self.bulk is not None
        rig, bulk, bulks = self.rig, self.bulk, self.rig.engine.bulks
        plan = self.made()
        kept = plan.read(place_after(bulks.rows[bulk.id].place), limit, 1 << 20)
        if not kept:
            rig.engine.bulks.end(bulk.id, BulkState.DONE, *rig.now)
            rig.commit()
            self.compare()
            return
        stored = rig.known([task.id for task in kept])
        originals = [
            Original(item.id, item.options, item.body)
            if item.body is not None
            else Original(item.id, stored[item.id].row.options, stored[item.id].row.body)
            for item in kept
            if item.body is not None or item.id in stored
        ]
        give = partial(rig.engine.resets.repeat, bulk, str(bulk.argument("group")), originals)
        lost = len(kept) - len(originals)
        bulks.record_step(bulk.id, give(place_of(kept[-1]), len(kept), lost, rig.now_ms))
        if fate == "crash":
            rig.crash()
            self.plan = None
        elif fate == "refused":
            rig.seal()
            rig.refuse()
        rig.commit()

    def made(self) -> Plan:
        """From the history, and from what is stored."""
        if self.plan is None:
            rig, bulk = self.rig, self.bulk
            assert bulk is not None
            group = rig.group(name=str(bulk.argument("group")))
            wanted = scope_of(bulk, group, bulk.id)
            self.plan = Plan()
            fill(self.plan, lambda: iter(self.lines() if self.HAS_HISTORY else []), wanted)
            self.meet(self.plan, wanted, bulk.until_id)
            self.plan.finish()
        return self.plan

    def meet(self, plan: Plan, wanted: ResetScope, until_id: int) -> None:
        rig, group = self.rig, self.rig.group(name=wanted.group)
        known = rig.known([i for i in rig.rows.tasks if i <= until_id])
        can_repeat = rig.engine.resets.can_repeat
        plan.add_stored(wanted, [(item.row, can_repeat(group, item)) for item in known.values()])
        # Without a history a task is judged when it is looked at.
        self.possible |= self.owed_again(wanted.group, wanted.from_ms)

    def now_given(self) -> list[tuple[int, str]]:
        self.read_history()
        return list(self.given.values())[self.before :]

    def lines(self) -> list[dict[str, Any]]:
        renderers: dict[int, Renderer] = {}
        results: list[dict[str, Any]] = []
        for epoch, record in self.rig.history:
            renderer = renderers.setdefault(epoch, Renderer("n", 0, epoch))
            results += map(json.loads, renderer.render(record, len(results) + 1))
        return results

    def read_history(self) -> None:
        for event in self.lines():
            if event["event"] == "enqueued" and "replay_of" in event:
                assert event["key"] == "k"
                self.given[int(event["task_id"])] = (int(event["replay_of"]), event["replay_to"])

    def compare(self) -> None:
        assert self.bulk is not None
        group, pairs = str(self.bulk.argument("group")), self.now_given()
        assert {name for _, name in pairs} <= {group}
        results = [one for one, _ in pairs if one not in self.unsure]
        assert len(results) == len(set(results)), "each of them once"
        expected = self.expected - self.unsure
        if self.HAS_HISTORY:
            assert set(results) == expected
        else:
            assert expected & self.rig.rows.tasks.keys() <= set(results) <= self.possible
        row = self.rig.engine.bulks.rows[self.bulk.id]
        assert row.changed == len(pairs)
        self.bulk, self.plan, self.expected, self.possible = None, None, set(), set()

    @invariant()
    def all_is_counted(self) -> None:
        recount(self.rig)

    def teardown(self) -> None:
        while self.bulk is not None:
            self.step(50, "")
        while self.rig.rows.dead:
            self.decide(0, again=True)
        self.pass_time(DAY_MS)
        for _ in range(10):
            for name in self.live:
                self.consume(name, [])
            self.pass_time(DAY_MS)
        assert self.acked_again == self.given.keys()
        assert self.rig.rows.is_empty() or not self.rig.rows.tasks


class StoreMachine(ResetMachine):
    """The same without a history: what others still have is given again."""

    HAS_HISTORY = False


TestResets = ResetMachine.TestCase
TestResets.settings = settings(max_examples=100, stateful_step_count=30)
TestResetsOfTheStore = StoreMachine.TestCase
TestResetsOfTheStore.settings = settings(max_examples=60, stateful_step_count=30)
