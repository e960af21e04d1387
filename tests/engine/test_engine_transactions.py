"""Half tasks, decisions and questions, one by one."""

from __future__ import annotations

import pytest

from engine.transaction_rig import CHECK_MS, CHECKS_MAX, EVERY_MS, TransactionRig, half
from support.engine_recount import recount
from tickwheel.model.kinds import Reach, TransactionState
from tickwheel.model.records import ID_STEP, TaskOptions, id_time_ms

HOUR_MS = 3_600_000


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def test_prepared_tasks_are_not_delivered(rig: TransactionRig) -> None:
    rig.subscribe()
    rig.prepare("x", 1, half(), half(), address="p")
    assert rig.answered == []
    rig.commit()
    assert rig.answered == ["p"]
    assert (rig.core.tasks, rig.core.scheduled, rig.rows.tasks) == (0, 0, {})
    assert rig.tick() == []
    assert rig.core.room == rig.config.scheduled_max - 2
    recount(rig)


def test_a_commit_makes_all_prepared_tasks_at_once(rig: TransactionRig) -> None:
    rig.subscribe()
    rig.prepare("x", 2, half(b"3"))
    rig.prepare("x", 1, half(b"1"), half(b"2"))
    rig.commit()
    rig.pass_time(HOUR_MS)
    rig.commit_of("x", "c")
    assert rig.bodies() == []
    rig.commit()
    assert rig.answered[-1] == "c"
    assert rig.bodies() == [b"1", b"2", b"3"]
    row = rig.core.transaction_registry.by_name["x"].row
    ids = sorted(rig.rows.tasks)
    assert (row.state, row.first_id, row.tasks) == (TransactionState.COMMITTED, ids[0], 3)
    assert ids == [ids[0] + n * ID_STEP for n in range(3)]
    assert id_time_ms(ids[0]) == rig.now_ms, "an id says when its task came to be"
    assert len(rig.tick()) == 3
    assert rig.core.totals.transactions_committed == 1
    recount(rig)


def test_a_rollback_drops_the_prepared_tasks(rig: TransactionRig) -> None:
    rig.prepare("x", 1, half())
    rig.commit()
    rig.roll_back("x")
    rig.commit()
    assert rig.rows.tasks == {}
    assert [key for key in rig.rows.transactions if key[1]] == []
    assert rig.standing("x") is TransactionState.ROLLED_BACK
    assert rig.core.room == rig.config.scheduled_max
    recount(rig)


def test_due_times_count_from_prepare_or_commit(rig: TransactionRig) -> None:
    now_ms = rig.now_ms
    window = TaskOptions(within_ms=5_000, asked_ms=0)
    rig.prepare(
        "x",
        1,
        half(due_ms=now_ms + 1_000),
        half(due_ms=now_ms + 2 * HOUR_MS),
        half(due_ms=now_ms + 1_000, delay_ms=1_000),
        half(due_ms=now_ms, delay_ms=0, options=window),
    )
    rig.pass_time(HOUR_MS)
    rig.commit_of("x")
    rig.commit()
    early, late, counted, placed = [row for _, row in sorted(rig.rows.tasks.items())]
    assert early.due_ms == now_ms + HOUR_MS, "what is due before the commit is due with it"
    assert late.due_ms == now_ms + 2 * HOUR_MS
    assert counted.due_ms == now_ms + HOUR_MS + 1_000
    assert placed.options is not None and placed.options.asked_ms == now_ms + HOUR_MS
    assert now_ms + HOUR_MS <= placed.due_ms <= now_ms + HOUR_MS + 5_000


def test_a_group_made_before_the_commit_gets_the_tasks(rig: TransactionRig) -> None:
    """And one that is deleted holds nothing of it."""
    first = rig.subscribe(group="a")
    rig.prepare("x", 1, half(due_ms=rig.now_ms))
    rig.commit()
    second = rig.after(HOUR_MS).subscribe(group="b")
    rig.commit()
    rig.commit_of("x")
    rig.commit()
    assert {got.subscriber for got in rig.tick()} == {first, second}
    rig.crash()
    recount(rig)


@pytest.mark.parametrize("end", ["refuse", "withdraw"])
def test_a_refused_transaction_batch_has_no_effect(rig: TransactionRig, end: str) -> None:
    rig.prepare("old", 1, half(b"old"))
    rig.prepare("other", 1, half(b"other"))
    rig.commit()
    rig.prepare("old", 2, half(b"more"), address="prepare")
    rig.prepare("new", 1, half(b"new"), address="new")
    rig.commit_of("other", "commit")
    if end == "refuse":
        rig.seal()
        refused = rig.refuse()
    else:
        refused = [address for address, _, _ in rig.engine.intake.withdraw()]
    assert refused == ["prepare", "new", "commit"]
    rig.commit()
    assert (rig.standing("new"), rig.bodies()) == (None, [])
    assert list(rig.core.transaction_registry.by_name["old"].parts) == [1]
    recount(rig)
    rig.commit_of("other")
    rig.commit()
    assert rig.bodies() == [b"other"]
    rig.crash()
    recount(rig)
    assert rig.standing("other") is TransactionState.COMMITTED


def test_an_uncommitted_transaction_cannot_be_decided(rig: TransactionRig) -> None:
    rig.prepare("x", 1, half())
    assert rig.is_free("x"), "more of the same batch shares its fate"
    rig.commit_of("x")
    assert not rig.is_free("x")
    rig.commit()
    assert rig.is_free("x")
    rig.prepare("y", 1, half())
    rig.seal()
    assert not rig.is_free("y")
    rig.apply_and_land()
    assert rig.is_free("y")


def test_an_uncommitted_decision_is_not_shown(rig: TransactionRig) -> None:
    rig.prepare("x", 1, half())
    assert rig.core.transaction_registry.durable_state("x") is None
    rig.commit()
    rig.commit_of("x")
    before = rig.core.transaction_registry.durable_state("x")
    assert before is not None
    assert (before.row.state, list(before.parts)) == (TransactionState.OPEN, [1])
    rig.commit()
    after = rig.core.transaction_registry.durable_state("x")
    assert after is not None and after.row.state is TransactionState.COMMITTED


def test_each_part_of_a_transaction_is_stored_once(rig: TransactionRig) -> None:
    rig.prepare("x", 1, half(b"1"))
    rig.prepare("x", 1, half(b"again"), address="resend")
    rig.commit()
    assert rig.answered == [None, "resend"]
    rig.commit_of("x")
    rig.commit()
    assert rig.bodies() == [b"1"]


def test_checkbacks_are_limited_then_parked(rig: TransactionRig) -> None:
    rig.prepare("x", 1, half())
    rig.commit()
    began_ms, asked_ms = rig.now_ms, []
    for _ in range(1_000):
        wake_ms = rig.engine.wake_in_ms(rig.now_ms, rig.mono_ms)
        if rig.core.transaction_registry.wait_ms(rig.mono_ms) is None:
            break
        assert wake_ms is not None
        rig.pass_time(max(1, wake_ms))
        if rig.check():
            asked_ms.append(rig.now_ms - began_ms)
        rig.commit()
        rig.crash()
    assert asked_ms == [CHECK_MS, CHECK_MS + EVERY_MS, CHECK_MS + 2 * EVERY_MS]
    assert len(asked_ms) == CHECKS_MAX
    assert rig.standing("x") is TransactionState.PARKED
    recount(rig)
    rig.comes(Reach.OWN)
    assert rig.check() == []
    assert rig.standing("x") is TransactionState.PARKED, "it was asked about often enough"
    rig.commit_of("x")
    rig.commit()
    assert rig.bodies() == [b"b"]


def test_a_returning_producer_is_asked_again(rig: TransactionRig) -> None:
    rig.prepare("x", 1, half())
    rig.commit()
    rig.pass_time(CHECK_MS)
    assert rig.check() == ["x"]
    rig.prepare("x", 2, half())
    rig.commit()
    rig.pass_time(CHECK_MS - 1)
    assert rig.check() == []
    rig.pass_time(1)
    assert rig.check() == ["x"]


@pytest.mark.parametrize("restarted", [False, True])
def test_parked_transactions_are_asked_of_a_late_producer(
    rig: TransactionRig, restarted: bool
) -> None:
    rig.there = Reach.NOBODY
    rig.prepare("parked", 1, half())
    rig.commit()
    for _ in range(CHECKS_MAX + 2):
        rig.pass_time(CHECK_MS)
        assert rig.check() == []
        rig.commit()
    rig.prepare("open", 1, half())
    rig.commit()
    rig.pass_time(CHECK_MS)
    rig.check()
    rig.commit()
    assert rig.standing("parked") is TransactionState.PARKED
    assert rig.standing("open") is TransactionState.OPEN
    if restarted:
        rig.crash()
        rig.pass_time(EVERY_MS)
    rig.comes(Reach.OWN)
    rig.commit()
    assert sorted(rig.check()) == ["open", "parked"]
    rig.commit()
    recount(rig)


def test_decided_transactions_expire_by_age_and_number(rig: TransactionRig) -> None:
    for n in range(25):
        rig.prepare(f"x{n:02}", 1, half())
        rig.commit()
        rig.roll_back(f"x{n:02}")
        rig.commit()
    kept = [f"x{n:02}" for n in range(5, 25)]
    assert sorted(rig.core.transaction_registry.by_name) == kept
    rig.prepare("open", 1, half())
    rig.pass_time(600_001)
    rig.engine.sweep(rig.mono_ms)
    rig.commit()
    assert list(rig.core.transaction_registry.by_name) == ["open"]
    assert sorted(rig.rows.transactions) == [("open", 0), ("open", 1)]
    recount(rig)
