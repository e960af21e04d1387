"""The same scenes on a test wheel and on a real daemon: whoever tests with the first may rely on
the second. A scene says what must be seen; both have to show it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from support.daemon import Daemon
from support.waiting import soon
from tickwheel import (
    BadRequest,
    BodyTooLarge,
    Client,
    Conflict,
    Delivery,
    NotFound,
    Retry,
    Subscription,
    Task,
)
from tickwheel.testing import TestWheel


class Place(NamedTuple):
    """Where a scene plays."""

    client: Client
    wheel: TestWheel | None

    async def wait(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if self.wheel is not None:
            await self.wheel.advance(seconds)
        else:
            await asyncio.sleep(seconds)  # real time: a daemon's clock


@asynccontextmanager
async def daemons_place(folder: Path) -> AsyncIterator[Place]:
    with Daemon(folder) as daemon:
        async with Client(daemon.url) as client:
            yield Place(client, None)


@pytest.fixture(params=["wheel", "daemon"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "wheel":
        async with TestWheel() as wheel:
            yield Place(wheel.client, wheel)
    else:
        async with daemons_place(tmp_path) as there:
            yield there


async def nxt(deliveries: Subscription) -> Delivery:
    return await soon(anext(aiter(deliveries)))


async def test_a_task_is_delivered_when_due(place: Place) -> None:
    client = place.client
    receipt = await client.enqueue("t", b"x", delay=2.0, tag="a", properties={"n": 1})
    assert await client.pull("t", wait=0) == []
    await place.wait(2.05)
    async with client.subscribe("t") as deliveries:
        delivery = await nxt(deliveries)
        assert (delivery.id, delivery.body, delivery.attempt) == (receipt.id, b"x", 1)
        assert (delivery.tag, dict(delivery.properties)) == ("a", {"n": 1})
        assert delivery.due_ms == receipt.due_ms <= delivery.delivered_ms
        assert await delivery.ack() == "acked"
        assert await delivery.ack() == "acked"
        assert await delivery.nack() == "acked"


async def test_tasks_are_cancelled_and_rescheduled(place: Place) -> None:
    client = place.client
    one, two = await client.enqueue_many([Task("t", b"1", delay=60, key="k"), Task("t", b"2")])
    assert await client.cancel(one.id) == "cancelled"
    assert await client.cancel(one.id) == "already_cancelled"
    async with client.subscribe("t") as deliveries:
        delivery = await nxt(deliveries)
        assert await client.cancel(two.id) == "in_flight"
        await delivery.ack()
    assert await client.cancel(two.id) == "acked"
    three = await client.enqueue("t", b"3", delay=60)
    moved = await client.reschedule(three.id, delay=120)
    assert moved.status == "scheduled" and moved.due is not None and moved.due > three.due
    assert (await client.run_now(three.id)).status == "scheduled"
    assert [outcome.status for outcome in await client.cancel(topic="t", key="none")] == ["unknown"]


async def test_retries_and_dead_letters(place: Place) -> None:
    client = place.client
    retry = Retry.fixed(0.05, retries=1)
    async with client.subscribe("t", group="g", retry=retry) as deliveries:
        await client.enqueue("t", b"x")
        assert await (await nxt(deliveries)).nack(reason="first") == "retrying"
        await place.wait(0.1)
        second = await nxt(deliveries)
        assert (second.attempt, second.failures) == (2, 1)
        assert await second.nack(reason="second") == "dead"
        (letter,) = [item async for item in client.dead_list(topic="t")]
        assert (letter.reason, letter.attempt) == ("second", 2)
        assert [failure.reason for failure in letter.failures] == ["first", "second"]
        assert await client.dead_requeue([(letter.id, "g")]) == ["requeued"]
        third = await nxt(deliveries)
        assert await third.reject("no") == "dead"
        assert await client.dead_delete([(letter.id, "g")]) == ["deleted"]


async def test_leases_are_snoozed_released_and_extended(place: Place) -> None:
    async with place.client.subscribe("t", prefetch=1, lease=30) as deliveries:
        await place.client.enqueue("t", b"x")
        first = await nxt(deliveries)
        assert await first.extend(60) == "extended"
        assert await first.snooze(0.05) == "snoozed"
        await place.wait(0.1)
        second = await nxt(deliveries)
        assert (second.attempt, second.failures) == (2, 0)
        assert await second.release() == "released"
        third = await nxt(deliveries)
        assert (third.attempt, third.failures) == (3, 0)
        assert await first.extend(1) == "stale"
        await third.ack()


async def test_coalescing_keeps_one_task_per_key(place: Place) -> None:
    client = place.client
    first = await client.enqueue("t", b"1", key="k", delay=60, if_pending="keep")
    kept = await client.enqueue("t", b"2", key="k", delay=60, if_pending="keep")
    assert (kept.outcome, kept.id) == ("kept", first.id)
    replaced = await client.enqueue("t", b"3", key="k", delay=60, if_pending="replace")
    assert replaced.outcome == "replaced"
    assert [task.body for task in await client.lookup(topic="t", key="k")] == [b"3"]
    rejected = await client.enqueue("t", b"4", key="k", delay=60, if_pending="reject")
    assert rejected.outcome == "rejected"


async def test_tasks_of_an_order_key_run_one_at_a_time(place: Place) -> None:
    async with place.client.subscribe("t", prefetch=10) as deliveries:
        tasks = [Task("t", b"%d" % n, order_key="ab"[n % 2]) for n in range(6)]
        await place.client.enqueue_many(tasks)
        got = []
        for _ in range(3):
            pair = [await nxt(deliveries), await nxt(deliveries)]
            assert {item.order_key for item in pair} == {"a", "b"}
            got += [task.body for task in pair]
            for delivery in pair:
                await delivery.ack()
    assert sorted(got, key=int) == [b"%d" % n for n in range(6)]
    assert [body for body in got if int(body) % 2 == 0] == [b"0", b"2", b"4"]


async def test_groups_get_the_tasks_that_match_their_filter(place: Place) -> None:
    client = place.client
    async with (
        client.subscribe("t", group="all") as everything,
        client.subscribe("t", group="eu", tags="eu") as some,
    ):
        await client.enqueue_many([Task("t", b"1", tag="eu"), Task("t", b"2", tag="us")])
        assert {(await nxt(everything)).body for _ in range(2)} == {b"1", b"2"}
        assert (await nxt(some)).body == b"1"
        with pytest.raises(Conflict):
            await client.subscribe("t", group="eu", tags="us").start()


async def test_tasks_of_a_transaction_exist_after_its_commit(place: Place) -> None:
    client = place.client
    async with client.transaction("orders") as transaction:
        await transaction.enqueue("t", b"in it", delay=60)
        assert [task async for task in client.list_tasks(topic="t")] == []
    (task,) = [task async for task in client.list_tasks(topic="t")]
    assert task.body == b"in it"
    with pytest.raises(ZeroDivisionError):
        async with client.transaction("orders") as transaction:
            await transaction.enqueue("t", b"never", delay=60)
            raise ZeroDivisionError
    assert len([task async for task in client.list_tasks(topic="t")]) == 1


async def test_a_schedule_makes_its_runs(place: Place) -> None:
    client = place.client
    made = await client.put_schedule("often", topic="t", body=b"x", every=1, runs_max=3)
    assert made.outcome == "created"
    async with client.subscribe("t") as deliveries:
        for _ in range(3):
            await place.wait(1)
            delivery = await nxt(deliveries)
            assert (delivery.schedule, delivery.body) == ("often", b"x")
            await delivery.ack()
    with pytest.raises(NotFound):
        await client.show_schedule("seldom")


async def test_bulk_verbs_act_on_all_matching_tasks(place: Place) -> None:
    client = place.client
    await client.enqueue_many([Task("t", b"", delay=60, properties={"n": n}) for n in range(10)])
    bulk = await client.cancel(topic="t", filter={"where": "n < 4"})
    bulk = await client.wait_bulk(bulk.id, timeout=20)
    assert (bulk.state, bulk.changed) == ("done", 4)
    assert len([task async for task in client.list_tasks(topic="t")]) == 6


async def test_stats_and_settings_are_returned(place: Place) -> None:
    client = place.client
    await client.create_group("t", "g")
    await client.enqueue_many([Task("t", b""), Task("t", b"", delay=60)])
    await place.wait(0.02)
    stats = await client.stats()
    assert (stats.scheduled, stats.ready) == (1, 1)
    await client.pause("t", "g")
    assert await client.pull("t", group="g", wait=0) == []
    await client.resume("t", "g")
    (delivery,) = await client.pull("t", group="g", wait=20)
    await delivery.ack()
    assert (await client.lookup(delivery.id)).state == "acked"


async def test_error_codes_are_the_same(place: Place) -> None:
    client = place.client
    texts = []
    for wrong in (
        client.enqueue("t", bytes(2_000_000)),
        client.enqueue("", b""),
        client.create_group("t", "g", where="n <"),
        client.delete_topic("none"),
        client.reschedule(1, delay=-1),
    ):
        with pytest.raises((BadRequest, BodyTooLarge, NotFound)) as caught:
            await wrong
        texts.append((caught.value.code, str(caught.value)))
    assert [code for code, _ in texts] == [
        "body_too_large", "bad_request", "bad_request", "not_found", "bad_request",
    ]  # fmt: skip
