"""Enqueue: staged until durable, answered once, and a resend is answered with the first outcome."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.engine_rig import NOW_MS, Rig
from tickwheel.engine.enqueue import StagedKeys
from tickwheel.engine.sessions import Session, Sessions
from tickwheel.engine.state import Batch
from tickwheel.model.records import ID_STEP, id_time_ms

KEY = b"k" * 16


class Visited(dict[int, int]):
    """Counts the items that are visited, from either end."""

    count = 0

    def items(self) -> Any:
        visited, plain = self, super().items()

        class Items:
            def __iter__(self) -> Iterator[tuple[int, int]]:
                return map(visited.visit, plain)

            def __reversed__(self) -> Iterator[tuple[int, int]]:
                return map(visited.visit, reversed(plain))

        return Items()

    def visit(self, item: tuple[int, int]) -> tuple[int, int]:
        self.count += 1
        return item


def test_staged_keys_are_indexed_once() -> None:
    batch, staged, hashes = Batch(), StagedKeys(), Visited()
    batch.effects.hashes = hashes
    for task_id in range(100):
        hashes[task_id] = task_id % 2
        assert staged.find(batch, 0) == list(range(0, task_id + 1, 2))
    hashes |= {100: 0, 101: 1, 102: 0}
    assert staged.find(batch, 0) == list(range(0, 103, 2))
    assert hashes.count == 103


def test_a_staged_task_is_not_delivered_before_its_batch_is_durable(rig: Rig) -> None:
    rig.subscribe()
    (task_id,) = rig.stage()
    assert rig.tick() == []
    rig.seal()
    assert rig.tick() == []
    assert rig.state(task_id) == "unknown"
    rig.apply()
    assert rig.tick() == []
    assert rig.state(task_id) == "unknown"
    rig.land()
    assert rig.state(task_id) == "scheduled"
    assert rig.one().id == task_id


def test_enqueues_during_a_commit_join_the_next_batch(rig: Rig) -> None:
    rig.stage()
    first = rig.seal()
    rig.stage(count=2)
    assert first is not None and len(first.effects.enqueued) == 1
    rig.apply_and_land()
    second = rig.seal()
    assert second is not None and len(second.effects.enqueued) == 2


def test_a_request_is_answered_when_its_batch_has_landed(rig: Rig) -> None:
    rig.stage(address="a")
    rig.seal()
    rig.stage(address="b")
    assert rig.answered == []
    rig.apply_and_land()
    assert rig.answered == ["a"]
    rig.commit()
    assert rig.answered == ["a", "b"]


def test_the_tasks_of_a_request_have_ids_in_a_row() -> None:
    ids = Rig().stage(count=5)
    assert ids == list(range(ids[0], ids[0] + 5 * ID_STEP, ID_STEP))


def test_ids_of_a_burst_stay_unique(rig: Rig) -> None:
    ids = rig.stage(count=10_000) + rig.stage(count=3)
    assert ids == sorted(set(ids))
    assert id_time_ms(ids[0]) == NOW_MS
    assert id_time_ms(ids[-1]) <= NOW_MS + 3


def test_ids_ascend_after_a_restart_with_the_clock_set_back(rig: Rig) -> None:
    before = rig.enqueue(delay_ms=60_000)
    rig.now_ms -= 3_600_000
    rig.crash()
    assert rig.enqueue(delay_ms=60_000) > before


def test_a_resend_of_a_durable_request_gets_the_first_ids(rig: Rig) -> None:
    session = rig.session(KEY)
    ids = rig.store(count=3, session=session, request=7, address="first")
    outcome = session.answers.get(7)
    assert outcome == (7, ids[0], 3, NOW_MS)
    assert rig.engine.intake.repeat("again", session, outcome)
    assert rig.answered == ["first"]


def test_a_resend_of_a_staged_request_is_answered_with_it(rig: Rig) -> None:
    session, intake = rig.session(KEY), rig.engine.intake
    rig.stage(session=session, request=1, address="in the sealed batch")
    rig.seal()
    rig.stage(session=session, request=2, address="in the open batch")
    for request in (1, 2):
        outcome = session.answers.get(request)
        assert outcome is not None
        assert not intake.repeat(f"again {request}", session, outcome)
    rig.apply_and_land()
    assert rig.answered == ["in the sealed batch", "again 1"]
    rig.commit()
    assert rig.answered[2:] == ["in the open batch", "again 2"]


def test_a_resend_to_a_restarted_engine_gets_the_first_ids(rig: Rig) -> None:
    (task_id,) = rig.stage(session=rig.session(KEY), request=1)
    rig.seal()
    rig.apply()
    rig.crash()
    assert rig.session(KEY).answers.get(1) == (1, task_id, 1, NOW_MS)


def test_an_uncommitted_request_is_new_after_a_crash(rig: Rig) -> None:
    rig.stage(session=rig.session(KEY), request=1)
    rig.crash()
    assert rig.session(KEY).answers.get(1) is None


def test_outcomes_below_the_floor_are_forgotten(rig: Rig) -> None:
    session = rig.session(KEY)
    for request in range(1, 6):
        rig.stage(session=session, request=request)
    session.raise_floor(4)
    assert [r for r in range(1, 6) if session.answers.get(r)] == [4, 5]
    rig.commit()
    assert list(rig.rows.answered(KEY)) == [4, 5]
    (row,) = rig.rows.sessions.values()
    assert (row.key, row.floor) == ((KEY, 4), 4)
    session.raise_floor(1_000_000)
    assert not session.answers


def test_a_forgotten_session_is_dropped_by_the_next_batch(rig: Rig) -> None:
    rig.store(session=rig.session(KEY), request=1)
    rig.engine.forget_session(KEY)
    rig.engine.forget_session(KEY)
    rig.commit()
    assert rig.rows.sessions == {}


def test_idle_disconnected_sessions_are_forgotten(rig: Rig) -> None:
    idle, connected = rig.session(b"i" * 16), rig.session(b"c" * 16)
    connected.connections = 1
    for session in (idle, connected):
        rig.stage(session=session, request=1)
    rig.commit()
    idle_ms_max = rig.config.session_idle_ms_max
    rig.now_ms += 2 * idle_ms_max  # a clock that is ahead forgets nothing
    rig.engine.sweep(rig.mono_ms + idle_ms_max)
    assert len(rig.core.sessions) == 2
    rig.engine.sweep(rig.mono_ms + idle_ms_max + 1)
    assert [session.key for session in rig.core.sessions] == [connected.key]


@pytest.mark.parametrize(("down_ms", "back_ms"), [(3_600_000, 0), (1_000, 3_600_000)])
def test_a_start_continues_the_age_of_sessions(rig: Rig, down_ms: int, back_ms: int) -> None:
    """If the clock was set back, as if they had just been used."""
    rig.store(session=rig.session(KEY), request=1)
    rig.now_ms -= back_ms
    rig.crash(down_ms=down_ms)
    end_mono_ms = rig.mono_ms + rig.config.session_idle_ms_max - (0 if back_ms else down_ms)
    rig.engine.sweep(end_mono_ms)
    assert len(rig.core.sessions) == 1
    rig.engine.sweep(end_mono_ms + 1)
    assert len(rig.core.sessions) == 0


def test_the_least_recently_used_session_makes_room() -> None:
    sessions = Sessions(sessions_max=2, idle_ms_max=10_000)
    for key, now_ms, mono_ms in ((b"a", NOW_MS, 20), (b"b", NOW_MS + 500, 10)):
        assert sessions.open(key, now_ms, mono_ms) is not None
    assert sessions.open(b"c", NOW_MS, 30) is None
    assert sessions.find_evictable(mono_ms=30, idle_ms_min=25) is None
    assert sessions.find_evictable(mono_ms=1_000, idle_ms_min=25) == b"b"
    assert sessions.forget(b"b") == []
    assert sessions.open(b"c", NOW_MS, 30) is not None


def test_making_room_does_not_scan_all_sessions() -> None:
    class Counted(dict[bytes, Session]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    sessions = Sessions(sessions_max=5_000, idle_ms_max=10**9)
    sessions._all = counted = Counted()
    for number in range(5_000):
        assert sessions.open(b"%d" % number, NOW_MS, mono_ms=number) is not None
    used = sessions.get(b"3")
    assert used is not None
    assert sessions.find_evictable(10_000, idle_ms_min=1_000) == b"0"
    assert sessions.forget(b"0") == []
    used.use(NOW_MS, 9_999)
    order = []
    while (unused := sessions.find_evictable(10_000, idle_ms_min=1_000)) is not None:
        order.append(int(unused))
        assert sessions.forget(unused) == []
    assert order == [number for number in range(1, 5_000) if number != 3]
    assert counted.looks <= 8
    for _ in range(100):
        assert sessions.find_evictable(10_400, idle_ms_min=1_000) is None
    assert counted.looks <= 8
    assert sessions.find_evictable(11_000, idle_ms_min=1_000) == b"3"


def test_staged_bytes_count_until_the_commit(rig: Rig) -> None:
    intake = rig.engine.intake
    rig.stage(body=b"x" * 1_000)
    assert intake.inflight_bytes > 1_000
    rig.commit()
    assert intake.inflight_bytes == 0
    rig.stage(body=b"x" * 1_000)
    rig.seal()
    rig.refuse()
    assert intake.inflight_bytes == 0


def test_a_batch_has_the_bytes_of_its_new_tasks(rig: Rig) -> None:
    """Bytes of a refused batch do not count in the next one."""
    for bodies in ((b"x" * 1_000, b""), (b"y" * 10,)):
        for body in bodies:
            rig.stage(body=body)
        batch = rig.seal()
        assert batch is not None
        assert batch.effects.enqueued_bytes == sum(map(len, bodies))
        rig.refuse()
