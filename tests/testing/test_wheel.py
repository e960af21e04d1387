"""The test wheel: time that the test moves, the faults that it makes, and what it says."""

from __future__ import annotations

import asyncio
import logging
import time
import unittest
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.waiting import comes, soon
from tickwheel import (
    BadRequest,
    BodyTooLarge,
    Client,
    ClientClosed,
    Delivery,
    IfPending,
    Refused,
    Retry,
    Task,
    Worker,
)
from tickwheel.client.worker import joined
from tickwheel.testing import StillBusy, SyncTestWheel, TestWheel, WheelCase
from tickwheel.testing import wheel as testing_wheel

BEGIN = datetime(2027, 3, 1, 8, 0, tzinfo=UTC)


class Work:
    """A worker whose handler notes what came, and when by the clock of the wheel."""

    def __init__(self, wheel: TestWheel, **options: Any) -> None:
        self.worker = Worker(Client(), signals=False)
        self.came: list[tuple[bytes, int, float]] = []
        self.fails: set[bytes] = set()

        @self.worker.on("t", **options)
        async def handle(delivery: Delivery) -> None:
            after_s = (wheel.now - BEGIN).total_seconds()
            self.came.append((delivery.body, delivery.attempt, after_s))
            if delivery.body in self.fails:
                raise ValueError("it fails")


@pytest.fixture
async def wheel() -> Any:
    async with TestWheel(BEGIN) as made:
        yield made


# --- time ----------------------------------------------------------------------------------------


async def test_tasks_due_during_a_step_run_at_their_millisecond_in_order(wheel: TestWheel) -> None:
    work = Work(wheel, concurrency=1)
    delays_s = (5.0, 0.001, 3_600.5, 86_400.0, 0.001)
    await wheel.client.enqueue_many([Task("t", b"%g" % s, delay=s) for s in delays_s])
    async with wheel.working(work.worker):
        await wheel.advance("2d")
    assert [came[2] for came in work.came] == sorted(delays_s)
    assert all(float(body) == after_s for body, _, after_s in work.came)
    assert wheel.now == BEGIN + timedelta(days=2)


async def test_no_task_becomes_due_without_a_step(wheel: TestWheel) -> None:
    work = Work(wheel)
    async with wheel.working(work.worker):
        await wheel.client.enqueue("t", b"now")
        await wheel.client.enqueue("t", b"then", delay=0.001)
        await asyncio.sleep(0.02)  # real time: the wheel does not follow it
        await wheel.settle()
        assert [body for body, *_ in work.came] == [b"now"]


@pytest.mark.parametrize("by", ["90m", 5_400, 5_400.0, timedelta(minutes=90), "1h30m"])
async def test_advance_takes_durations_in_several_forms(wheel: TestWheel, by: Any) -> None:
    await wheel.advance(by)
    assert wheel.now - BEGIN == timedelta(minutes=90)


@pytest.mark.parametrize("by", ["a while", -1, "", None])
async def test_an_invalid_duration_is_refused(wheel: TestWheel, by: Any) -> None:
    with pytest.raises(BadRequest, match="duration"):
        await wheel.advance(by)


async def test_retries_follow_their_policy_and_end_as_a_dead_letter(wheel: TestWheel) -> None:
    work = Work(wheel, retry=Retry.exponential(base=10, factor=3, jitter=0, retries=3))
    work.fails.add(b"bad")
    await wheel.client.enqueue("t", b"bad", delay=1)
    async with wheel.working(work.worker):
        await wheel.run_until_idle()
    assert [came[1:] for came in work.came] == [(1, 1.0), (2, 11.0), (3, 41.0), (4, 131.0)]
    (letter,) = await wheel.dead_letters("t")
    assert letter.reason == "ValueError: it fails"


async def test_tasks_enqueued_by_handlers_run_in_the_same_step(wheel: TestWheel) -> None:
    worker, came = Worker(Client(), signals=False), []

    @worker.on("chain")
    async def handle(delivery: Delivery) -> None:
        came.append((wheel.now - BEGIN).total_seconds())
        if len(came) < 5:
            await wheel.client.enqueue("chain", delay=60, body=b"")

    await wheel.client.enqueue("chain", b"")
    async with wheel.working(worker):
        await wheel.advance("1h")
    assert came == [0, 60, 120, 180, 240]


async def test_the_clock_stands_still_while_a_handler_runs(wheel: TestWheel) -> None:
    worker, ended = Worker(Client(), signals=False), []

    @worker.on("slow", lease=1.0)
    def handle(delivery: Delivery) -> None:
        time.sleep(0.05)  # real time: in a thread
        ended.append((delivery.attempt, wheel.now))

    await wheel.client.enqueue("slow", b"", delay=10)
    async with wheel.working(worker):
        await wheel.advance("1h")
    assert ended == [(1, BEGIN + timedelta(seconds=10))]


async def test_a_handler_that_does_not_end_is_named(
    wheel: TestWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing_wheel, "PATIENCE_S", 0.05)
    worker, go_on = Worker(Client(), signals=False), asyncio.Event()

    @worker.on("endless", group="g")
    async def handle(delivery: Delivery) -> None:
        await go_on.wait()

    async with wheel.working(worker):
        await wheel.client.enqueue("endless", b"")
        with pytest.raises(StillBusy, match="handler of endless"):
            await wheel.settle()
        go_on.set()


async def test_a_worker_on_the_wheel_shows_its_state_and_can_be_stopped(wheel: TestWheel) -> None:
    worker = Worker(Client(), signals=False)
    seen: list[tuple[bool, list[int], list[str]]] = []
    handled: list[int] = []

    @worker.on("t", concurrency=1)
    async def handle(delivery: Delivery) -> None:
        handled.append(delivery.id)
        seen.append((worker.started.is_set(), [d.id for d in worker.in_hand], worker.busy))
        worker.stop()

    for _ in range(2):
        await wheel.client.enqueue_many([Task("t", b"")] * 2)
        async with wheel.working(worker):
            await wheel.settle()
        assert not (worker.started.is_set() or worker.in_hand)
    assert len(handled) == 2
    assert seen == [(True, [task_id], ["t (default)"]) for task_id in handled]


async def test_joined_workers_keep_their_own_callbacks(wheel: TestWheel) -> None:
    settled: list[tuple[str, str]] = []

    def worker_of(name: str) -> Worker:
        def on_settled(delivery: Delivery, *_: object) -> None:
            settled.append((name, delivery.topic))

        worker = Worker(Client(), signals=False, on_settled=on_settled)

        @worker.on(name)
        async def handle(delivery: Delivery) -> None:
            """Do nothing."""

        return worker

    merged = joined(wheel.client, map(worker_of, "ab"), signals=False)
    running = asyncio.ensure_future(merged.run())
    await wheel.client.enqueue_many([Task("a", b""), Task("b", b"")])
    await comes(lambda: len(settled) >= 2)
    merged.stop()
    await soon(running)
    assert sorted(settled) == [("a", "a"), ("b", "b")]


async def test_a_schedule_fires_at_its_times(wheel: TestWheel) -> None:
    work = Work(wheel)
    await wheel.client.put_schedule("daily", topic="t", body=b"morning", cron="0 9 * * *")
    async with wheel.working(work.worker):
        await wheel.advance("7d")
        assert [came[2] for came in work.came] == [3_600 + day * 86_400 for day in range(7)]
        await wheel.run_until_idle()
        assert wheel.now == BEGIN + timedelta(days=7), "what a schedule will enqueue is no task yet"


async def test_run_until_idle_does_not_wait_for_a_held_order_key(wheel: TestWheel) -> None:
    work = Work(wheel)
    work.fails.add(b"never")
    async with wheel.working(work.worker):
        await wheel.client.put_schedule("daily", topic="other", every="1d")
        await wheel.client.enqueue("t", b"never", order_key="k")
        await wheel.run_until_idle()
    assert len(work.came) == 16
    assert wheel.now - BEGIN < timedelta(days=1)


async def test_run_until_idle_raises_if_tasks_remain(wheel: TestWheel) -> None:
    work = Work(wheel, retry=Retry.fixed(60, retries=1_000))
    work.fails.add(b"bad")
    await wheel.client.enqueue_many([Task("t", b"bad"), Task("t", b"", delay=5)])
    async with wheel.working(work.worker):
        with pytest.raises(StillBusy, match="1 task is still waiting after 1h"):
            await wheel.run_until_idle(within="1h")


async def test_a_step_of_a_year_is_not_held_as_a_clock_jump(wheel: TestWheel) -> None:
    work = Work(wheel)
    await wheel.client.enqueue("t", b"", delay=timedelta(days=300))
    await wheel.advance("299d")
    await wheel.crash()
    async with wheel.working(work.worker):
        await wheel.advance("66d")
    assert [came[2] for came in work.came] == [300 * 86_400]


# --- what is there -------------------------------------------------------------------------------


async def test_assertions_list_the_enqueued_tasks(wheel: TestWheel) -> None:
    assert wheel.due_next is None
    await wheel.client.enqueue("t", b"b", delay=120, key="k")
    await wheel.client.enqueue("t", b"a", delay=60)
    assert wheel.due_next == BEGIN + timedelta(minutes=1)
    assert [task.body for task in await wheel.enqueued("t")] == [b"a", b"b"]
    assert (await wheel.assert_enqueued("t", key="k", within="2m")).body == b"b"
    for wrong in ({"key": "other"}, {"key": "k", "within": "119s"}, {"body": b"c"}):
        with pytest.raises(AssertionError, match="no task of 't' with .*; enqueued: key None"):
            await wheel.assert_enqueued("t", **wrong)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="enqueued: nothing"):
        await wheel.assert_enqueued("u")


# --- faults --------------------------------------------------------------------------------------


async def test_a_crash_keeps_only_durable_tasks(wheel: TestWheel) -> None:
    work = Work(wheel)
    await wheel.client.enqueue("t", b"kept", delay=60, key="k")
    with wheel.failing_store(), pytest.raises(Refused):
        await wheel.client.enqueue("t", b"never stored", timeout=5)
    await wheel.crash()
    async with wheel.working(work.worker):
        await wheel.advance("1m")
        assert work.came == [(b"kept", 1, 60.0)]
        await wheel.crash()  # the ack was durable
        await wheel.advance("1h")
    assert len(work.came) == 1


async def test_a_store_that_fails_does_not_delay_a_crash(wheel: TestWheel) -> None:
    async with wheel.client.subscribe("t") as deliveries:
        await wheel.client.enqueue("t", b"x")
        delivery = await soon(anext(aiter(deliveries)))
        with wheel.failing_store():
            ack = delivery.ack_nowait()
            await wheel.settle()
            await wheel.crash()
            await wheel.settle()
            assert not ack.done()
        assert await soon(ack) == "acked"


@pytest.mark.parametrize("turns", range(6))
async def test_a_crash_leaves_no_task_whose_ack_was_confirmed(wheel: TestWheel, turns: int) -> None:
    async with wheel.client.subscribe("t") as deliveries:
        await wheel.client.enqueue("t", b"x")
        ack = (await soon(anext(aiter(deliveries)))).ack_nowait()
        for _ in range(turns):
            await asyncio.sleep(0)
        await wheel.crash()
        assert await soon(ack) == "acked"
        assert await wheel.enqueued() == []


async def test_tasks_unacked_before_a_crash_are_redelivered(wheel: TestWheel) -> None:
    async with wheel.client.subscribe("t") as deliveries:
        await wheel.client.enqueue("t", b"x")
        first = await soon(anext(aiter(deliveries)))
        await wheel.crash()
        await wheel.advance("5m")  # whoever had it may have come back until then
        again = await soon(anext(aiter(deliveries)))
        assert again.id == first.id


async def test_lapse_ends_a_lease(wheel: TestWheel) -> None:
    async with wheel.client.subscribe("t", group="g") as deliveries:
        await wheel.client.enqueue("t", b"x")
        first = await soon(anext(aiter(deliveries)))
        assert await wheel.lapse("u") == await wheel.lapse("t", "h") == 0
        assert await wheel.lapse("t", "g") == 1
        again = await soon(anext(aiter(deliveries)))
        assert (again.id, again.attempt) == (first.id, 2)


async def test_duplicate_delivers_a_task_twice(wheel: TestWheel) -> None:
    work = Work(wheel)
    async with wheel.working(work.worker):
        wheel.duplicate()
        await wheel.client.enqueue("t", b"x")
        await wheel.client.enqueue("t", b"y")
        await wheel.settle()
    assert sorted(came[:2] for came in work.came) == [(b"x", 1), (b"x", 2), (b"y", 1)]
    assert await wheel.enqueued() == []


async def test_a_lost_reply_is_retried_without_a_duplicate(wheel: TestWheel) -> None:
    wheel.lose_replies(2)
    receipt = await wheel.client.enqueue("t", b"x", delay=1)
    assert [task.id for task in await wheel.enqueued()] == [receipt.id]


async def test_acks_wait_for_a_store_that_fails(wheel: TestWheel) -> None:
    work = Work(wheel)
    await wheel.client.enqueue("t", b"x", delay=1)
    async with wheel.working(work.worker):
        with wheel.failing_store():
            await wheel.advance(1)
            assert len(work.came) == 1
        await comes(lambda: _all_are_done(wheel))


async def _all_are_done(wheel: TestWheel) -> bool:
    return not await wheel.enqueued()


# --- settings, clients, other ways in ------------------------------------------------------------


async def test_limits_are_the_daemons() -> None:
    async with TestWheel(body_bytes_max=100) as wheel:
        with pytest.raises(BodyTooLarge, match="100"):
            await wheel.client.enqueue("t", bytes(101))


async def test_a_test_wheel_refuses_a_store_setting() -> None:
    with pytest.raises(BadRequest, match="memory:"):
        TestWheel(store="sqlite:///x.db")


async def test_several_clients_share_the_daemon(wheel: TestWheel) -> None:
    other = wheel.new_client(name="other")
    receipt = await other.enqueue("t", b"x", key="k", if_pending=IfPending("keep"))
    again = await wheel.client.enqueue("t", b"y", key="k", if_pending="keep", delay=5)
    assert (again.outcome, again.id) == ("kept", receipt.id)


async def test_two_wheels_do_not_know_each_other() -> None:
    async with TestWheel(BEGIN) as one, TestWheel(BEGIN) as other:
        await one.client.enqueue("t", b"x", delay=1)
        await other.advance(10)
        assert await other.enqueued() == []
        assert one.now == BEGIN


async def test_daemon_log_events_are_log_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tickwheel.inside"):
        async with TestWheel() as wheel:
            await wheel.settle()
    assert "recovered" in caplog.text


async def test_a_test_wheel_leaves_no_asyncio_tasks(wheel: TestWheel) -> None:
    before = asyncio.all_tasks()
    async with TestWheel() as other:
        await other.client.enqueue("t", b"x")
    assert asyncio.all_tasks() <= before


def test_the_synchronous_test_wheel_behaves_the_same() -> None:
    with SyncTestWheel(BEGIN) as wheel:
        wheel.client.enqueue("t", b"x", delay=1_800, key="k")
        wheel.client.enqueue("t", b"y", delay=3_600)
        assert wheel.assert_enqueued("t", key="k", within="30m").body == b"x"
        assert wheel.due_next == BEGIN + timedelta(minutes=30)
        wheel.crash()
        with wheel.client.subscribe("t") as deliveries:
            wheel.advance("30m")
            delivery = deliveries.get(timeout=30)
            assert delivery is not None and delivery.body == b"x"
            assert wheel.lapse() == 1
            again = deliveries.get(timeout=30)
            assert again is not None and again.ack() == "acked"
        assert [task.body for task in wheel.enqueued()] == [b"y"]
        wheel.lose_replies()
        wheel.client.cancel(topic="t", key="none")
        with wheel.failing_store(), pytest.raises(Refused):
            wheel.client.enqueue("t", b"z", timeout=5)
        assert wheel.now == BEGIN + timedelta(minutes=30)
        assert wheel.dead_letters() == []


def test_a_synchronous_test_runs_handlers_and_new_clients() -> None:
    worker, done = Worker(Client(), signals=False), list[bytes]()

    @worker.on("t")
    def handle(delivery: Delivery) -> None:
        done.append(delivery.body)

    with SyncTestWheel(BEGIN) as wheel:
        other = wheel.new_client(name="other")
        with wheel.working(worker):
            other.enqueue("t", b"x", delay=1_800)
            wheel.advance("29m")
            assert done == []
            wheel.run_until_idle()
            assert done == [b"x"]
        other.enqueue("t", b"y")
        wheel.settle()
        assert [task.body for task in wheel.enqueued()] == [b"y"], "the worker has stopped"
    assert done == [b"x"]
    with pytest.raises(ClientClosed):
        other.enqueue("t", b"z")


class TestWithUnittest(WheelCase, unittest.IsolatedAsyncioTestCase):
    async def test_each_test_has_a_wheel(self) -> None:
        await self.wheel.client.enqueue("t", b"x", delay=1)
        await self.wheel.advance(1)
        assert len(await self.wheel.enqueued("t")) == 1
