"""Snooze: a consumer postpones a delivery, and that counts no attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, LEASE_MS, Got, Rig
from tickwheel.model.records import ProgressState


def delivered(rig: Rig) -> Got:
    rig.enqueue()
    return rig.one()


def test_a_snoozed_task_comes_again_at_its_time_and_has_not_failed(rig: Rig) -> None:
    subscriber = rig.subscribe()
    got = delivered(rig)
    assert rig.snooze(got, 700) == "snoozed"
    rig.commit()
    assert subscriber.outstanding == 0
    row = rig.rows.progress[got.id, "default"]
    assert (row.state, row.attempt, row.at_ms, row.snoozes, row.failed) == (
        ProgressState.WAITING, 1, rig.now_ms + 700, 1, 0,
    )  # fmt: skip
    assert rig.after(699).tick() == []
    again = rig.after(1).one()
    assert (again.id, again.attempt, again.failures) == (got.id, 2, 0)
    assert rig.held(again).past.failures == ()
    assert [
        view.snoozes for view in rig.engine.control.view(rig.known([got.id])[got.id], 0).values()
    ] == [1]
    assert (rig.group().snoozed, rig.group().nacked) == (1, 0)
    assert rig.core.totals.snoozed == 1


@pytest.mark.parametrize("crash", [True, False])
def test_snoozes_are_remembered_over_a_restart_beside_the_attempts_that_failed(crash: bool) -> None:
    rig = Rig(replace(CONFIG, snoozes_max=2))
    rig.subscribe()
    rig.nack(delivered(rig), 0, "first")
    assert rig.snooze(rig.one(), 500) == "snoozed"
    rig.commit()
    if crash:
        rig.crash()
    else:
        rig.stop_and_start()
    rig.subscribe()
    assert rig.tick() == []
    second = rig.after(500).one()
    assert (second.attempt, second.failures) == (3, 1)
    assert [f.reason for f in rig.held(second).past.failures] == ["first"]
    assert rig.snooze(second, 0) == "snoozed"
    assert rig.snooze(rig.one(), 0) == "too_often"
    recount(rig)


def test_a_task_is_postponed_as_often_as_the_limit_says_and_then_stays() -> None:
    rig = Rig(replace(CONFIG, snoozes_max=3))
    rig.subscribe()
    got = delivered(rig)
    for _ in range(3):
        assert rig.snooze(got, 0) == "snoozed"
        rig.commit()
        got = rig.one()
    assert rig.snooze(got, 0) == "too_often"
    assert rig.state(got.id) == "in_flight"
    assert rig.ack(got) == "acked"
    rig.commit()
    assert not rig.rows.progress
    recount(rig)


def test_neither_a_release_nor_a_lapsed_lease_nor_a_nack_forgets_the_snoozes() -> None:
    rig = Rig(replace(CONFIG, snoozes_max=1))
    rig.subscribe()
    rig.snooze(delivered(rig), 0)
    rig.release(rig.one())
    rig.commit()
    rig.crash()
    rig.subscribe()
    got = rig.one()
    assert rig.snooze(got, 0) == "too_often"
    rig.pass_time(LEASE_MS)
    rig.nack(rig.one(), 0)
    rig.commit()
    rig.crash()
    rig.subscribe()
    assert rig.snooze(rig.one(), 0) == "too_often"
    recount(rig)


def test_a_snoozed_task_can_be_cancelled_and_expires(rig: Rig) -> None:
    rig.subscribe()
    cancelled = delivered(rig)
    rig.snooze(cancelled, 700)
    assert rig.cancel(cancelled.id) == "cancelled"
    rig.enqueue(ttl_ms=100)
    late = rig.one()
    rig.snooze(late, 700)
    assert rig.after(701).tick() == []
    rig.commit()
    assert not rig.rows.tasks


def test_each_group_postpones_for_itself(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.subscribe(group="b")
    rig.enqueue()
    first, second = rig.tick()
    rig.snooze(first, 300)
    assert rig.ack(second) == "acked"
    again = rig.after(300).one()
    assert (again.group, again.attempt) == (first.group, 2)
