"""The client against a real daemon: everything it can ask for, and what comes of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.daemon import Daemon
from support.waiting import WAIT_S, soon
from tickwheel import Client, Delivery, Task, errors
from tickwheel.client import Subscription

HOUR = 3600


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("client")
    with Daemon(folder, retry_base_s=0.05, retry_jitter=0, retry_max=2) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


async def take(subscription: Subscription, count: int = 1) -> list[Delivery]:
    return [await soon(anext(subscription)) for _ in range(count)]


# --- enqueue, deliver, ack -------------------------------------------------------------------


async def test_every_field_arrives(client: Client, topic: str) -> None:
    at = datetime.now(UTC) + timedelta(milliseconds=30)
    properties = {"s": "ä", "i": -5, "f": 1.5, "b": True}
    receipt = await client.enqueue(
        topic, b"\x00body\xff", at=at, key="k", tag="g", properties=properties, priority=7, ttl=60
    )
    assert at <= receipt.due <= at + timedelta(milliseconds=1)
    async with client.subscribe(topic, group="grp") as deliveries:
        [delivery] = await take(deliveries)
    assert (delivery.id, delivery.body, delivery.topic) == (receipt.id, b"\x00body\xff", topic)
    assert (delivery.key, delivery.tag, delivery.priority) == ("k", "g", 7)
    assert dict(delivery.properties) == properties
    assert (delivery.group, delivery.attempt) == ("grp", 1)
    assert delivery.due == receipt.due
    assert delivery.delivered_ms >= delivery.due_ms
    assert await delivery.ack() == "acked"
    assert await delivery.ack() == "acked", "an ack may be repeated"
    assert (await client.lookup(receipt.id)).state == "acked"


async def test_no_task_is_early(client: Client, topic: str) -> None:
    delays = [0.01 * i for i in range(30)]
    receipts = await client.enqueue_many(
        Task(topic, b"%d" % i, delay=d) for i, d in enumerate(delays)
    )
    async with client.subscribe(topic) as deliveries:
        result = await take(deliveries, 30)
        assert {d.id: d.due_ms for d in result} == {r.id: r.due_ms for r in receipts}
        assert all(d.delivered_ms >= d.due_ms for d in result)
        await asyncio.gather(*(d.ack() for d in result))
    stats = await client.stats()
    assert stats.raw["early"] == 0
    assert stats.topics[topic].acked == 30


async def test_fifty_thousand_tasks_pass_through_a_client(client: Client, topic: str) -> None:
    """Many frames, the window, acks by the hundred: each task comes once, and all come."""
    count = 50_000
    receipts = await soon(client.enqueue_many([Task(topic, b"x") for _ in range(count)]))
    assert len({receipt.id for receipt in receipts}) == count
    left = {receipt.id for receipt in receipts}
    acks = []
    async with client.subscribe(topic, prefetch=2000) as deliveries:
        while left:
            delivery = await soon(anext(deliveries))
            left.remove(delivery.id)
            acks.append(delivery.ack_nowait())
        assert set(await soon(asyncio.gather(*acks))) == {"acked"}
    counts = (await client.stats()).topics[topic]
    assert (counts.acked, counts.ready, counts.in_flight) == (count, 0, 0)


async def test_an_invalid_concurrent_enqueue_fails_alone(client: Client, topic: str) -> None:
    calls = [client.enqueue(topic, b"%d" % i, delay=HOUR) for i in range(100)]
    calls.insert(50, client.enqueue(topic, b"bad", delay=HOUR, priority=999))
    results = await soon(asyncio.gather(*calls, return_exceptions=True))
    assert isinstance(results.pop(50), errors.BadRequest)
    assert len({receipt.id for receipt in results}) == 100
    assert (await client.stats()).topics[topic].scheduled == 100


async def test_oneway_arrives_without_an_answer(client: Client, topic: str) -> None:
    async with client.subscribe(topic) as deliveries:
        await client.oneway(topic, b"x", key="k")
        [delivery] = await take(deliveries)
        assert (delivery.body, delivery.key) == (b"x", "k")
        await delivery.ack()


# --- ends of a delivery ----------------------------------------------------------------------


async def test_nack_again_and_again_ends_in_the_dead_letters(client: Client, topic: str) -> None:
    receipt = await client.enqueue(topic, b"x")
    async with client.subscribe(topic, group="g") as deliveries:
        words = []
        for attempt in (1, 2, 3):
            [delivery] = await take(deliveries)
            assert (delivery.id, delivery.attempt) == (receipt.id, attempt)
            assert delivery.failures == attempt - 1
            words.append(await delivery.nack(reason=f"reason {attempt}"))
        assert words == ["retrying", "retrying", "dead"]
        [letter] = [letter async for letter in client.dead_list(topic=topic)]
        assert (letter.id, letter.group, letter.attempt) == (receipt.id, "g", 3)
        assert [failure[2] for failure in letter.failures] == ["reason 1", "reason 2", "reason 3"]
        assert await client.dead_requeue([(receipt.id, "g")]) == ["requeued"]
        [delivery] = await take(deliveries)
        assert (delivery.attempt, delivery.failures) == (4, 0)
        assert await delivery.reject("never") == "dead"
    assert await client.dead_delete([(receipt.id, "g"), (5, "g")]) == ["deleted", "unknown"]
    assert (await client.lookup(receipt.id)).state == "deleted"


async def test_nack_with_a_delay_of_its_own(client: Client, topic: str) -> None:
    await client.enqueue(topic, b"x")
    async with client.subscribe(topic) as deliveries:
        [delivery] = await take(deliveries)
        assert await delivery.nack(delay=0.02) == "retrying"
        assert await delivery.nack() == "stale"
        [again] = await take(deliveries)
        assert again.attempt == 2
        assert await delivery.ack() == "acked", "an earlier receipt finishes it too"
        assert await again.ack() == "acked"


async def test_extend_and_release(client: Client, topic: str) -> None:
    await client.enqueue(topic, b"x")
    async with client.subscribe(topic, lease=10) as deliveries:
        [delivery] = await take(deliveries)
        assert await delivery.extend(30) == "extended"
        assert await delivery.release() == "released"
        [again] = await take(deliveries)
        assert (again.attempt, again.failures) == (2, 0), "a release is no failure"
        await again.ack()


async def test_a_lease_that_is_over_brings_it_back(client: Client, topic: str) -> None:
    await client.enqueue(topic, b"x")
    async with client.subscribe(topic, lease=0.1) as deliveries:
        first, second = await take(deliveries, 2)
        assert (first.attempt, second.attempt) == (1, 2)
        assert first.id == second.id
        assert await second.ack() == "acked"


async def test_leases_of_buffered_deliveries_are_extended(client: Client, topic: str) -> None:
    """A slow consumer: the last ones wait for more than a lease."""
    await client.enqueue_many([Task(topic, b"%d" % i) for i in range(40)])
    never = asyncio.get_running_loop().create_future()
    async with client.subscribe(topic, lease=2, prefetch=40) as deliveries:
        results = []
        for _ in range(40):
            [delivery] = await take(deliveries)
            results.append(delivery)
            assert await delivery.ack() == "acked"
            await asyncio.wait({never}, timeout=0.08)
        assert {delivery.attempt for delivery in results} == {1}
    assert (await client.stats()).topics[topic].groups["default"].delivered == 40


async def test_close_releases_without_a_failure(
    running: Daemon, client: Client, topic: str
) -> None:
    await client.enqueue_many([Task(topic, b"%d" % i) for i in range(10)])
    async with Client(running.url) as other:
        first = other.subscribe(topic, prefetch=10)
        [taken] = await take(first)
        await taken.ack()
    async with client.subscribe(topic) as deliveries:
        result = await take(deliveries, 9)
        assert {delivery.failures for delivery in result} == {0}
        await asyncio.gather(*(delivery.ack() for delivery in result))


def raises() -> None:
    raise LookupError("the program's own")


def exits() -> None:
    sys.exit(3)


def is_interrupted() -> None:
    raise KeyboardInterrupt


def is_cancelled() -> None:
    raise asyncio.CancelledError


def is_done() -> None:
    """Do nothing: the program leaves in order."""


@pytest.mark.parametrize("leaves", [raises, exits, is_interrupted, is_cancelled, is_done])
@pytest.mark.parametrize("is_pulled", [False, True])
async def test_an_ending_program_releases_its_deliveries(
    running: Daemon, client: Client, topic: str, leaves: Callable[[], None], is_pulled: bool
) -> None:
    """What it has settled stays so; the rest is ready at once, in order, without a failure."""
    ids = [receipt.id for receipt in await client.enqueue_many([Task(topic, b"x")] * 6)]
    with suppress(LookupError, SystemExit, KeyboardInterrupt, asyncio.CancelledError):
        prefetch = 0 if is_pulled else 6
        async with (
            Client(running.url) as other,
            other.subscribe(topic, prefetch=prefetch) as deliveries,
        ):
            if is_pulled:
                result = await other.pull(topic, max=6, wait=WAIT_S)
            else:
                result = await take(deliveries, 6)
            result[0].ack_unwatched()
            assert await result[2].nack(3600) == "retrying"
            leaves()
    async with client.subscribe(topic) as deliveries:
        again = await take(deliveries, 4)
        assert [delivery.id for delivery in again] == [ids[1], *ids[3:]]
        assert [(d.attempt, d.failures, d.deaths) for d in again] == [(2, 0, 0)] * 4
        await asyncio.gather(*(delivery.ack() for delivery in again))
    counts = (await client.stats()).topics[topic].groups["default"]
    assert (counts.acked, counts.in_flight) == (5, 0)


async def test_prefetch_limits_deliveries_in_flight(client: Client, topic: str) -> None:
    await client.enqueue_many([Task(topic, b"%d" % i) for i in range(20)])
    async with client.subscribe(topic, prefetch=3) as deliveries:
        result = await take(deliveries, 3)
        await client.ping()
        assert (await client.stats()).topics[topic].in_flight == 3
        for _ in range(17):
            await result.pop(0).ack()
            result += await take(deliveries)
        await asyncio.gather(*(delivery.ack() for delivery in result))


async def test_each_group_gets_each_task(client: Client, topic: str) -> None:
    async with (
        client.subscribe(topic, group="a") as first,
        client.subscribe(topic, group="b") as second,
    ):
        await client.enqueue(topic, b"x")
        for deliveries in (first, second):
            [delivery] = await take(deliveries)
            assert await delivery.ack() == "acked"


async def test_pull_returns_due_tasks(client: Client, topic: str) -> None:
    assert await client.pull(topic) == []
    waiting = asyncio.ensure_future(client.pull(topic, max=2, wait=WAIT_S))
    await client.ping()
    await client.enqueue_many([Task(topic, b"a"), Task(topic, b"b"), Task(topic, b"c")])
    result = await soon(waiting)
    assert 1 <= len(result) <= 2
    while len(result) < 3:
        result += await soon(client.pull(topic, wait=WAIT_S))
    assert sorted(d.body for d in result) == [b"a", b"b", b"c"]
    assert {await d.ack() for d in result} == {"acked"}


async def test_a_cancelled_pull_loses_no_task(client: Client, topic: str) -> None:
    pulling = asyncio.ensure_future(client.pull(topic, wait=WAIT_S))
    await client.ping()
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    await client.enqueue(topic, b"x")
    [delivery] = await soon(client.pull(topic, wait=WAIT_S))
    assert delivery.failures == 0
    await delivery.ack()


# --- by id, lists, counts --------------------------------------------------------------------


async def test_listings_are_paged(client: Client, topic: str) -> None:
    receipts = await client.enqueue_many([Task(topic, b"x", delay=HOUR) for _ in range(2500)])
    listed = [task.id async for task in client.list_tasks(topic=topic)]
    assert listed == [receipt.id for receipt in receipts]
    some = [task.id async for task in client.list_tasks(topic=topic, limit=1200)]
    assert some == listed[:1200]
    assert [t async for t in client.list_tasks(topic=topic, state="dead")] == []
    words = await client.cancel_many(listed)
    assert set(words) == {"cancelled"}


async def test_a_wrong_token_is_refused_at_once(make_daemon: Any) -> None:
    daemon = make_daemon(env={"TICKWHEEL_SERVE_TOKEN": "right"}).start()
    for token in (None, "wrong"):
        with pytest.raises(errors.Unauthorized):
            await soon(Client(daemon.url, token=token).connect())
    async with Client(daemon.url, token="right") as client:
        await client.ping()


async def test_three_hundred_starts_and_stops(running: Daemon) -> None:
    for _ in range(300):
        client = Client(running.url)
        await client.connect()
        await client.close()
    async with Client(running.url) as client:
        stats = await client.stats()
    assert stats.raw["sessions"] < 50, "sessions that said BYE, or were never used, are forgotten"
