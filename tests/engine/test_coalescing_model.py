"""Keys and rules against a model that is slow and obvious: it looks at every task there is, and
compares the keys themselves; and it keeps a list of what each batch changes.

Between the requests there are restarts, refused batches, resends, deliveries and their ends, clocks
that jump, and hashes that collide. What must hold: every task of a request has the outcome that the
model says; what is durable is what the model says, after every commit, refusal and crash; no body
is delivered before it is durable; a resend has the first answer; what was replaced in flight is
not delivered again, whatever becomes of the delivery; a receipt settles the body that it came with,
also after restarts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.engine_recount import recount
from support.engine_rig import Got, Rig
from tickwheel.engine import state as engine_state
from tickwheel.engine.engine import Engine
from tickwheel.engine.enqueue import Answer, Request
from tickwheel.engine.state import Batch
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.policies import Coalescing, Merged, Merging
from tickwheel.model.records import NewTask, ProgressState, TaskOptions, TaskSnapshot, id_time_ms

TOPICS, KEYS = ("t", "u"), ("k", "l", "m")
SESSION = b"s" * 16
VERBS = ("ack", "ack", "nack", "nack", "reject", "release", "snooze", "late")
TRIES_MAX = 5
State = tuple[bytes, int]
"""(body, due_ms)"""


class CollidingHash(KeyHash):
    """Two values for all keys of all topics."""

    def __call__(self, topic: str, key: str) -> int:
        return 1 + (key == "m")

    def of_many(self, topics: Sequence[str], keys: Sequence[str]) -> list[int]:
        return [1 + (key == "m") for key in keys]


@pytest.fixture(scope="module", autouse=True)
def every_tick_is_noted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_state, "NOTE_GAP_MS", 0)
        yield


class KeyedRig(Rig):
    def new_engine(self) -> Engine:
        self.seen_ms: dict[int, int] = {}
        """Id → the earliest time at which a tick of this start has seen the task."""
        engine = super().new_engine()
        engine.core.keys.hash = CollidingHash(b"")
        return engine

    def fire(self) -> None:
        batches = (self.core.open, self.core.sealed, self.core.landing)
        staged = [batch.effects.enqueued for batch in batches if batch is not None]
        for task_id in chain(self.rows.tasks, *staged):
            self.seen_ms[task_id] = self.assigned_ms(task_id)
        super().fire()

    def assigned_ms(self, task_id: int) -> int:
        """A task is as old as its id says, but not from the future."""
        return min(self.seen_ms.get(task_id, id_time_ms(task_id)), self.now_ms)


@dataclass
class Change:
    """What a request or a command does to one task; None: it ends."""

    batch: Batch
    id: int
    state: State | None
    accepted: bool
    request: int = 0


def chosen_ms(former_ms: int, new_ms: int, by: Coalescing, enqueued_ms: int, now_ms: int) -> int:
    if by.replaces == "body":
        return max(now_ms, former_ms)
    result = {"new": new_ms, "later": max(former_ms, new_ms), "earlier": min(former_ms, new_ms)}
    limits = [result[by.due]]
    if by.max_wait_ms is not None:
        limits.append(enqueued_ms + by.max_wait_ms)
    return max(now_ms, min(limits))


rules = st.one_of(
    st.builds(
        Coalescing,
        st.sampled_from(("keep", "reject")),
        st.none() | st.sampled_from((1, 500, 20_000)),
        st.sampled_from(("started", "finished")),
    ),
    st.builds(
        Coalescing,
        st.just("replace"),
        st.none() | st.sampled_from((500, 20_000)),
        st.just("finished"),
        st.sampled_from(("both", "body", "due")),
        st.sampled_from(("new", "later", "earlier")),
        st.none() | st.sampled_from((100, 3_000)),
    ),
)
frames = st.lists(
    st.tuples(
        st.sampled_from(TOPICS),
        st.sampled_from(KEYS),
        st.sampled_from((0, 50, 1_000, 60_000)),
        st.none() | rules,
    ),
    min_size=1,
    max_size=3,
)


class CoalescingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = KeyedRig()
        self.durable: dict[int, State] = {}
        self.log: list[Change] = []
        """In order, of batches that have not landed."""
        self.answers: dict[int, tuple[Merged, bool]] = {}
        """By request: what became of its tasks, and whether it is durable."""
        self.request = self.tokens = 0
        self.held: list[Got] = []
        """Deliveries that are not settled, also of earlier starts."""
        self.delivered: set[int] = set()
        """Ids of tasks that this start has delivered, or of whose delivery there is a record."""
        self.overtaken: dict[tuple[int, str], Batch | None] = {}
        """(id, group) of deliveries whose task was replaced → the batch that says so, until it is
        durable."""
        self.rig.subscribe("t", "g")
        self.rig.subscribe("t", "h")
        self.rig.commit()

    # --- the model -----------------------------------------------------------------------------

    def current(self) -> dict[int, State]:
        """Return the state after everything so far is durable."""
        durable = dict(self.durable)
        for change in self.log:
            if change.state is None:
                durable.pop(change.id, None)
            else:
                durable[change.id] = change.state
        return durable

    def everything(self) -> dict[int, TaskSnapshot]:
        return self.rig.known(sorted(self.rig.rows.tasks))

    def is_pending(self, known: TaskSnapshot, by: Coalescing) -> bool:
        word = self.rig.state(known.row.id)
        if word == "scheduled":
            return True
        words = {view for view, _ in self.rig.views(known.row.id).values()}
        if not words:
            return word == "ready"  # nobody subscribes to its topic
        if by.action != "replace" and by.unique_until == "finished":
            return bool(words & {"ready", "waiting", "in_flight"})
        return bool(words) and words <= {"ready", "waiting"}

    def landed_hit(self, topic: str, key: str, by: Coalescing) -> TaskSnapshot | None:
        covered = self.covered(topic, key, by)
        return next((known for known in covered if self.is_pending(known, by)), None)

    def covered(self, topic: str, key: str, by: Coalescing) -> Iterator[TaskSnapshot]:
        """The durable tasks with the key, the newest first."""
        now_ms = self.rig.now_ms
        for task_id, known in sorted(self.everything().items(), reverse=True):
            options = known.row.options
            if known.row.topic != topic or options is None or options.key != key:
                continue
            age_ms = now_ms - self.rig.assigned_ms(task_id)
            if by.window_ms is not None and age_ms >= by.window_ms:
                continue
            yield known

    def not_pending(self, task: NewTask, by: Coalescing) -> dict[int, dict[str, str]]:
        """Id → group → word, of tasks with the key that some group has, or is done with."""
        key = str(task[3] and task[3].key)
        return {
            known.row.id: {g: word for g, (word, _) in self.rig.views(known.row.id).items()}
            for known in self.covered(task[0], key, by)
            if not self.is_pending(known, by)
        }

    def overtake(self, had: dict[int, dict[str, str]], by: int) -> None:
        """Each has given way in the groups where nobody has it, and will in the others."""
        batch = self.rig.core.open
        for task_id, before in had.items():
            after = self.rig.views(task_id) if self.rig.find(task_id) else {}
            for group, word in before.items():
                if word == "in_flight":
                    lease = self.rig.group("t", group).flight[task_id]
                    assert lease.past.replaced_by
                    self.overtaken.setdefault((task_id, group), batch)
                elif word in ("ready", "waiting"):
                    assert after.get(group, ("cancelled", 0))[0] == "cancelled"
            if not set(before.values()) & {"in_flight", "dead"}:
                assert self.rig.state(task_id) == "cancelled"
                self.note(task_id, None, accepted=True)

    # --- requests ------------------------------------------------------------------------------

    def note(self, task_id: int, state: State | None, *, accepted: bool, request: int = 0) -> None:
        self.log.append(Change(self.rig.core.open, task_id, state, accepted, request))

    @rule(frame=frames)
    def enqueue(self, frame: list[tuple[str, str, int, Coalescing | None]]) -> None:
        rig, now_ms = self.rig, self.rig.now_ms
        self.request += 1
        tasks: list[NewTask] = []
        for topic, key, delay_ms, _ in frame:
            self.tokens += 1
            tasks.append((topic, now_ms + delay_ms, b"%d" % self.tokens, TaskOptions(key)))
        asked = [by for *_, by in frame]
        for _ in range(TRIES_MAX):
            wanted = rig.engine.coalescer.needed_records(tasks, asked, now_ms, 1_000)
            session = rig.session(SESSION)
            request = Request(None, session, self.request, tasks, asked)
            if not wanted.must_wait:
                staged = self.staged_in(rig.core.open)
                before = {
                    n: self.landed_hit(task[0], str(task[3] and task[3].key), by)
                    for n, (task, by) in enumerate(zip(tasks, asked, strict=True))
                    if by is not None
                }
                had = {
                    k.row.id: k.row.id in self.delivered for k in before.values() if k is not None
                }
                rest = {
                    n: self.not_pending(task, by)
                    for n, (task, by) in enumerate(zip(tasks, asked, strict=True))
                    if by is not None and by.action == "replace"
                }
                next_ms = {k.row.id: self.next_ms(k) for k in before.values() if k is not None}
                view = self.view(wanted.ids)
                answer = rig.engine.coalescer.decide(request, wanted, view, now_ms)
                if answer is not None:
                    self.judge(tasks, asked, before, staged, next_ms, had, answer)
                    self.judge_rest(tasks, asked, rest, answer)
                    return
            self.commit()
        raise AssertionError("it waits for ever")

    def next_ms(self, known: TaskSnapshot) -> int:
        """When the task comes next, as a lookup shows it."""
        rig = self.rig
        views = rig.engine.control.view(known, rig.now_ms - rig.mono_ms).values()
        times = [view.at_ms for view in views if view.state in ("ready", "waiting")]
        return min(times, default=known.row.due_ms)

    def view(self, asked: Any) -> Any:
        allowed = set(asked)

        def look(ids: Any) -> dict[int, TaskSnapshot]:
            assert set(ids) <= allowed, "records that nobody has read"
            return self.rig.known(list(ids))

        return look

    def staged_in(self, batch: Batch | None) -> dict[tuple[str, str], int]:
        """The newest of each key."""
        rows = batch.effects.enqueued.values() if batch is not None else ()
        return {(row.topic, str(row.options and row.options.key)): row.id for row in rows}

    def judge(
        self,
        tasks: list[NewTask],
        asked: list[Coalescing | None],
        before: dict[int, TaskSnapshot | None],
        staged: dict[tuple[str, str], int],
        next_ms: dict[int, int],
        had: dict[int, bool],
        answer: Answer,
    ) -> None:
        """Every task once more, one after the other, and what follows."""
        now_ms, accepted = self.rig.now_ms, answer.is_certain
        states = self.current()
        own: dict[tuple[str, str], int] = {}
        texts: list[tuple[int, int]] = []
        """(index, whose id it should be answered with)"""
        instead: dict[int, int] = {}
        """Tasks that were cancelled for a new one."""
        for n, (task, by) in enumerate(zip(tasks, asked, strict=True)):
            named = task[0], str(task[3] and task[3].key)
            number, task_id, due_ms = answer.merged[n]
            what = Merging(number)
            value = before.get(n)
            rows = self.rig.core.open.effects.enqueued
            hit = own.get(named)
            if hit is None and by is not None:
                hit = self.staged_within(staged.get(named), by)
                if hit is None:
                    on_its_way = self.staged_in(self.rig.core.sealed).get(named)
                    assert self.staged_within(on_its_way, by) is None, "it may be refused"
                    hit = value.row.id if value is not None else None
            if by is None or hit is None:
                assert what is Merging.STORED, (what, by)
                assert task_id in rows and task_id not in states
                own[named] = task_id
                states[task_id] = task[2], task[1]
            elif by.action != "replace":
                wanted = Merging.KEPT if by.action == "keep" else Merging.REJECTED
                assert what is wanted, (what, by)
                texts.append((n, hit))
            else:
                assert what is Merging.REPLACED, (what, by)
                body, due_ms = states[hit]
                former_ms = next_ms.get(hit, due_ms)
                if had.get(hit) and by.replaces != "due" and hit not in own.values():
                    assert task_id != hit and task_id in rows
                    states.pop(hit)
                    self.note(hit, None, accepted=True)
                    own[named] = instead[hit] = task_id
                    former_ms = max(now_ms, former_ms)
                    states[task_id] = task[2], chosen_ms(former_ms, task[1], by, now_ms, now_ms)
                    continue
                texts.append((n, hit))
                first_ms = now_ms if hit in own.values() else self.rig.assigned_ms(hit)
                next_ms[hit] = chosen_ms(former_ms, task[1], by, first_ms, now_ms)
                states[hit] = body if by.replaces == "due" else task[2], next_ms[hit]
        for n, task_id in texts:
            assert answer.merged[n][1] == instead.get(task_id, task_id), "whose id it is"
        for _, task_id, due_ms in answer.merged:
            if task_id not in states:
                continue
            if task_id not in staged.values():
                assert due_ms == states[task_id][1], "the due time as it is after the request"
            state = states[task_id]
            if had.get(task_id) and (known := self.rig.find(task_id)):
                state = state[0], known.row.due_ms  # attempts keep it
            self.note(task_id, state, accepted=accepted, request=self.request)
        self.answers[self.request] = answer.merged, False
        self.log_request(accepted)

    def judge_rest(
        self,
        tasks: list[NewTask],
        asked: list[Coalescing | None],
        rest: dict[int, dict[int, dict[str, str]]],
        answer: Answer,
    ) -> None:
        """Check that delivered tasks were replaced by newer ones."""
        gone: set[int] = set()
        own: set[tuple[str, str]] = set()
        """What this request itself stores: it has overtaken the others already."""
        for n, (task, by) in enumerate(zip(tasks, asked, strict=True)):
            named = task[0], str(task[3] and task[3].key)
            what, task_id, _ = answer.merged[n]
            is_new_body = by is not None and (by.replaces != "due" or what == Merging.STORED)
            if is_new_body and named not in own:
                had = {i: words for i, words in rest.get(n, {}).items() if i not in gone}
                self.overtake(had, task_id)
                gone |= had.keys()
            is_stored = task_id in self.rig.core.open.effects.enqueued
            if is_stored and (what == Merging.STORED or (is_new_body and what == Merging.REPLACED)):
                own.add(named)

    def staged_within(self, task_id: int | None, by: Coalescing) -> int | None:
        if task_id is None or by.window_ms is None:
            return task_id
        age_ms = self.rig.now_ms - self.rig.assigned_ms(task_id)
        return task_id if age_ms < by.window_ms else None

    def log_request(self, accepted: bool) -> None:
        """That its answer is remembered is part of the batch."""
        self.note(0, (b"", 0), accepted=accepted, request=self.request)

    @rule()
    def resend(self) -> None:
        session = self.rig.session(SESSION)
        for request, (merged, _) in self.answers.items():
            assert session.merged[request] == merged, "a resend has the first answer"
            assert request in session.answers

    # --- batches -------------------------------------------------------------------------------

    def landed(self, batch: Batch) -> None:
        for key in [key for key, one in self.overtaken.items() if one is batch]:
            self.overtaken[key] = None
        for change in [c for c in self.log if c.batch is batch]:
            self.log.remove(change)
            if change.request in self.answers:
                self.answers[change.request] = self.answers[change.request][0], True
            if change.state is None:
                self.durable.pop(change.id, None)
            elif change.id:
                self.durable[change.id] = change.state
        self.check_rows()

    def check_rows(self) -> None:
        rows = {i: row.body for i, row in self.rig.rows.tasks.items()}
        assert rows == {i: body for i, (body, _) in self.durable.items()}

    @rule()
    def commit(self) -> None:
        for _ in range(TRIES_MAX):
            if self.rig.core.sealed is None and self.rig.seal() is None:
                return
            batch = self.rig.core.sealed
            assert batch is not None
            self.rig.apply_and_land()
            self.landed(batch)

    @rule()
    def seal(self) -> None:
        if self.rig.core.sealed is None:
            self.rig.seal()

    @rule()
    def refuse(self) -> None:
        batch = self.rig.core.sealed or self.rig.seal()
        if batch is None:
            return
        self.rig.refuse()
        for key in [key for key, one in self.overtaken.items() if one is batch]:
            self.overtaken[key] = self.rig.core.open
        mine = [c for c in self.log if c.batch is batch]
        for change in mine:
            if not change.accepted:
                self.log.remove(change)
                self.answers.pop(change.request, None)
            change.batch = self.rig.core.open

    @rule()
    def crash(self) -> None:
        self.log.clear()
        self.overtaken = {key: None for key, batch in self.overtaken.items() if batch is None}
        self.answers = {r: found for r, found in self.answers.items() if found[1]}
        self.delivered &= {i for i, _ in (*self.rig.rows.progress, *self.rig.rows.dead)}
        alive, replaced = set(self.current()), set[int]()
        for (task_id, _), row in self.rig.rows.progress.items():
            if row.replaced_by or row.state is ProgressState.REPLACED:
                replaced.add(task_id)
        self.rig.crash()
        # A group whose delivery the crash forgot gives way as well.
        ended = alive & self.rig.core.open.effects.ended.keys()
        assert ended <= replaced, "nothing newer was accepted"
        self.ended_of(alive)
        for group in ("g", "h"):
            self.rig.subscribe("t", group)
        self.check_rows()

    # --- time, deliveries, commands --------------------------------------------------------------

    @rule(ms=st.sampled_from((1, 60, 700, 5_000, 25_000)))
    def time_passes(self, ms: int) -> None:
        alive = set(self.current())
        self.rig.pass_time(ms)
        self.ended_of(alive)

    @rule(ms=st.sampled_from((-30_000, -100, 90_000)))
    def the_clock_jumps(self, ms: int) -> None:
        self.rig.now_ms += ms

    @rule()
    def deliver(self) -> None:
        alive = set(self.current())
        deliveries = self.rig.tick()
        self.ended_of(alive)
        for got in deliveries:
            assert (got.id, got.group.name) not in self.overtaken, "it was replaced"
            assert got.body == self.durable[got.id][0], "a body that is not durable"
            self.held.append(got)
            self.delivered.add(got.id)

    @rule(at=st.integers(0, 30), verb=st.sampled_from(VERBS), everywhere=st.booleans())
    def settle(self, at: int, verb: str, everywhere: bool) -> None:
        """Settle a delivery, or all of its task."""
        if self.held:
            got = self.held.pop(at % len(self.held))
            others = [other for other in self.held if everywhere and other.id == got.id]
            for delivery in (got, *others):
                self.settle_one(delivery, verb)
            self.held = [other for other in self.held if other not in others]

    def settle_one(self, got: Got, verb: str) -> None:
        if self.rig.lease(got) is None and verb != "late":
            return
        alive = set(self.current())
        lease = self.rig.lease(got)
        is_replaced = (got.id, got.group.name) in self.overtaken
        assert lease is None or is_replaced == bool(lease.past.replaced_by)
        if verb == "nack":
            assert (self.rig.nack(got, 2_000) == "cancelled") == is_replaced
        elif verb == "reject":
            self.rig.reject(got)
        elif verb == "release":
            self.rig.release(got)
        elif verb == "snooze":
            assert self.rig.snooze(got, 2_000) == ("cancelled" if is_replaced else "snoozed")
        else:
            body, _ = self.current().get(got.id, (got.body, 0))
            assert self.rig.ack(got) != "acked" or body == got.body, "nobody has had this body"
        self.ended_of(alive)

    @rule(at=st.integers(0, 5))
    def requeue(self, at: int) -> None:
        if dead := [(i, group) for i, known in self.everything().items() for group in known.dead]:
            self.rig.requeue(*dead[at % len(dead)])

    def ended_of(self, alive: set[int]) -> None:
        """Drop the tasks that the command ended."""
        for task_id in alive & self.rig.core.open.effects.ended.keys():
            self.note(task_id, None, accepted=True)

    @rule(at=st.integers(0, 5), delay_ms=st.none() | st.sampled_from((0, 3_000)))
    def command(self, at: int, delay_ms: int | None) -> None:
        ids = sorted(i for i in self.everything())
        if not ids:
            return
        task_id, alive = ids[at % len(ids)], set(self.current())
        if delay_ms is None:
            self.rig.cancel(task_id)
        elif self.rig.reschedule(task_id, delay_ms) == "scheduled":
            row = self.everything().get(task_id)
            if row is not None:
                self.note(task_id, (self.current()[task_id][0], row.row.due_ms), accepted=True)
        self.ended_of(alive)

    @invariant()
    def counts_are_right(self) -> None:
        if self.rig.core.sealed is None:
            recount(self.rig)


TestCoalescing = CoalescingMachine.TestCase
TestCoalescing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def some_rule(rnd: random.Random) -> Coalescing | None:
    if rnd.random() < 0.2:
        return None
    window_ms = rnd.choice((None, None, 500, 20_000))
    if rnd.random() < 0.5:
        action, until = rnd.choice(("keep", "reject")), rnd.choice(("started", "finished"))
        return Coalescing(action, window_ms, until)
    return Coalescing(
        "replace",
        window_ms,
        replaces=rnd.choice(("both", "both", "body", "due")),
        due=rnd.choice(("new", "later", "earlier")),
        max_wait_ms=rnd.choice((None, 100, 3_000)),
    )


@pytest.mark.parametrize("steps", [800, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_random_run_matches_the_model(seed: int, steps: int) -> None:
    """Everything that can happen happens, and often."""
    rnd, machine, seen = random.Random(seed), CoalescingMachine(), Counter[str]()
    judged = machine.judge

    def judge(*given: Any) -> None:
        answer, had = given[-1], given[-2]
        seen.update(Merging(what).word for what, _, _ in answer.merged)
        seen["had"] += any(had.values())
        seen["certain"] += answer.is_certain
        judged(*given)

    machine.judge = judge  # type: ignore[method-assign]
    acts: dict[Callable[[], Any], int] = {
        lambda: machine.enqueue(
            [
                (
                    rnd.choice(TOPICS),
                    rnd.choice(KEYS),
                    rnd.choice((0, 0, 50, 1_000, 60_000)),
                    some_rule(rnd),
                )
                for _ in range(rnd.choice((1, 1, 2, 3)))
            ]
        ): 8,
        machine.commit: 4,
        machine.seal: 2,
        machine.refuse: 1,
        machine.crash: 1,
        machine.resend: 1,
        machine.deliver: 4,
        lambda: machine.time_passes(rnd.choice((1, 60, 700, 5_000))): 4,
        lambda: machine.the_clock_jumps(rnd.choice((-30_000, -100, 20_000))): 1,
        lambda: machine.settle(rnd.randrange(60), rnd.choice(VERBS), rnd.random() < 0.7): 8,
        lambda: machine.requeue(rnd.randrange(6)): 1,
        lambda: machine.command(rnd.randrange(6), rnd.choice((None, 0, 3_000))): 1,
    }
    for act in rnd.choices(list(acts), list(acts.values()), k=steps):
        act()
        machine.counts_are_right()
    wanted = {"stored", "kept", "replaced", "rejected", "had", "certain"}
    assert all(seen[word] >= 5 for word in wanted), seen
