"""Which retry policy holds, and what the attempts of a task say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.test_engine_ordering import OrderRig
from support.engine_recount import recount
from support.engine_rig import CONFIG, GRACE_MS, LEASE_MS, Got, Rig
from tickwheel.model.policies import BUILT_IN, RetryPolicy


def fixed(delay_ms: int, retries: int = 16) -> RetryPolicy:
    return RetryPolicy(delay_ms, 1.0, 0, retries, 0.0, "fixed")


NAMED = replace(CONFIG, policies={"quick": fixed(7)})


def wait_after_nack(rig: Rig, got: Got) -> int:
    assert rig.nack(got) == "retrying"
    return got.group.waiting[got.id] - rig.now_ms


def test_policies_apply_in_the_order_task_group_topic_daemon() -> None:
    rig = Rig(NAMED)
    rig.subscribe()
    rig.enqueue()
    assert wait_after_nack(rig, rig.one()) == 1_000
    rig.configure("t", retry=fixed(50))
    rig.enqueue()
    assert wait_after_nack(rig, rig.one()) == 50
    rig.configure("t", "default", retry="quick")
    rig.enqueue()
    assert wait_after_nack(rig, rig.one()) == 7
    rig.enqueue(retry=fixed(3))
    assert wait_after_nack(rig, rig.one()) == 3
    recount(rig)


def test_a_nacks_delay_overrides_the_policy_but_not_its_retries(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue(retry=fixed(50, 1))
    got = rig.one()
    assert rig.nack(got, 5) == "retrying"
    assert got.group.waiting[got.id] == rig.now_ms + 5
    rig.pass_time(5)
    assert rig.nack(rig.one(), 5) == "dead"


def test_an_undefined_policy_name_uses_the_daemons_policy() -> None:
    rig = Rig(NAMED)
    rig.subscribe()
    rig.enqueue(retry="quick")
    rig.config = CONFIG
    rig.crash()
    rig.subscribe()
    assert wait_after_nack(rig, rig.one()) == 1_000


def test_a_named_policy_is_looked_up_when_it_is_used() -> None:
    rig = Rig(NAMED)
    rig.subscribe()
    rig.enqueue(retry="quick")
    rig.config = replace(CONFIG, policies={"quick": fixed(9)})
    rig.crash()
    rig.subscribe()
    assert wait_after_nack(rig, rig.one()) == 9


def test_policies_outlast_a_crash(rig: Rig) -> None:
    rig.subscribe()
    rig.configure("t", "default", retry=BUILT_IN["rocketmq"])
    rig.enqueue()
    rig.enqueue(retry=fixed(3))
    rig.crash()
    rig.subscribe()
    assert [wait_after_nack(rig, got) for got in rig.tick()] == [10_000, 3]


def test_a_table_policy_follows_its_steps_then_buries(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue(retry=BUILT_IN["rocketmq"])
    waits = []
    for attempt in range(1, 17):
        got = rig.one()
        assert got.attempt == attempt
        waits.append(wait_after_nack(rig, got))
        rig.pass_time(waits[-1])
    assert waits == list(BUILT_IN["rocketmq"].delays_ms)
    assert rig.nack(rig.one()) == "dead"


def test_policy_none_buries_at_the_first_failure(rig: Rig) -> None:
    rig.subscribe()
    nacked, expired, lost = (rig.enqueue(retry="none") for _ in range(3))
    got = {delivery.id: delivery for delivery in rig.tick()}
    assert rig.nack(got[nacked]) == "dead"
    rig.after(LEASE_MS).expire()
    assert [rig.state(i) for i in (nacked, expired, lost)] == ["dead"] * 3
    assert rig.core.totals.dead == 3


def test_repeated_disconnects_end_as_a_dead_letter(rig: Rig) -> None:
    task_id = rig.enqueue()
    for attempt in range(1, 5):
        consumer = rig.subscribe()
        assert rig.one().attempt == attempt
        rig.disconnect(consumer)
        rig.after(GRACE_MS).expire()
    assert rig.state(task_id) == "dead"
    rig.commit()
    (letter,) = rig.rows.dead.values()
    assert (letter.attempt, letter.reason) == (4, "connection lost")
    assert [f.attempt for f in letter.failures] == [1, 2, 3, 4]


def test_retries_left_count_down_while_it_fails(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue(retry=fixed(5, 2))

    def left() -> tuple[str, int]:
        known = rig.find(task_id)
        assert known is not None
        view = rig.engine.control.view(known, 0)["default"]
        return view.state, view.retries_left

    seen = []
    for _ in range(3):
        got = rig.one()
        seen.append(left())
        rig.nack(got)
        seen.append(left())
        rig.pass_time(5)
    assert seen == [
        ("in_flight", 2), ("waiting", 2), ("in_flight", 1), ("waiting", 1), ("in_flight", 0),
        ("dead", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "expected"),
    [("hold", [1, 1, 0, 0]), ("dead", [1, 1, 0, 0]), ("retry", [None, None, None, None])],
)
def test_retries_left_of_ordered_tasks_follow_the_groups_rules(
    failure: str, expected: list[int | None]
) -> None:
    rig = OrderRig()
    rig.subscribe()
    rig.configure("t", "default", order_attempts=2, order_failure=failure, order_retry_ms=5)
    task_id = rig.put("k")
    seen = []
    for _ in range(2):
        got = rig.one()
        for step in (lambda: None, lambda got=got: rig.nack(got)):
            step()
            known = rig.find(task_id)
            assert known is not None
            seen.append(rig.engine.control.view(known, 0)["default"].retries_left)
        rig.commit()
        rig.pass_time(5)
    assert seen == expected


def test_the_failing_consumer_is_recorded(rig: Rig) -> None:
    subscriber = rig.subscribe()
    subscriber.label = "worker 10.0.0.7:51234"
    rig.enqueue(retry="none")
    rig.nack(rig.one(), reason="no")
    rig.commit()
    (letter,) = rig.rows.dead.values()
    assert letter.failures == ((1, rig.now_ms, "no", "worker 10.0.0.7:51234"),)


class Broken(RetryPolicy):
    """A policy whose arithmetic fails."""

    def delay_ms(self, attempt: int, task_id: int) -> int:
        raise OverflowError("too far")

    def allows(self, attempt: int) -> bool:
        return attempt < 2 or 1 / 0 > 0


@pytest.mark.parametrize("how", ["nack", "lease over"])
def test_an_uncomputable_policy_buries_its_task(rig: Rig, how: str) -> None:
    """And nothing else happens: not to the engine, not to the tasks beside it."""
    rig.subscribe()
    broken = rig.enqueue(retry=Broken())
    fine = rig.enqueue(retry=fixed(5))
    for _ in range(3):
        for got in rig.tick():
            if how == "nack":
                rig.nack(got, reason="no")
        rig.after(LEASE_MS).commit()
    assert rig.state(broken) == "dead" and rig.state(fine) != "dead"
    dead = rig.rows.dead[broken, "default"]
    assert dead.reason.startswith("internal: ")
    assert ("OverflowError" if how == "nack" else "ZeroDivisionError") in dead.reason
    assert [what for what, _, _ in rig.core.faults] == [f"task {broken} of group default"]
    recount(rig)
    rig.crash()
    assert rig.state(broken) == "dead"


@pytest.mark.parametrize("retry", [
    RetryPolicy(1, 1e6, 1, 100, 0.0),
    RetryPolicy(1, 1e6, 315_576_000_000, 100, 1.0),
    RetryPolicy(315_576_000_000, 1.0, 0, 100, 1.0, "fixed"),
    RetryPolicy(0, 1.0, 0, 100, 0.0, "table", (0,) * 1_024),
])  # fmt: skip
def test_policies_at_their_extremes_for_a_hundred_attempts(rig: Rig, retry: RetryPolicy) -> None:
    rig.subscribe(lease_ms=43_200_000)
    task_id = rig.enqueue(retry=retry)
    for attempt in range(1, 101):
        got = rig.one()
        assert got.attempt == attempt
        assert rig.nack(got) == "retrying"
        rig.pass_time(got.group.waiting[task_id] - rig.now_ms)
        rig.commit()
    assert rig.nack(rig.one()) == "dead"
    assert not rig.core.faults
