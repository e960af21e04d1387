"""Groups with filters, against SQLite: who gets what, whatever restarts and changes there are.

The model asks SQLite for each task that comes due which groups' filters let it pass, as they are at
that moment, and writes it down. The engine has no such list: it decides anew after each crash. Both
must hand out the same, and end what nobody wants.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.filter_rig import FilterRig, Texts
from support.engine_recount import recount
from support.engine_rig import CONFIG, RETRY
from tickwheel.model.records import FORMER_FILTERS_MAX

STEADY = replace(CONFIG, slots=8, retry=replace(RETRY, base_ms=50, retries_max=10_000))
SMALL = replace(STEADY, resident_bytes_max=0)
NAMES = ("a", "b", "c")
FILTERS: tuple[Texts, ...] = (
    (None, None),
    ("eu", None),
    ("eu || us", None),
    (None, "n > 1"),
    (None, "NOT (n > 1) OR tag IS NULL"),
    ("us", "n BETWEEN 1 AND 2 AND s LIKE 'a%'"),
    (None, "n IN (0, 3) AND s <> 'b'"),
    (None, "FALSE"),
)

names = st.sampled_from(NAMES)
picks = st.integers(0, 10_000)
filters = st.sampled_from(FILTERS)
tags = st.sampled_from([None, "eu", "us"])
numbers = st.one_of(st.none(), st.integers(0, 3))
words = st.sampled_from([None, "a", "ab", "b"])
delays_ms = st.sampled_from([0, 0, 1, 60, 250, 1_000, 4_000])


@dataclass
class Known:
    """One task, and what the model says of it."""

    due_ms: int
    owed: dict[str, bool] | None = None
    """Group → whether it wants it; None: it has not come due."""
    done: set[str] = field(default_factory=set)
    """Groups that acked it, or buried it."""
    is_over: bool = False


class FilterMachine(RuleBasedStateMachine):
    """One topic, three names for groups."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = FilterRig(STEADY)
        self.tasks: dict[int, Known] = {}
        self.filters: dict[str, Texts] = {}
        """Of the groups there are."""
        self.dead: set[tuple[int, str]] = set()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("PRAGMA case_sensitive_like = ON")
        self.database.execute("CREATE TABLE task (id INTEGER PRIMARY KEY, tag, n, s)")

    def teardown(self) -> None:
        """Let the remaining tasks come due; a last crash changes nothing."""
        try:
            self.everybody_has_what_is_owed()
            self.rig.crash(down_ms=5_000)
            self.everybody_has_what_is_owed()
        finally:
            self.database.close()

    @initialize(small=st.booleans(), first=st.lists(st.tuples(names, filters), max_size=2))
    def begin(self, small: bool, first: list[tuple[str, Texts]]) -> None:
        self.rig = FilterRig(SMALL if small else STEADY)
        for name, texts in first:
            self.create(name, texts, from_first=False)

    # --- the model -----------------------------------------------------------------------------

    def wants(self, group: str, task_id: int) -> bool:
        tags, where = self.filters[group]
        parts = [f"({where})"] if where is not None else []
        if tags is not None:
            listed = ", ".join(f"'{tag.strip()}'" for tag in tags.split("||"))
            parts.append(f"tag IN ({listed})")
        asked = " AND ".join(["id = ?", *parts])
        rows = self.database.execute(f"SELECT 1 FROM task WHERE {asked}", (task_id,))
        return rows.fetchone() is not None

    def decide(self, until_ms: int) -> None:
        """Decide the tasks due by then, if there is a group."""
        for task_id, known in self.tasks.items() if self.filters else ():
            if known.owed is None and known.due_ms <= until_ms and not known.is_over:
                known.owed = {group: self.wants(group, task_id) for group in self.filters}
                self.end_if_over(known)

    def end_if_over(self, known: Known) -> None:
        assert known.owed is not None
        buried = any(self.tasks[i] is known for i, _ in self.dead)
        if not buried and all(g in known.done or not owes for g, owes in known.owed.items()):
            known.is_over = True

    def settle(self) -> None:
        """Both sides have seen what is due."""
        self.rig.consume(*self.filters)
        self.rig.commit()
        self.decide(self.rig.now_ms)

    def held(self) -> list[tuple[int, str]]:
        return [(i, group) for group in self.filters for i in self.rig.had(group)]

    # --- producers and operators -----------------------------------------------------------------

    @rule(delay_ms=delays_ms, tag=tags, n=numbers, s=words, refused=st.sampled_from([0, 0, 0, 1]))
    def put(
        self, delay_ms: int, tag: str | None, n: int | None, s: str | None, refused: int
    ) -> None:
        given = {name: value for name, value in (("n", n), ("s", s)) if value is not None}
        task_id = self.rig.put(delay_ms, tag=tag, lands=not refused, **given)
        if refused:
            self.rig.seal()
            self.rig.refuse()
            self.rig.commit()
            return
        self.tasks[task_id] = Known(self.rig.now_ms + delay_ms)
        self.database.execute("INSERT INTO task VALUES (?, ?, ?, ?)", (task_id, tag, n, s))

    @rule(name=names, texts=filters, from_first=st.booleans())
    def create(self, name: str, texts: Texts, from_first: bool) -> None:
        if name in self.filters:
            return
        is_first = not self.filters
        self.settle()
        group = self.rig.make(name, texts, 0 if from_first else None)
        self.filters[name] = texts
        while self.rig.replay(group):
            pass
        self.rig.commit()
        for task_id, known in self.tasks.items():
            if known.owed is not None and from_first and not known.is_over:
                known.owed[name] = self.wants(name, task_id)
        if is_first:
            self.decide(self.rig.now_ms)

    @precondition(lambda self: self.filters)
    @rule(
        pick=picks,
        texts=filters,
        fate=st.sampled_from(["kept", "killed", "killed", "refused", "lost"]),
        seen=st.booleans(),
    )
    def change(self, pick: int, texts: Texts, fate: str, seen: bool) -> None:
        name = sorted(self.filters)[pick % len(self.filters)]
        if seen:
            self.settle()
        former = self.rig.group("t", name).settings.former
        if len(former) >= FORMER_FILTERS_MAX:
            return
        self.rig.refilter(name, texts)
        if fate == "lost":
            self.rig.crash()
            return
        self.decide(self.rig.now_ms)
        self.filters[name] = texts
        if fate == "refused" and self.rig.seal() is not None:
            self.rig.refuse()
        self.rig.commit()
        if fate == "killed":
            self.rig.crash()

    @rule(ms=st.sampled_from([1, 60, 250, 1_000, 4_000]))
    def pass_time(self, ms: int) -> None:
        self.rig.pass_time(ms)

    @rule()
    def fire(self) -> None:
        self.settle()

    @rule(down_ms=st.sampled_from([0, 100]), clean=st.booleans())
    def restart(self, down_ms: int, clean: bool) -> None:
        if clean:
            self.rig.stop_and_start(down_ms=down_ms)
        else:
            self.rig.crash(down_ms=down_ms)

    @rule(pick=picks, delay_ms=delays_ms)
    def reschedule(self, pick: int, delay_ms: int) -> None:
        """Reschedule undelivered tasks."""
        self.settle()
        free = [i for i, known in self.tasks.items() if known.owed is None and not known.is_over]
        if free:
            task_id = free[pick % len(free)]
            assert self.rig.reschedule(task_id, delay_ms) == "scheduled"
            self.tasks[task_id].due_ms = self.rig.now_ms + delay_ms
            self.rig.commit()

    @rule(pick=picks, delay_ms=delays_ms)
    def reschedule_what_is_ready(self, pick: int, delay_ms: int) -> None:
        """Its groups let go of it, and it is judged once more."""
        rig = self.rig
        rig.fire()
        rig.commit()
        self.decide(rig.now_ms)
        ready = [i for i, k in self.tasks.items() if k.owed is not None and rig.state(i) == "ready"]
        if ready and not self.dead:
            task_id = ready[pick % len(ready)]
            known = self.tasks[task_id]
            if not known.done and rig.reschedule(task_id, delay_ms) == "scheduled":
                tasks = rig.find(task_id)
                if tasks is not None and rig.core.is_scheduled(tasks.row):
                    # One that its only group would have left out may not have been judged yet.
                    known.owed, known.is_over = None, False
                    known.due_ms = rig.now_ms + delay_ms
            rig.commit()

    # --- consumers -------------------------------------------------------------------------------

    @rule(pick=picks, what=st.sampled_from(["ack", "ack", "nack", "reject", "requeue"]))
    def consume(self, pick: int, what: str) -> None:
        self.settle()
        if what == "requeue":
            letters = sorted(self.dead)
            if letters:
                task_id, group = letters[pick % len(letters)]
                assert self.rig.requeue(task_id, group) == "requeued"
                self.dead.discard((task_id, group))
                self.tasks[task_id].done.discard(group)
            self.settle()
            return
        flying = [(i, g) for i, g in self.held() if i in self.rig.group("t", g).flight]
        if not flying:
            return
        task_id, name = flying[pick % len(flying)]
        group, known = self.rig.group("t", name), self.tasks[task_id]
        lease = group.flight[task_id]
        if what == "ack":
            assert not self.rig.engine.settlement.ack(
                group, lease.epoch, [task_id], [lease.attempt]
            )
            known.done.add(name)
        elif what == "nack":
            self.rig.engine.settlement.nack(lease, 100, "no", self.rig.now_ms)
        else:
            self.rig.engine.settlement.reject(lease, "no", self.rig.now_ms)
            known.done.add(name)
            self.dead.add((task_id, name))
        self.rig.commit()
        self.end_if_over(known)

    # --- both are the same -----------------------------------------------------------------------

    @rule()
    def everybody_has_what_is_owed(self) -> None:
        self.settle()
        owed = {
            (task_id, group)
            for task_id, known in self.tasks.items()
            if known.owed is not None and not known.is_over
            for group, owes in known.owed.items()
            if owes and group not in known.done
        }
        assert set(self.held()) == owed
        for task_id, known in self.tasks.items():
            state = self.rig.state(task_id)
            assert (state in {"filtered", "acked"}) == known.is_over, (task_id, state, known)
            if known.is_over and not known.done:
                assert state == "filtered"

    @invariant()
    def the_counts_are_right(self) -> None:
        recount(self.rig)


TestFilters = FilterMachine.TestCase
TestFilters.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


class LongFilterMachine(FilterMachine):
    """The same for minutes."""


TestFiltersAtLength = pytest.mark.slow(LongFilterMachine.TestCase)
TestFiltersAtLength.settings = settings(max_examples=1_000, stateful_step_count=60, deadline=None)
