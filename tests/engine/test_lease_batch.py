"""Deliveries made in one step equal deliveries made task by task."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine_recount import recount
from support.engine_rig import CONFIG, Got, Rig
from tickwheel.engine import delivery
from tickwheel.engine.delivery import share_out
from tickwheel.engine.topics import Group, Subscriber, Topic
from tickwheel.model.records import (
    TaskOptions,
    columns_bytes,
    columns_of,
    options_bytes,
    size_of,
)
from tickwheel.server.generated import delivered
from tickwheel.server.tcp.listener import delivery_extras

texts = st.text(st.sampled_from("ké\ud800"), max_size=3)
usual = st.sampled_from([TaskOptions(order_key=name) for name in ("k", "l", "m", "")])
unusual = st.fixed_dictionaries(
    {
        "key": st.none() | st.sampled_from(["c", "d", ""]),
        "tag": st.none() | texts,
        "properties": st.none() | st.dictionaries(texts, st.integers(0, 9), max_size=2),
        "priority": st.sampled_from([0, 0, 3]),
        "ttl_ms": st.sampled_from([None, None, None, 500]),
        "retry": st.sampled_from([None, None, "fast"]),
        "order_key": st.none() | st.sampled_from(["k", "l"]),
    }
).map(lambda given: TaskOptions(**given))


class Put(NamedTuple):
    options: list[TaskOptions | None]
    delay_ms: int


class Come(NamedTuple):
    prefetch: int


class Tick(NamedTuple):
    ms: int
    commits: bool


class End(NamedTuple):
    share: int
    how: str


class Go(NamedTuple):
    pick: int


alike = st.tuples(unusual, st.integers(1, 8)).map(lambda pair: [pair[0]] * pair[1])
anything = st.lists(st.none() | usual | unusual, max_size=8)
lists = st.lists(usual, max_size=8) | st.lists(st.none(), max_size=8) | alike | anything
puts = st.builds(Put, lists, st.sampled_from([0, 0, 50, 300]))
steps = st.lists(
    puts
    | st.builds(Come, st.sampled_from([1, 5, 100]))
    | st.builds(Tick, st.sampled_from([0, 1, 60, 600, 31_000]), st.booleans())
    | st.builds(End, st.integers(1, 3), st.sampled_from(["ack", "ack", "ack", "nack", "release"]))
    | st.builds(Go, st.integers(0, 5)),
    max_size=25,
)


class Life:
    """One engine, and all that it has handed out."""

    def __init__(self, frame_bytes: int) -> None:
        config = replace(CONFIG, delivery_frame_bytes_max=frame_bytes, delivery_frame_tasks_max=6)
        self.rig = Rig(config)
        self.subscribers: list[Subscriber] = []
        self.had: list[Got] = []
        self.seen: list[object] = []

    def live(self, step: object) -> None:
        rig = self.rig
        if isinstance(step, Put):
            new = [("t", rig.now_ms + step.delay_ms, b"b" * 9, option) for option in step.options]
            if new:
                size_bytes = sum(size_of(body, one) for _, _, body, one in new)
                rig.engine.intake.enqueue(None, None, 0, new, size_bytes, rig.now_ms)
                rig.commit()
        elif isinstance(step, Come):
            self.subscribers.append(rig.subscribe(prefetch=step.prefetch))
        elif isinstance(step, Tick):
            rig.pass_time(step.ms)
            self.tick()
            if step.commits:
                rig.commit()
        elif isinstance(step, End):
            for got in [item for item in self.had if rig.lease(item)][:: step.share]:
                if rig.lease(got) is not None:
                    getattr(rig, step.how)(got)
        elif isinstance(step, Go) and self.subscribers:
            rig.disconnect(self.subscribers.pop(step.pick % len(self.subscribers)))
        recount(rig)

    def tick(self) -> None:
        got = self.rig.tick()
        self.had += got
        numbers = {one: number for number, one in enumerate(self.subscribers)}
        for one in got:
            lease = self.rig.held(one)
            self.seen.append((numbers[one.subscriber], one.id, one.attempt, lease.traits))
            key = self.options(one.id).order_key
            assert lease.order == (0 if key is None else hash(key) or 1)

    def options(self, task_id: int) -> TaskOptions:
        return self.rig.rows.tasks[task_id].options or TaskOptions()


@given(steps=steps, frame_bytes=st.sampled_from([1, 400, 1 << 20]))
@settings(max_examples=150)
def test_a_lease_batch_equals_single_deliveries(steps: list[object], frame_bytes: int) -> None:
    lives = []
    for as_one in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not as_one:
                patched.setattr(delivery, "lease_batch_of", lambda *_: None)
            life = Life(frame_bytes)
            for step in [Come(100), *steps, Come(100), Tick(31_000, commits=True)]:
                life.live(step)
            lives.append(life)
    assert lives[0].seen == lives[1].seen
    assert vars(lives[0].rig.rows) == vars(lives[1].rig.rows)


@pytest.mark.parametrize(
    "options",
    [
        TaskOptions(key="c"),
        TaskOptions(tag="a", properties={"n": 1}),
        TaskOptions(priority=3),
        TaskOptions(ttl_ms=500),
        TaskOptions(retry="fast"),
        TaskOptions(order_key="k"),
    ],
    ids=["key", "tag", "priority", "ttl", "retry", "order"],
)
def test_a_settled_lease_batch_leaves_no_state(options: TaskOptions) -> None:
    life = Life(1 << 20)
    puts = [Put([options] * 3, 0), Put([options] * 2, 50)]
    for step in (Come(100), Come(1), *puts, *[Tick(60, commits=False), End(1, "ack")] * 5):
        life.live(step)
        life.rig.commit()
    core = life.rig.core
    assert len(life.seen) == 5
    assert not (life.rig.rows.tasks or core.resident_rows or core.in_flight or len(core.keys))
    assert not (len(core.lifetimes) or core.resident_bytes)


def test_a_lease_batch_is_made_of_usual_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would compare nothing with itself."""
    made: list[int] = []

    def counted(*arguments: Any) -> Any:
        result = lease_batch_of(*arguments)
        made.append(0 if result is None else len(result.ids))
        return result

    lease_batch_of = delivery.lease_batch_of
    monkeypatch.setattr(delivery, "lease_batch_of", counted)
    for options in (None, TaskOptions(tag="a"), TaskOptions(order_key="k"), TaskOptions(key="c")):
        life = Life(1 << 20)
        others = [None if options is None else options._replace(order_key=options.order_key and n)
                  for n in "lm"]  # fmt: skip
        for step in (Come(100), Come(100), Put([options, *others], 0), Tick(1, commits=True)):
            life.live(step)
        assert len(life.seen) == sum(made) == 3
        made.clear()


# --- columns -----------------------------------------------------------------------------------


@given(some=st.lists(usual | unusual, min_size=1, max_size=6) | st.lists(usual, min_size=1))
def test_columns_equal_their_options(some: list[TaskOptions]) -> None:
    columns = columns_of(some)
    assert [TaskOptions(*item) for item in zip(*columns, strict=True)] == some
    assert columns_bytes(columns, some) == sum(map(options_bytes, some))


@given(some=st.lists(st.none() | usual | unusual, min_size=1) | st.lists(usual, min_size=1))
def test_extras_of_columns_equal_those_of_each_task(some: list[TaskOptions | None]) -> None:
    each = [None if item is None else delivered(item) for item in some]
    assert list(delivery_extras(some)) == each


# --- who gets what -----------------------------------------------------------------------------


@given(data=st.data(), rooms=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_subscribers_get_preferred_tasks_within_their_room(
    data: st.DataObject, rooms: list[int]
) -> None:
    group = Group(Topic("t"), "g", 0)
    members = [Subscriber(None, group, 100, 1_000) for _ in rooms]
    stranger = Subscriber(None, group, 100, 1_000)
    room = dict(zip(members, rooms, strict=True))
    whom = st.sampled_from([None, stranger, *members])
    wanted = data.draw(st.lists(whom, max_size=sum(rooms)))
    parts, has_others = share_out(wanted, room)
    assert sorted(at for places in parts.values() for at in places) == list(range(len(wanted)))
    asked = Counter(wanted)
    for member in members:
        places = parts.get(member, [])
        assert len(places) <= room[member]
        its_own = [at for at in places if wanted[at] is member]
        assert len(its_own) == min(asked[member], room[member])
        assert its_own == [at for at, other in enumerate(wanted) if other is member][: len(its_own)]
    given_away = [at for one, places in parts.items() for at in places if wanted[at] is not one]
    assert has_others == bool(given_away)
