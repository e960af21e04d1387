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


def test_a_snoozed_task_returns_without_a_failure(rig: Rig) -> None:
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
def test_snooze_count_survives_a_restart(crash: bool) -> None:
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


def test_snoozes_of_a_task_are_limited() -> None:
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


def test_release_lapse_and_nack_keep_the_snooze_count() -> None:
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


def test_snoozes_count_per_group(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.subscribe(group="b")
    rig.enqueue()
    first, second = rig.tick()
    rig.snooze(first, 300)
    assert rig.ack(second) == "acked"
    again = rig.after(300).one()
    assert (again.group, again.attempt) == (first.group, 2)
