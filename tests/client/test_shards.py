"""A client of several shards: where tasks go, what is merged, and what goes on without a shard."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.shards import NOW_MS, Shards, alone, key_in
from support.waiting import comes, soon
from tickwheel import Client, Delivery, Retry, Task, Worker, errors
from tickwheel.api.verbs import VERBS
from tickwheel.client import Check, Partly
from tickwheel.client.keywords import GroupKeywords
from tickwheel.client.subscription import IN_A_ROW, PREFETCH, OnMismatch, Subscription
from tickwheel.model import records
from tickwheel.model.values import SHARD_BITS, shard_of

COUNT = 3
AT_ONCE_S = 3.0
"""Less than a client with its defaults waits for a daemon that is away."""
HOUR = timedelta(hours=1)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
async def shards() -> AsyncIterator[Shards]:
    async with Shards(COUNT) as made:
        yield made


@pytest.fixture
async def client(shards: Shards) -> Client:
    return await shards.client().connect()


def shards_of(receipts: Any) -> list[int]:
    """The shards that tasks are in, by their ids."""
    return [receipt.id % (1 << SHARD_BITS) for receipt in receipts]


def impatient(shards: Shards, shard: int = 0) -> Client:
    """A client that gives up soon."""
    return shards.client(shard, send_timeout=1.0, connect_timeout=1.0, retries=0)


def test_client_and_daemon_use_the_same_shard_bits() -> None:
    assert SHARD_BITS == records.SHARD_BITS


def test_the_shard_of_a_key_follows_the_protocol() -> None:
    assert [shard_of(key, 3) for key in ("", "a", "order-17", "Straße")] == [0, 0, 2, 2]


def test_shard_modules_are_loaded_on_demand() -> None:
    code = "import sys, tickwheel.client.worker; print('tickwheel.client.shards' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"


# --- groups that are made by a consumer ----------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
async def test_creating_a_group_logs_its_backlog_once(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A subscription, a worker and a pull say that they make the group, how many tasks it takes
    over, and which other group holds tasks for nobody; who finds the group there says nothing."""
    caplog.set_level(logging.INFO, "tickwheel")
    async with Shards(count) as shards:
        client = shards.client()
        for shard in range(count):
            await client.enqueue("t", b"", key=key_in(shard, count))
        shards.pass_time(1_000)
        await shards.settle()
        async with client.subscribe("t", group="look", prefetch=0) as first:
            assert first.new_group is not None
            assert (first.new_group.adopted, first.new_group.idle) == (count, {})
        worker = Worker(client, signals=False)

        @worker.on("t", group="shop")
        async def handle(delivery: Delivery) -> None:
            """Never called: the other group has the tasks."""

        running = asyncio.ensure_future(worker.run())
        await soon(worker.started.wait())
        [said] = [it for it in caplog.records if "creates the group shop" in it.getMessage()]
        assert said.levelno == logging.WARNING
        assert f"the group look of this topic holds {count} task" in said.getMessage()
        assert "`tickwheel groups reset t shop --to first --wait`" in said.getMessage()
        async with client.subscribe("t", group="shop") as again:
            assert again.new_group is None
        async with client.subscribe("fresh") as plain:
            assert plain.new_group is not None and not plain.new_group.is_odd
        async with client.subscribe("t", broadcast=True) as beside:
            assert beside.new_group is None
        assert await client.pull("pulled", group="g") == []
        assert await client.pull("pulled", group="g") == []
        [logged] = [it for it in caplog.records if "creates the group g" in it.getMessage()]
        assert logged.levelno == logging.INFO
        worker.stop()
        await soon(running)


# --- producing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("connects", [True, False])
async def test_tasks_go_to_the_shard_of_their_key(shards: Shards, *, connects: bool) -> None:
    client = shards.client(1)
    if connects:
        await client.connect()
    keys = [f"k{n}" for n in range(12)]
    single = [client.enqueue_nowait("t", b"", key=key, delay=HOUR) for key in keys]
    ordered = [client.enqueue("t", b"", key="x", order_key=key, delay=HOUR) for key in keys]
    many = client.enqueue_many([Task("t", b"", key=key, delay=HOUR) for key in keys])
    ruled = client.enqueue_many(
        [Task("u", b"", key=key, delay=HOUR, if_pending="keep") for key in keys]
    )
    timed = client.enqueue("t", b"", key=keys[0], delay=HOUR, timeout=9)
    columns = client.enqueue_columns("t", [b"a", b"b"], delay=HOUR)
    ends = await soon(asyncio.gather(*single, *ordered, many, ruled, timed, columns))
    wanted = [shard_of(key, COUNT) for key in keys]
    assert set(wanted) == set(range(COUNT))
    assert shards_of(ends[:12]) == shards_of(ends[12:24]) == wanted
    assert shards_of(ends[24]) == shards_of(ends[25]) == wanted
    assert shards_of([ends[26]]) == wanted[:1]
    assert len(set(shards_of(ends[27]))) == 1
    stored = [task.key async for task in client.list_tasks(topic="t")]
    assert len(stored) == 12 * 3 + 1 + 2


async def test_tasks_without_a_key_rotate_over_shards_by_frame(client: Client) -> None:
    await client.stats()  # all are connected
    results = []
    for _ in range(2 * COUNT):
        frame = [client.enqueue_nowait("t", b"") for _ in range(5)]
        results.append(set(shards_of(await soon(asyncio.gather(*frame)))))
    assert all(len(frame) == 1 for frame in results)
    assert [sorted(frame) for frame in results[:COUNT]] == [[1], [2], [0]]
    assert results[:COUNT] == results[COUNT:]


async def test_oneway_goes_to_the_shard_of_its_key(shards: Shards) -> None:
    client = shards.client()
    keys = [key_in(shard, COUNT) for shard in range(COUNT)]
    for key in keys:
        await soon(client.oneway("t", b"", key=key, delay=HOUR))
    await comes(lambda: _has(client, COUNT))
    assert shards_of([task async for task in client.list_tasks()]) == [0, 1, 2]


async def _has(client: Client, count: int) -> bool:
    try:
        return (await client.stats()).scheduled == count
    except errors.TickwheelError:
        return False


async def test_shard_by_overrides_the_shard_of_the_keys(client: Client) -> None:
    names, keys = ([key_in(n, COUNT, name) for n in range(COUNT)] for name in "bk")
    tasks = [
        Task("t", b"", key=key, shard_by=name, delay=HOUR)
        for name in names
        for key in keys
    ]  # fmt: skip
    receipts = await client.enqueue_many(tasks)
    assert shards_of(receipts) == [shard for shard in range(COUNT) for _ in keys]
    for key in keys:
        result = await client.lookup(topic="t", key=key)
        assert sorted(shards_of(result)) == list(range(COUNT))
        assert {task.shard_by for task in result} == set(names)
    with pytest.raises(errors.BadRequest, match="different values for shard_by and order_key"):
        await client.enqueue("t", b"", order_key="a", shard_by="b")
    same = await client.enqueue("t", b"", order_key=names[1], shard_by=names[1], delay=HOUR)
    assert shards_of([same]) == [1]


async def test_several_keys_of_a_task_must_share_a_shard(client: Client) -> None:
    name, keys = key_in(2, COUNT, "b"), [key_in(n, COUNT) for n in range(COUNT)]
    transaction = client.transaction("p")
    for key in keys:
        await transaction.enqueue("t", b"", key=key, shard_by=name, delay=HOUR)
    assert shards_of(await transaction.commit()) == [2] * COUNT
    await client.put_schedule("s", topic="t", body=b"", every=HOUR, key=keys[0], shard_by=name)
    assert await client.run_schedule("s") % (1 << SHARD_BITS) == 2


async def test_a_coalescing_rule_needs_the_shard_of_its_key(client: Client) -> None:
    with pytest.raises(errors.BadRequest, match="if_pending"):
        await client.enqueue("t", b"", key="a", order_key="b", if_pending="keep")
    with pytest.raises(errors.BadRequest, match="shard_by decides"):
        await client.enqueue("t", b"", key="a", shard_by="b", if_pending="keep")
    first = await client.enqueue("t", b"", key="a", if_pending="keep", delay=HOUR)
    again = await client.enqueue("t", b"", key="a", if_pending="keep", delay=HOUR)
    assert (again.id, again.outcome) == (first.id, "kept")


async def test_ids_made_before_resharding_are_asked_of_all_shards() -> None:
    moved_id = records.id_floor(NOW_MS + 500, 0)
    async with Shards(COUNT, moved_id=moved_id) as shards:
        client = impatient(shards)
        some = [Task("t", b"", key=key_in(shard, COUNT), delay=HOUR) for shard in (0, 1, 2)]
        old = [item.id for item in await client.enqueue_many(some)]
        shards.pass_time(1_000)
        new = [item.id for item in await client.enqueue_many(some)]
        assert max(old) <= moved_id < min(new)
        assert [task.state for task in await client.lookup_many(old)] == ["scheduled"] * COUNT
        assert await client.cancel(old[1]) == "cancelled"
        # What the shard says that knows counts; the others say that the task is gone.
        assert [task.state for task in await client.lookup_many([old[1], old[0], new[1]])] == [
            "cancelled", "scheduled", "scheduled",
        ]  # fmt: skip
        shards.lose(1)
        assert (await soon(client.lookup(new[2]))).state == "scheduled"
        with pytest.raises(errors.Unreachable):
            await soon(client.lookup(old[2]))


async def test_an_unavailable_shard_does_not_stop_the_others(shards: Shards) -> None:
    client = impatient(shards)
    await client.stats()
    shards.lose(1)
    tasks = [Task("t", b"", key=key_in(shard, COUNT), delay=HOUR) for shard in (0, 1, 2, 1)]
    with pytest.raises(Partly) as partly:
        await soon(client.enqueue_many(tasks))
    ends = partly.value.receipts
    assert [isinstance(end, errors.Unreachable) for end in ends] == [False, True, False, True]
    with pytest.raises(errors.Unreachable):
        await soon(client.enqueue("t", b"", key=key_in(1, COUNT)))
    for _ in range(COUNT):  # a task without a key is not held up
        [shard] = shards_of([await soon(client.enqueue("t", b"", delay=HOUR))])
        assert shard != 1
    with pytest.raises((errors.Unreachable, errors.ConnectionLost)):
        await soon(client.stats())
    shards.away.clear()
    await comes(lambda: _has(client, 2 + COUNT))


async def test_the_clients_own_shard_reconnects_at_its_address(shards: Shards) -> None:
    client = Client(",".join(shards.urls), send_timeout=1.0, retries=0)
    client._options.open_to = shards._open_to
    async with client:
        await client.stats()
        shards.lose(0)
        with pytest.raises(errors.Unreachable):
            await soon(client.enqueue("t", b"", key=key_in(0, COUNT)))
        there = await soon(client.enqueue("t", b"", key=key_in(2, COUNT), delay=HOUR))
        assert shards_of([there]) == [2]
        assert (await soon(client.lookup(there.id))).state == "scheduled"
        shards.away.clear()
        await comes(lambda: client.connected)
        assert client.server_info["shard"] == 0


async def test_a_different_shard_at_a_known_address_is_refused() -> None:
    async with Shards(2) as shards:
        client = impatient(shards)
        await client.connect()
        shards.insides[0].daemon, other = shards.insides[1].daemon, shards.insides[0].daemon
        for end in shards.insides[0].ends:
            end.abort()
        with pytest.raises(errors.Unreachable, match="it does not have shard 0"):
            await soon(client.ping(timeout=1.0))
        shards.insides[0].daemon = other


# --- what is made in one shard -------------------------------------------------------------------


async def test_a_transaction_holds_tasks_of_one_shard(client: Client) -> None:
    keys = [key_in(shard, COUNT) for shard in range(COUNT)]
    transaction = client.transaction("p")
    await transaction.enqueue("t", b"", key=keys[1], delay=HOUR)
    await transaction.enqueue("t", b"", delay=HOUR)
    with pytest.raises(errors.BadRequest, match="are in several"):
        await transaction.enqueue("t", b"", key=keys[2])
    assert shards_of(await transaction.commit()) == [1, 1]
    other = client.transaction("p")
    with pytest.raises(errors.BadRequest, match="are in several"):
        await other.enqueue_many([Task("t", b"", key=key) for key in keys])


async def test_a_checkback_subscriber_serves_all_shards() -> None:
    async with Shards(COUNT, transaction_check_s=1) as shards:
        maker = await shards.client().connect()
        for n in range(COUNT):
            transaction = maker.transaction("p", id=f"x{n}")
            await transaction.enqueue("t", b"", key=key_in(n, COUNT), delay=HOUR)
        await maker.close()
        client, asked = await shards.client(2).connect(), set()

        @client.on_check("p")
        def decide(check: Check) -> str:
            asked.add(check.transaction)
            return "commit"

        async def all_asked() -> bool:
            shards.pass_time(5_000)
            return asked == {"x0", "x1", "x2"}

        await comes(all_asked)
        await comes(lambda: _has(client, COUNT))


async def test_a_schedule_stays_in_one_shard(client: Client) -> None:
    await client.put_schedule("s", topic="t", every=HOUR, key=key_in(0, COUNT))
    with pytest.raises(errors.Conflict, match="delete it first"):
        await client.put_schedule("s", topic="t", every=HOUR, key=key_in(1, COUNT))
    await client.delete_schedule("s")
    made = await client.put_schedule("s", topic="t", every=HOUR, key=key_in(1, COUNT))
    assert made.outcome == "created"
    assert shards_of([await client.lookup(await client.run_schedule("s"))]) == [1]


@pytest.mark.parametrize("away", range(COUNT))
async def test_a_schedule_needs_only_its_home_and_the_shard_of_its_tasks(
    shards: Shards, away: int
) -> None:
    home, of_tasks = (shard for shard in range(COUNT) if shard != away)
    client, name = impatient(shards, home), key_in(home, COUNT, "s")
    shards.away.add(away)
    for outcome in ("created", "unchanged"):
        put = client.put_schedule(name, topic="t", every=HOUR, key=key_in(of_tasks, COUNT))
        assert (await soon(put)).outcome == outcome
    with pytest.raises(errors.Conflict, match="delete it first"):
        await soon(client.put_schedule(name, topic="t", every=HOUR, key=key_in(home, COUNT)))
    await soon(client.delete_schedule(name))
    shards.away.clear()


# --- consuming -----------------------------------------------------------------------------------


async def test_order_keys_stay_in_order(shards: Shards, client: Client) -> None:
    await client.create_group("t", "g")
    rounds, keys = 6, [f"o{n}" for n in range(7)]
    for n in range(rounds):
        await client.enqueue_many([Task("t", b"%d" % n, order_key=key, delay=1) for key in keys])
    seen: dict[str, list[int]] = {key: [] for key in keys}
    async with client.subscribe("t", group="g") as deliveries:
        shards.pass_time(5_000)
        for _ in range(rounds * len(keys)):
            delivery = await soon(anext(deliveries))
            seen[delivery.order_key or ""].append(int(delivery.body))
            await delivery.ack()
    assert all(numbers == list(range(rounds)) for numbers in seen.values())


async def test_the_prefetch_is_divided_and_shards_take_turns(client: Client) -> None:

    async def prefetches() -> list[int]:
        return [consumer.prefetch async for consumer in client.list_consumers()]

    async with client.subscribe("t", prefetch=8) as deliveries:
        assert sorted(await prefetches()) == [2, 3, 3]
        await deliveries.set_prefetch(0)
        assert await prefetches() == [0, 0, 0]
        await deliveries.set_prefetch(1)
        assert await prefetches() == [1, 1, 1]
        keys = [key_in(shard, COUNT) for shard in range(COUNT)] * IN_A_ROW * 2
        await deliveries.set_prefetch(len(keys))
        await client.enqueue_many([Task("t", b"", key=key) for key in keys])
        await comes(lambda: len(deliveries._buffer) == len(keys))
        results = [await soon(anext(deliveries)) for _ in keys]
        turns = [(shard, len(list(some))) for shard, some in groupby(shards_of(results))]
        assert sorted(turns) == sorted([(shard, IN_A_ROW) for shard in range(COUNT)] * 2)
    assert await prefetches() == []
    async with client.subscribe("t"):
        assert await prefetches() == [PREFETCH] * COUNT


async def _is_in_flight(client: Client, count: int) -> bool:
    return (await client.stats()).in_flight == count


async def test_undelivered_tasks_are_released_to_their_shard(client: Client) -> None:
    async with client.subscribe("t") as deliveries:
        await client.enqueue_many([Task("t", b"", key=f"k{n}") for n in range(9)])
        await comes(lambda: _is_in_flight(client, 9))
        await (await soon(anext(deliveries))).ack()
    states = [task.groups["default"] async for task in client.list_tasks()]
    assert [(state.state, len(state.failures)) for state in states] == [("ready", 0)] * 8


async def test_a_subscription_survives_and_rejoins_an_unavailable_shard(shards: Shards) -> None:
    shards.away.add(2)
    client = impatient(shards)
    await client.connect()
    subscription = client.subscribe("t", group="g")
    await soon(subscription.start())
    await client.enqueue("t", b"there", key=key_in(0, COUNT))
    assert (await soon(anext(subscription))).body == b"there"
    shards.away.clear()
    await comes(lambda: _is_whole(client))
    await client.enqueue("t", b"back", key=key_in(2, COUNT))
    delivery = await soon(anext(subscription))
    assert (delivery.body, await delivery.ack()) == (b"back", "acked")
    shards.lose(1)
    await client.enqueue("t", b"more", key=key_in(0, COUNT))
    assert (await soon(anext(subscription))).body == b"more"
    shards.away.clear()
    await comes(lambda: _is_whole(client))
    await client.enqueue("t", b"again", key=key_in(1, COUNT))
    assert (await soon(anext(subscription))).body == b"again"
    await subscription.close()


async def _is_whole(client: Client) -> bool:
    try:
        return len([consumer async for consumer in client.list_consumers()]) == COUNT
    except errors.TickwheelError:
        return False


async def test_a_subscription_closed_during_its_start_stays_closed(
    shards: Shards, client: Client
) -> None:
    await client.stats()
    for shard in range(COUNT):
        shards.lose(shard)
    await comes(lambda: not any(link(client, shard).connected for shard in range(COUNT)))
    subscription = client.subscribe("t", prefetch=COUNT)
    starting = asyncio.ensure_future(subscription.start())
    await shards.settle()
    await subscription.close()
    await soon(starting)
    shards.away.clear()
    assert [consumer async for consumer in client.list_consumers()] == []


async def test_an_error_of_any_shard_ends_a_subscription(client: Client) -> None:
    await client.create_group("t", "g", tags="a")
    with pytest.raises(errors.Conflict):
        await soon(client.subscribe("t", group="g", tags="b").start())
    subscription = client.subscribe("t", group="g")
    await soon(subscription.start())
    waiting = asyncio.ensure_future(anext(subscription))
    await client.delete_group("t", "g", force=True)
    with pytest.raises(errors.NotFound):
        await soon(waiting)


async def test_a_shard_lost_before_its_share_is_joined_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went away between the two."""
    start, unheard = Subscription.start, list[Subscription]()

    async def start_and_change(part: Subscription) -> Subscription:
        result = await start(part)
        if part is not front:
            front._parts._shares = [5] * COUNT
        return result

    async def gone(part: Subscription, prefetch: int) -> None:
        unheard.append(part)
        raise errors.Unreachable("it has gone just now")

    async with Shards(COUNT) as shards:
        client = await shards.client().connect()
        await client.create_group("t", "g")
        front = client.subscribe("t", group="g", prefetch=COUNT)
        monkeypatch.setattr(Subscription, "start", start_and_change)
        monkeypatch.setattr(Subscription, "set_prefetch", gone)
        await soon(start(front))
        await comes(lambda: not front._parts._joining)
        assert unheard and len(front._parts._parts) == COUNT
        await front.close()


async def test_deliveries_after_a_pull_ended_are_released(client: Client) -> None:
    await client.create_group("t", "g")
    pulling = asyncio.ensure_future(client.pull("t", group="g", max=1, wait=30))
    await comes(lambda: _waits(client))
    receipts = await client.enqueue_many(
        [Task("t", b"", key=key_in(shard, COUNT)) for shard in range(COUNT)]
    )
    [first] = await soon(pulling)
    others = {receipt.id for receipt in receipts} - {first.id}
    results: set[int] = set()
    while results != others:
        results |= {task.id for task in await soon(client.pull("t", group="g", wait=20))}


@pytest.mark.parametrize("count", [1, COUNT])
async def test_a_key_that_is_not_utf8_is_a_bad_request(count: int) -> None:
    async with Shards(count) as shards:
        client = await shards.client().connect()
        for named in ({"key": "\ud800"}, {"order_key": "\ud800"}):
            with pytest.raises(errors.BadRequest, match="utf-8"):
                await soon(client.put_schedule("s", topic="t", body=b"", every=HOUR, **named))


async def test_a_targets_status_is_that_of_its_worst_shard(shards: Shards, client: Client) -> None:
    await client.set_push("t", "g", "https://example.com/", secrets=[SECRET])
    (made,) = await client.targets()
    assert (made.state, made.ended_ms) == ("stopped", None)
    inside = shards.insides[1].daemon
    assert inside is not None
    inside.listener._active.operations.targeting.end("t", "g", "answered 410", made.since_ms)
    (found,) = await client.targets()
    assert (found.state, found.reason) == ("ended", "answered 410")
    assert found.ended_ms is not None


@pytest.mark.parametrize("wait", [0, 20])
async def test_a_pull_with_tasks_does_not_wait_for_a_lost_shard(
    wait: float, shards: Shards, client: Client
) -> None:
    await client.create_group("t", "g")
    shards.lose(1)
    await comes(lambda: not link(client, 1).connected)
    for _ in range(COUNT):  # whichever shard it begins with
        await client.enqueue("t", b"", key=key_in(0, COUNT))
        async with asyncio.timeout(AT_ONCE_S):
            deliveries = await client.pull("t", group="g", max=9, wait=wait)
        assert [delivery.key for delivery in deliveries] == [key_in(0, COUNT)]
        await deliveries[0].ack()


async def test_a_pull_without_a_shard_ends_at_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.client.subscription.JOIN_S", 0.05)
    async with Shards(COUNT) as shards:
        client = await shards.client().connect()
        await client.create_group("t", "g")
        shards.lose(1)
        await comes(lambda: not link(client, 1).connected)
        async with asyncio.timeout(AT_ONCE_S):
            assert await client.pull("t", group="g", wait=0.05) == []


async def test_a_cancelled_pull_of_shards_releases_its_deliveries(
    monkeypatch: pytest.MonkeyPatch, shards: Shards
) -> None:
    client, other = await shards.client().connect(), await shards.client().connect()
    await client.create_group("t", "g")
    receipt = await client.enqueue("t", b"", key=key_in(0, COUNT))
    hangs = asyncio.Event()

    async def hang(*_: Any) -> list[Delivery]:
        hangs.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(link(client, 1), "pull", hang)
    assert client._shards is not None
    client._shards._next = COUNT - 1  # it begins with the first shard
    pulling = asyncio.ensure_future(client.pull("t", group="g", max=9))
    await soon(hangs.wait())
    pulling.cancel()
    await asyncio.wait([pulling])
    [again] = await soon(other.pull("t", group="g", wait=20))
    assert again.id == receipt.id


async def test_a_pull_cancelled_while_it_releases_surplus_releases_all(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    releases: asyncio.Queue[int] = asyncio.Queue()

    async def release(shard: int) -> None:
        releases.put_nowait(shard)
        await asyncio.Event().wait()

    async def pull(shard: int, names: Any, count: int, wait_ms: int, *_: Any) -> list[Any]:
        return [SimpleNamespace(release=partial(release, shard))] if wait_ms else []

    for shard in range(COUNT):
        monkeypatch.setattr(link(client, shard), "pull", partial(pull, shard))
    pulling = asyncio.ensure_future(client.pull("t", max=1, wait=30))
    for _ in range(COUNT - 1):
        await soon(releases.get())
    pulling.cancel()
    await asyncio.wait([pulling])
    assert {await soon(releases.get()) for _ in range(COUNT)} == {*range(COUNT)}


def link(client: Client, shard: int) -> Any:
    """That of a client to one shard."""
    assert client._shards is not None
    return client._shards.links[shard]


async def _waits(client: Client) -> bool:
    return [consumer async for consumer in client.list_consumers()] != []


async def test_a_worker_works_on_all_shards(shards: Shards, client: Client) -> None:
    worker, done = Worker(client, signals=False), []

    @worker.on("t", group="g", concurrency=2)
    async def handle(delivery: Delivery) -> None:
        done.append(delivery.key)
        if delivery.key == "k3" and delivery.attempt == 1:
            raise ValueError("once more")

    running = asyncio.ensure_future(worker.run())
    await worker.started.wait()
    keys = [f"k{n}" for n in range(30)]
    await client.enqueue_many([Task("t", b"", key=key) for key in keys])

    async def all_done() -> bool:
        shards.pass_time(1_000)
        return (await client.stats()).acked == 30

    await comes(all_done)
    worker.stop()
    await soon(running)
    assert sorted(done, key=str) == sorted([*keys, "k3"])


# --- keys that wait in several shards ------------------------------------------------------------


async def test_the_first_keys_of_all_shards_have_the_counts_of_all(
    shards: Shards, client: Client
) -> None:
    await client.create_group("t", "g", fair_by="tag", limit_each=1)
    keys = [key_in(shard, COUNT) for shard in range(COUNT)]
    tasks = [Task("t", b"", key=key, tag="x") for key in keys * 5]
    await client.enqueue_many([*tasks, *[Task("t", b"", key=keys[0], tag="y")] * 7])
    shards.pass_time(1)
    # In each shard, one task of each value is not waiting for its turn.
    await comes(lambda: _is_lined_up(client, 3 * 4 + 6))
    [line] = await client.key_lines("t", "g", limit=1)
    assert (line.value, line.waiting) == ("x", 12)
    for shard, value in ((0, "x"), (1, "y"), (2, "y"), (0, "y"), (1, "x"), (2, "x")):
        await alone(client, shard).pause_key("t", "g", value=value)
        shards.sources.now_ms += 1
    [paused] = await client.paused_keys("t", "g", limit=1)
    assert (paused.value, paused.waiting) == ("x", 15)


async def _is_lined_up(client: Client, count: int) -> bool:
    group = (await client.stats()).raw["topics"]["t"]["groups"]["g"]
    return bool(group["in_lines"] == count)


# --- settings, which have a home -----------------------------------------------------------------

HOME = 1
TOPIC = key_in(HOME, COUNT, "t")


def having(shards: Shards, group: str) -> list[int]:
    """The shards that have the group, and are not deleting it."""
    rows = ((n, shards.shard(n).core.find_group(TOPIC, group)) for n in range(COUNT))
    return [n for n, one in rows if one is not None and not one.is_closed]


async def test_creating_and_configuring_needs_only_the_home_shard(
    caplog: pytest.LogCaptureFixture, shards: Shards, client: Client
) -> None:
    await client.create_group(TOPIC, "first")
    shards.lose(2)
    with caplog.at_level("INFO"):
        made = await soon(client.create_group(TOPIC, "g", rate=3))
    assert (made.created, made.rate) == (True, 3)
    assert having(shards, "g") == [0, 1]
    assert f"create_group of topic {TOPIC}: shards 2 cannot be reached" in caplog.text
    assert (await soon(client.configure(TOPIC, group="g", rate=4))).rate == 4
    assert (await soon(client.configure(TOPIC, rate=5))).rate == 5


async def test_no_shard_is_changed_without_the_home_shard(
    caplog: pytest.LogCaptureFixture, shards: Shards, client: Client
) -> None:
    await client.create_group(TOPIC, "g")
    shards.lose(HOME)
    with pytest.raises((errors.Unreachable, errors.SendTimeout)):
        await soon(client.create_group(TOPIC, "h", timeout=0.2))
    with pytest.raises((errors.Unreachable, errors.SendTimeout)):
        await soon(client.configure(TOPIC, group="g", rate=4, timeout=0.2))
    assert having(shards, "h") == []
    assert {shards.shard(n).core.topics[TOPIC].groups["g"].settings.rate for n in (0, 2)} == {None}


async def test_an_error_of_the_home_shard_changes_no_shard(shards: Shards, client: Client) -> None:
    with pytest.raises(errors.NotFound):
        await client.configure(TOPIC, group="g", rate=4)
    await client.create_group(TOPIC, "g")
    core = shards.shard(2).core
    core.config = replace(core.config, groups_max=0)
    with pytest.raises(errors.LimitExceeded, match="groups_max"):
        await client.create_group(TOPIC, "h")
    assert having(shards, "h") == [0, 1]


async def test_configuring_a_group_skips_shards_that_lack_it(
    shards: Shards, client: Client
) -> None:
    """It follows the home."""
    await client.create_group(TOPIC, "g")
    shards.shard(2).upkeep.end_group(shards.shard(2).core.topics[TOPIC].groups["g"])
    assert (await client.configure(TOPIC, group="g", rate=4)).rate == 4


async def test_a_deletion_needs_all_shards(shards: Shards, client: Client) -> None:
    await client.create_group(TOPIC, "g")
    shards.lose(2)
    for deletion in (client.delete_group(TOPIC, "g", timeout=0.2),
                     client.delete_topic(TOPIC, timeout=0.2)):  # fmt: skip
        with pytest.raises((errors.Unreachable, errors.SendTimeout)):
            await soon(deletion)
        assert having(shards, "g") == [0, 1, 2]
    shards.away.clear()
    await client.delete_group(TOPIC, "g")
    assert having(shards, "g") == []


async def test_a_group_is_deleted_at_its_home_shard_last(
    shards: Shards, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.create_group(TOPIC, "g")
    known: Any = client._shards
    ask = known._ask

    async def go_after_the_check(at: Any, verb: Any, fields: Any, until_s: Any) -> Any:
        if at is link(client, 2) and not fields[-1].get("dry_run"):
            raise errors.Unreachable("it has gone just now")
        return await ask(at, verb, fields, until_s)

    monkeypatch.setattr(known, "_ask", go_after_the_check)
    with pytest.raises(errors.Unreachable):
        await client.delete_group(TOPIC, "g")
    assert having(shards, "g") == [1, 2]


@pytest.mark.parametrize("shard", range(COUNT))
async def test_a_schedule_in_any_shard_keeps_its_topic_in_all(client: Client, shard: int) -> None:
    await client.create_group(TOPIC, "g")
    keys = [key_in(n, COUNT) for n in range(COUNT)]
    await client.enqueue_many([Task(TOPIC, b"", key=key, delay=HOUR) for key in keys])
    await client.put_schedule(key_in(shard, COUNT, "s"), topic=TOPIC, every=HOUR)
    before = (await client.stats()).raw["topics"]
    with pytest.raises(errors.Conflict, match="schedules enqueue to topic"):
        await client.delete_topic(TOPIC, force=True)
    assert (await client.stats()).raw["topics"] == before


async def test_a_refused_deletion_of_a_group_keeps_its_paused_keys(
    shards: Shards, client: Client
) -> None:
    await client.create_group(TOPIC, "g")
    await client.pause_key(TOPIC, "g", key="x")
    await client.enqueue(TOPIC, b"", key=key_in(2, COUNT))
    shards.pass_time(1)
    await shards.settle()
    with pytest.raises(errors.Conflict, match="1 ready"):
        await client.delete_group(TOPIC, "g")
    paused = [await alone(client, n).paused_keys(TOPIC, "g") for n in range(COUNT)]
    assert [[key.value for key in keys] for keys in paused] == [["x"]] * COUNT


# --- bulk operations, which all shards start -----------------------------------------------------


async def filled(shards: Shards, **options: Any) -> Client:
    """A client, and a task of topic t in each shard, due in an hour."""
    client = await shards.client(**options).connect()
    keys = [key_in(shard, COUNT) for shard in range(COUNT)]
    await client.enqueue_many([Task("t", b"", key=key, delay=HOUR) for key in keys])
    return client


async def delays_s(client: Client) -> set[float]:
    return {(task.due_ms - NOW_MS) / 1_000 async for task in client.list_tasks(topic="t")}


def allow_bulk_operations(shards: Shards, shard: int, count: int) -> None:
    core = shards.shard(shard).core
    core.config = replace(core.config, bulk_max=count)


async def test_no_shard_starts_a_bulk_operation_while_one_is_away(shards: Shards) -> None:
    client = await filled(shards)
    shards.lose(2)
    with pytest.raises((errors.Unreachable, errors.SendTimeout)):
        await soon(client.reschedule(topic="t", filter={}, shift=HOUR, timeout=0.2))
    shards.away.clear()
    assert [bulk async for bulk in client.list_bulk()] == []
    bulk = await soon(client.reschedule(topic="t", filter={}, shift=HOUR))
    assert (await client.wait_bulk(bulk.id)).changed == COUNT
    assert await delays_s(client) == {7_200}


async def test_a_bulk_operation_that_one_shard_refuses_is_cancelled(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await filled(shards, retries=0)
    allow_bulk_operations(shards, 2, 0)
    with pytest.raises(errors.Overloaded, match=r"shard 2: .*bulk_max.*cancelled in shards 0, 1,"):
        await client.reschedule(topic="t", filter={"tags": "none"}, shift=HOUR)
    known: Any = client._shards
    ask = known._ask

    async def wait_for_the_others(at: Any, verb: Any, *more: Any) -> Any:
        if verb.name == "make_bulk" and at is link(client, 2):
            await comes(lambda: not any(shards.shard(n).core.bulk_running for n in (0, 1)))
        return await ask(at, verb, *more)

    monkeypatch.setattr(known, "_ask", wait_for_the_others)
    with pytest.raises(errors.OutcomeUnknown, match="in shards 0, 1, .* changed 2 tasks"):
        await client.reschedule(topic="t", filter={}, shift=HOUR)
    assert await delays_s(client) == {3_600, 7_200}


async def test_a_bulk_operation_with_a_chosen_id_is_completed_by_a_repetition(
    shards: Shards,
) -> None:
    client = await filled(shards, retries=0)
    allow_bulk_operations(shards, 2, 0)
    with pytest.raises(errors.OutcomeUnknown, match="mine has started in shards 0, 1: repeat"):
        await client.reschedule(topic="t", filter={}, shift=HOUR, id="mine")
    allow_bulk_operations(shards, 2, 1)
    await client.reschedule(topic="t", filter={}, shift=HOUR, id="mine")
    assert (await client.wait_bulk("mine")).changed == COUNT
    assert await delays_s(client) == {7_200}
    await alone(client, 2).cancel(topic="t", filter={"tags": "none"}, id="its-own")
    with pytest.raises(errors.Conflict, match="cancelled in shards 0, 1,"):
        await client.run_now(topic="t", filter={"tags": "none"}, id="its-own")


async def test_a_reset_that_one_shard_refuses_can_be_repeated(shards: Shards) -> None:
    client = await shards.client(retries=0).connect()
    await client.create_group("t", "g")
    allow_bulk_operations(shards, 2, 0)
    with pytest.raises(errors.Overloaded):
        await client.reset_group("t", "g", to="first", rate=0.001)
    allow_bulk_operations(shards, 2, 1)
    bulk = await client.reset_group("t", "g", to="first")
    assert (await client.wait_bulk(bulk.id)).state == "done"


async def test_a_listed_bulk_operation_has_its_state_in_all_shards(shards: Shards) -> None:
    client, key = await filled(shards), key_in(0, COUNT)
    await client.enqueue("t", b"", key=key, delay=HOUR)
    await client.cancel(topic="t", filter={"key_prefix": key}, rate=1, id="slow")
    rows = shards.shard(0).engine.bulks.rows
    await comes(lambda: rows["slow"].changed and not shards.shard(1).core.bulk_running)
    shards.sources.now_ms += 1
    await client.cancel(topic="t", filter={"tags": "none"}, id="newer")
    await client.wait_bulk("newer")
    assert [bulk.id async for bulk in client.list_bulk(state="done")] == ["newer"]
    [running] = [bulk async for bulk in client.list_bulk(state="running")]
    assert running.raw == (await client.show_bulk("slow")).raw and running.changed == 1
    odd: Any = "odd"
    with pytest.raises(errors.BadRequest, match="state must be one of running"):
        await anext(aiter(client.list_bulk(state=odd)))
    known: Any = client._shards
    for query, ids in (
        ({"state": "running", "after": "newer"}, ["slow"]),
        ({"state": "done", "limit": 1}, ["newer"]),
        ({"state": "done", "after": "slow"}, []),
    ):
        page = await known.page(VERBS["list_bulk"], query, None)
        assert ([bulk["id"] for bulk in page["bulk"]], page["next"]) == (ids, None)


# --- a worker whose group is set otherwise -------------------------------------------------------

OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tags": ({"tags": "eu", "where": "n > 1"}, {"tags": "us"}),
    "where": ({"where": "n > 1"}, {"where": "n > 2"}),
    "order_retry": ({"order_retry": 1.0}, {"order_retry": 2.0}),
    "order_attempts": ({"order_attempts": 3}, {"order_attempts": 4}),
    "order_failure": ({"order_failure": "hold"}, {"order_failure": "dead"}),
    "fair_by": ({"fair_by": "key"}, {"fair_by": "tag"}),
    "limit_each": ({"fair_by": "key", "limit_each": 3}, {"fair_by": "key", "limit_each": 4}),
    "rate_each": ({"fair_by": "key", "rate_each": 3.0}, {"fair_by": "key", "rate_each": 4.0}),
    "retry": ({"retry": Retry.fixed(5, 3)}, {"retry": Retry.fixed(6, 3)}),
}
"""For each setting that a handler may name: the group's settings, and a worker's."""
CHANGES = {
    "tags": "--tags us --no-where", "where": "--where 'n > 2'",
    "order_retry": "--order-retry 2000ms",
    "order_attempts": "--order-attempts 4", "order_failure": "--order-failure dead",
    "fair_by": "--fair-by tag", "limit_each": "--limit-each 4", "rate_each": "--rate-each 4.0",
    "retry": "fixed:delay=6s,retries=3,jitter=0",
}  # fmt: skip


def test_every_setting_of_a_handlers_group_has_its_case() -> None:
    assert OTHERWISE.keys() == CHANGES.keys() == {*GroupKeywords.__optional_keys__, "retry"}


@pytest.mark.parametrize("word", ["update", "warn", "refuse", None])
@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("count", [1, 2])
async def test_on_mismatch_decides_about_differing_group_settings(
    count: int, name: str, word: OnMismatch | None, caplog: pytest.LogCaptureFixture
) -> None:
    own, wanted = OTHERWISE[name]
    async with Shards(count) as shards:
        client = await shards.client().connect()
        made = await client.create_group("t", "g", **own)
        worker = Worker(client, signals=False, on_mismatch=word)

        @worker.on("t", group="g", **wanted)
        async def handle(delivery: Delivery) -> None: ...

        running = asyncio.ensure_future(worker.run())
        if word == "refuse" or (word is None and name != "retry"):
            with pytest.raises(errors.Conflict) as refused:
                await soon(running)
            answer = refused.value.message
        else:
            await soon(worker.started.wait())
            answer = "".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
            worker.stop()
            await soon(running)
        now = await client.create_group("t", "g")
        sibling = shards.shard(count - 1).core.topics["t"].groups["g"].settings
        if word == "update":
            # ``tags`` and ``where`` are one filter: the part that is not named is taken away.
            expected = {"tags": None, "where": None, **wanted}
            assert {field: getattr(now, field) for field in expected} == expected
            assert "the group will get this code's settings" in answer
        else:
            assert now.raw | {"created": True} == made.raw
            assert CHANGES[name] in answer
        assert (sibling.tags, sibling.where) == (now.tags, now.where)
        assert "is set otherwise" in answer
        differs = (
            answer.partition("is set otherwise: ")[2]
            .partition("; to change it")[0]
            .partition(". The group")[0]
        )
        assert "retries" not in differs, "what is the same is not said"
        assert answer.count("is set otherwise") == 1


# --- listings by key -----------------------------------------------------------------------------

OF_KEY, OTHERS = 5, 700


@pytest.mark.parametrize(
    ("store", "count"),
    [("memory", 1), ("memory", 3), ("sqlite", 1), ("sqlite", 3)],
)
async def test_tasks_of_a_topic_and_key_are_listed_from_the_index(
    store: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of other keys are not read, whatever else is asked for. All stores read by ids alike."""
    async with Shards(count, tmp_path if store == "sqlite" else None) as shards:
        client = await shards.client().connect()
        read: list[int] = []
        for number in range(count):
            reader = shards.shard(number).reader
            read_some, scan = reader.read_some, reader.scan

            @asynccontextmanager
            async def counted(ids: Any, *args: Any, real: Any = read_some, **kw: Any) -> Any:
                read.extend(ids)
                async with real(ids, *args, **kw) as results:
                    yield results

            async def scanned(*args: Any, real: Any = scan, **kw: Any) -> Any:
                page, following = await real(*args, **kw)
                read.extend(known.row.id for known in page)
                return page, following

            monkeypatch.setattr(reader, "read_some", counted)
            monkeypatch.setattr(reader, "scan", scanned)

        def task(number: int, key: str, topic: str = "t") -> Task:
            return Task(topic, b"x", key=key, delay=3600, tag="odd" if number % 2 else None)

        wanted: list[int] = []
        for number in range(OF_KEY):
            others = [task(number, f"other-{number}-{n}") for n in range(OTHERS // OF_KEY)]
            await client.enqueue_many([*others, task(number, "mine", "u")])
            wanted.append((await client.enqueue_many([task(number, "mine")]))[0].id)

        async def listed(**options: Any) -> list[int]:
            read.clear()
            results = [
                item.id async for item in client.list_tasks(topic="t", key="mine", **options)
            ]
            assert set(read) <= set(wanted), f"{len(set(read))} tasks are read"
            return results

        assert await listed() == wanted
        assert await listed(limit=2) == wanted[:2]
        assert await listed(tag="odd") == wanted[1::2]
        assert await listed(state="ready") == []
        await client.cancel(wanted[1])
        assert await listed() == [wanted[0], *wanted[2:]]
