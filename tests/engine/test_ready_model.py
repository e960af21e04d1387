"""A group's ready queue with its stale entries against a slow recount: what is ready is handed out
once, nothing else is, and neither the counts nor the room that is taken drift.

The steps are those that the engine makes: a task becomes ready, is withdrawn (cancel, reschedule,
an ack by an earlier receipt) and may come back, is taken to be leased, is put back for lack of
room, is set aside until its row is read and comes back to the front, or has left by then.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.engine_recount import queued
from tickwheel.engine import queues
from tickwheel.engine.topics import Group, Topic

STEPS = ("come", "come", "come", "withdraw", "withdraw", "lease", "aside", "load", "back", "age")


class Slow:
    """What must be true, kept as plain as possible."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.group = Group(Topic("t"), "g", 0)
        self.now_ms = 0
        self.since_ms: dict[int, int] = {}
        """id → when it became ready."""
        self.aside: set[int] = set()
        self.next_id = 0
        self.leased: list[int] = []
        self.away: list[int] = []
        """Withdrawn; they may come back, with another priority."""
        self.priority: dict[int, int] = {}
        self.were_ready = 0
        """When something was withdrawn: only then is looked whether too much is stale."""

    def step(self, name: str) -> None:
        getattr(self, name)()
        self.now_ms += self.rnd.choice((0, 1, 300))
        self.check()

    def come(self) -> None:
        for _ in range(self.rnd.choice((1, 3, 20))):
            if self.away and self.rnd.random() < 0.6:
                task_id = self.away.pop(self.rnd.randrange(len(self.away)))
            else:
                self.next_id += 1
                task_id = self.next_id
            self.priority[task_id] = self.rnd.choice((0, 0, 0, 1, 2, 3))
            self.group.ready.push(task_id, self.priority[task_id], self.now_ms)
            self.since_ms[task_id] = self.now_ms

    def withdraw(self) -> None:
        count = min(len(self.since_ms), self.rnd.choice((1, 2, 15)))
        for task_id in self.rnd.sample(sorted(self.since_ms), count):
            self.group.withdraw(task_id, self.priority[task_id])
            self.aside.discard(task_id)
            del self.since_ms[task_id]
            self.away.append(task_id)
            self.were_ready = len(self.since_ms)

    def _take(self) -> list[int]:
        """Take entries and return some of them to the queue."""
        ready = self.group.ready
        taken = ready.take(self.rnd.choice((1, 2, 5, 30)))
        priorities = ready.priorities(len(taken))
        assert priorities == [ready.priority_at(at) for at in range(len(taken))]
        index = self.rnd.randrange(len(taken) + 1)
        ready.put_back(taken[index:])
        entries = list(zip(taken, priorities, strict=True))[:index]
        fresh = [(i, priority) for i, priority in entries if not ready.pop_stale(i, priority)]
        assert all(self.priority[i] == priority for i, priority in fresh), "the entry before"
        return [i for i, _ in fresh]

    def lease(self) -> None:
        for task_id in self._take():
            assert task_id in self.since_ms, f"{task_id} is handed out and is not ready"
            del self.since_ms[task_id]
            self.leased.append(task_id)

    def aside_(self) -> None:
        for task_id in self._take():
            assert task_id in self.since_ms and task_id not in self.aside
            self.group.loading[task_id] = self.priority[task_id]
            self.aside.add(task_id)

    def load(self) -> None:
        for task_id in self.rnd.sample(sorted(self.aside), min(len(self.aside), 3)):
            priority = self.group.loading.pop(task_id)
            self.group.ready.push_front(task_id, priority)
            self.aside.discard(task_id)

    def back(self) -> None:
        """Released by its consumer: to the front."""
        if self.leased:
            task_id = self.leased.pop()
            self.group.ready.push_front(task_id, self.priority[task_id])
            self.since_ms[task_id] = self.now_ms

    def age(self) -> None:
        """Looking at the age throws stale heads away."""
        result = self.group.oldest_since_ms()
        assert (result is None) == (not self.since_ms)
        if result is not None:
            assert result <= self.now_ms

    def check(self) -> None:
        group = self.group
        assert group.ready_count == len(self.since_ms)
        assert set(group.loading) == self.aside
        assert group.ready.stale_count == len(group.ready) - queued(group.ready).total()
        ready = max(len(self.since_ms), self.were_ready)
        assert len(group.ready) <= 2 * ready + queues.STALE_MIN + 1

    def drain(self) -> None:
        """All that is ready comes out, once."""
        self.load()
        while self.aside:
            self.load()
        out: list[int] = []
        while ids := self.group.ready.take(7):
            entries = zip(ids, self.group.ready.priorities(len(ids)), strict=True)
            out += [i for i, priority in entries if not self.group.ready.pop_stale(i, priority)]
        assert sorted(out) == sorted(self.since_ms)
        assert (self.group.ready.stale, self.group.ready.stale_count) == ({}, 0)


def run(seed: int, steps: list[str]) -> None:
    slow = Slow(seed)
    for name in steps:
        slow.step("aside_" if name == "aside" else name)
    slow.drain()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "STALE_MIN", 8)


# A priority that was emptied, put back and emptied again.
@example(73, ["lease", "withdraw", "come", "lease", "lease", "age"])
@given(st.integers(0, 2**32), st.lists(st.sampled_from(STEPS), max_size=60))
def test_ready_tasks_are_taken_once(seed: int, steps: list[str]) -> None:
    run(seed, steps)


def test_an_unread_queue_does_not_grow() -> None:
    """A producer that enqueues and cancels, or moves one task again and again."""
    slow = Slow(1)
    for _ in range(3_000):
        slow.step("come")
        while len(slow.since_ms) > 20:
            slow.step("withdraw")
    assert slow.group.ready._plain.memory_bytes < 4_096
    slow.drain()


def test_the_age_ignores_tasks_that_left() -> None:
    group = Group(Topic("t"), "g", 0)
    for task_id in range(100):
        group.ready.push(task_id, 0, 1_000 * task_id)
    for task_id in range(90):
        group.withdraw(task_id, 0)
    since_ms = group.oldest_since_ms()
    assert since_ms is not None and 85_000 <= since_ms <= 90_000
