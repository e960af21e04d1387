"""Nack, reject, retries, dead letters and what an operator does with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, RETRY, Got, Rig
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import (
    FAILURES_MAX,
    REASON_LENGTH_MAX,
    TRACE_LENGTH_MAX,
    TRACES_LENGTH_MAX,
    TaskOptions,
)


def delivered(rig: Rig) -> Got:
    rig.subscribe()
    rig.enqueue()
    return rig.one()


def dead_lettered(rig: Rig) -> Got:
    got = delivered(rig)
    rig.reject(got, "no good")
    return got


def test_a_nacked_task_returns_after_its_delay(rig: Rig) -> None:
    got = delivered(rig)
    assert rig.nack(got, 700, "later") == "retrying"
    assert rig.state(got.id) == "waiting"
    assert rig.after(699).tick() == []
    again = rig.after(1).one()
    assert (again.attempt, again.body) == (2, got.body)
    assert [f.reason for f in rig.held(again).past.failures] == ["later"]


def test_a_nack_without_a_delay_follows_the_retry_policy(rig: Rig) -> None:
    got = delivered(rig)
    for wait_ms in (1_000, 2_000, 4_000):
        rig.nack(got)
        assert rig.after(wait_ms - 1).tick() == []
        got = rig.after(1).one()


def test_the_last_failed_retry_makes_a_dead_letter(rig: Rig) -> None:
    got = delivered(rig)
    for attempt in range(1, 4):
        assert rig.nack(got, 0, f"try {attempt}") == "retrying"
        got = rig.one()
    assert rig.nack(got, 0, "enough") == "dead"
    assert rig.state(got.id) == "dead"
    rig.commit()
    row = rig.rows.dead[got.id, "default"]
    assert (row.attempt, row.reason) == (4, "enough")
    assert [f.reason for f in row.failures] == ["try 1", "try 2", "try 3", "enough"]
    assert not rig.rows.progress
    assert rig.tick() == []


def test_a_reject_goes_to_the_dead_letters_at_once(rig: Rig) -> None:
    got = dead_lettered(rig)
    rig.commit()
    assert rig.rows.dead[got.id, "default"].reason == "no good"
    assert got.subscriber.outstanding == 0


def test_reasons_and_the_number_of_failures_kept_are_bounded() -> None:
    config = replace(CONFIG, retry=replace(RETRY, retries_max=100))
    rig = Rig(config)
    got = delivered(rig)
    for _ in range(FAILURES_MAX + 3):
        rig.nack(got, 0, "x" * (REASON_LENGTH_MAX + 1))
        got = rig.one()
    failures = rig.held(got).past.failures
    assert len(failures) == FAILURES_MAX
    assert failures[-1].attempt == FAILURES_MAX + 3
    assert {len(f.reason) for f in failures} == {REASON_LENGTH_MAX}


@pytest.mark.parametrize(("most", "kept"), [(TRACE_LENGTH_MAX, 4_000), (7, 7), (0, 0)])
@pytest.mark.parametrize("rejected", [True, False])
def test_a_failure_trace_is_kept_only_with_the_dead_letter(
    most: int, kept: int, rejected: bool
) -> None:
    config = replace(CONFIG, retry=replace(RETRY, retries_max=1), trace_length_max=most)
    rig = Rig(config)
    got = delivered(rig)
    trace = "line\n" * 1_000 + "the end"
    rig.nack(got, 0, f"why\n{trace}")
    got = rig.one()
    assert [failure.reason for failure in rig.held(got).past.failures] == ["why"]
    if rejected:
        rig.reject(got, f"never\n{trace}")
    else:
        rig.nack(got, 0, f"never\n{trace}")
    rig.commit()
    dead = rig.rows.dead[got.id, "default"]
    assert dead.reason == "never"
    assert [failure.trace for failure in dead.failures] == ["", trace[-kept:] if kept else ""]
    assert [failure.summary for failure in dead.failures] == ["why", "never"]
    recount(rig)


def test_uncommitted_failure_traces_are_limited() -> None:
    rig = Rig(replace(CONFIG, trace_length_max=1_000_000))
    rig.subscribe(prefetch=100)
    rig.store(count=40)
    for number, got in enumerate(rig.tick()):
        rig.reject(got, "why\n" + "x" * 1_000_000)
        if number % 3 == 0:
            rig.seal()
            rig.refuse()
    rows = rig.core.open.effects.dead.values()
    assert len(rows) == 40
    waiting = sum(len(failure.reason) for row in rows for failure in row.failures)
    assert TRACES_LENGTH_MAX - 1_000_000 < waiting <= TRACES_LENGTH_MAX + 40 * len("why\n")
    assert {row.reason for row in rows} == {"why"}


def test_an_old_receipt_has_no_lease(rig: Rig) -> None:
    got = delivered(rig)
    rig.nack(got, 0)
    again = rig.one()
    assert rig.lease(got) is None
    assert rig.lease(again._replace(epoch=2)) is None
    assert rig.lease(again) is not None


def test_a_requeued_task_is_ready_with_no_failures(rig: Rig) -> None:
    got = dead_lettered(rig)
    rig.commit()
    assert rig.requeue(got.id) == "requeued"
    again = rig.one()
    assert (again.id, again.attempt, again.failures) == (got.id, 2, 0)
    assert rig.held(again).past.failures == ()
    rig.commit()
    assert not rig.rows.dead
    assert rig.ack(again) == "acked"


def test_a_requeue_survives_a_crash(rig: Rig) -> None:
    got = dead_lettered(rig)
    rig.requeue(got.id)
    rig.commit()
    rig.crash()
    rig.subscribe()
    assert rig.one().id == got.id


def test_a_dead_letter_survives_a_crash_and_is_counted(rig: Rig) -> None:
    got = dead_lettered(rig)
    rig.commit()
    rig.crash()
    rig.subscribe()
    assert rig.tick() == []
    assert (rig.state(got.id), rig.group().dead, rig.core.dead) == ("dead", 1, 1)


def test_a_deleted_dead_letter_ends_the_task(rig: Rig) -> None:
    got = dead_lettered(rig)
    assert rig.delete_dead(got.id) == "deleted"
    assert rig.state(got.id) == "deleted"
    rig.commit()
    assert rig.rows.is_empty()


def test_missing_dead_letters_are_unknown(rig: Rig) -> None:
    got = delivered(rig)
    assert rig.requeue(got.id) == rig.delete_dead(got.id) == "unknown"
    rig.reject(got)
    assert rig.requeue(got.id, "nobody") == "unknown"
    rig.delete_dead(got.id)
    assert rig.requeue(got.id) == rig.delete_dead(got.id) == "deleted"


@pytest.mark.parametrize("attempt", [1, 2, 30, 10_000])
def test_retry_delays_grow_to_the_cap(attempt: int) -> None:
    policy = RetryPolicy(base_ms=10_000, factor=2.0, cap_ms=7_200_000, jitter=0.0)
    expected_ms = min(10_000 * 2 ** (min(attempt, 40) - 1), 7_200_000)
    assert policy.delay_ms(attempt, 1) == expected_ms


def test_a_dead_letter_with_an_expired_ttl_is_not_requeued(rig: Rig) -> None:
    """It would expire at once, and be gone without a word."""
    rig.subscribe()
    letters = [rig.enqueue(ttl_ms=ttl_ms) for ttl_ms in (100, 101)]
    for got in rig.tick():
        rig.reject(got, "no good")
    rig.commit()
    rig.after(101)
    assert [rig.requeue(letter) for letter in letters] == ["ttl_over", "requeued"]
    assert [rig.state(letter) for letter in letters] == ["dead", "ready"]
    rig.commit()
    assert {key[0] for key in rig.rows.dead} == {letters[0]}
    assert rig.core.totals.expired == 0


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("ttl_ms", [None, 100, 5_000])
def test_a_new_ttl_applies_to_all_groups_of_the_task(
    rig: Rig, ttl_ms: int | None, restarted: bool
) -> None:
    """It is the task's, and counts from the requeue on: where it is ready, waits for a retry, or is
    in flight and comes back, and where it was a dead letter as well."""
    rig.subscribe_all(("dead", "dead-too", "flight", "waiting"))
    rig.subscribe(group="ready", prefetch=0)
    task_id = rig.enqueue(ttl_ms=ttl_ms)
    got = {delivery.group.name: delivery for delivery in rig.tick()}
    rig.nack(got["waiting"], 5_000)
    for name in ("dead", "dead-too"):
        rig.reject(got[name], "no good")
    rig.after(200).fire()
    gone = {"ready", "waiting"} if ttl_ms == 100 else set()
    assert [rig.requeue(task_id, name, 300) for name in ("dead", "dead-too")] == ["requeued"] * 2
    recount(rig)
    rig.commit()
    if restarted:
        rig.stop_and_start()
    assert rig.rows.tasks[task_id].options == TaskOptions(ttl_ms=500)
    groups = rig.core.topics["t"].groups
    lease = groups["flight"].flight[task_id]
    assert lease.traits.ttl_end_ms == rig.now_ms + 301
    for after_ms, over in ((300, set[str]()), (1, {"dead", "dead-too", "ready", "waiting"} - gone)):
        counted = {name: group.expired for name, group in groups.items()}
        rig.after(after_ms).fire()
        recount(rig)
        assert {name for name, group in groups.items() if group.expired > counted[name]} == over
