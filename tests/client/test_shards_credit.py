"""A prefetch over several shards: credit goes to where the work is, and all shards together never
have more deliveries out than it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.shards import Shards, key_in
from support.waiting import comes, soon
from tickwheel import Client, Delivery, Task, errors
from tickwheel.api.frames import FrameType
from tickwheel.client import subscription as module
from tickwheel.client.requests import Calls
from tickwheel.client.subscription import ShareUse, Subscription, divide
from tickwheel.model.values import SHARD_BITS

COUNT, PREFETCH = 3, 8

loads = st.builds(ShareUse, st.integers(1, 50), st.integers(0, 60), st.integers(0, 1_000))


@given(st.lists(loads, min_size=1, max_size=12), st.integers(0, 300))
def test_shares_are_max_min_fair(found: list[ShareUse], more: int) -> None:
    prefetch = len(found) + more
    shares = divide(prefetch, found)
    assert sum(shares) == prefetch and min(shares) >= 1
    uses = [stats.in_flight + stats.ready * stats.is_short for stats in found]
    for share, use in zip(shares, uses, strict=True):
        if share < use:  # it could use more: nobody else has more than this, and uses it
            others = zip(shares, uses, strict=True)
            assert all(other <= max(share + 1, 1) for other, _ in others)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BALANCE_PAUSE_S", 0.005)
    monkeypatch.setattr(module, "BALANCE_PAUSE_MAX_S", 0.01)


@pytest.fixture
async def client(at_once: None) -> AsyncIterator[Client]:
    async with Shards(COUNT) as shards:
        yield await shards.client().connect()


async def put(client: Client, shard: int, count: int) -> None:
    key = key_in(shard, COUNT)
    await client.enqueue_many([Task("t", b"", key=key)] * count)


def by_shard(found: list[Delivery]) -> list[int]:
    counts = Counter(task.id % (1 << SHARD_BITS) for task in found)
    return [counts[shard] for shard in range(COUNT)]


async def shares(client: Client) -> list[int]:
    return [consumer.prefetch async for consumer in client.list_consumers()]


async def take(deliveries: Subscription, count: int) -> list[Delivery]:
    return [await soon(anext(deliveries)) for _ in range(count)]


async def test_credit_goes_to_the_shard_that_has_the_work(client: Client) -> None:
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 1, 3 * PREFETCH)
        most = PREFETCH - (COUNT - 1)
        result = await take(deliveries, most)
        assert by_shard(result) == [0, most, 0]
        assert sorted(await shares(client)) == [1, 1, most]


async def test_shards_with_work_share_the_prefetch_without_exceeding_it(client: Client) -> None:
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 0, 100)
        held = await take(deliveries, PREFETCH - (COUNT - 1))
        await put(client, 1, 100)
        seen: set[tuple[int, int, int]] = set()

        async def is_even() -> bool:
            delivery = await soon(anext(deliveries))
            await held.pop(0).ack()
            held.append(delivery)
            assert (await client.stats()).in_flight <= PREFETCH
            one, two, three = await shares(client)
            seen.add((one, two, three))
            return sorted((one, two, three)) == [1, 3, 4]

        await comes(is_even)
        assert all(sum(some) <= PREFETCH for some in seen)


async def test_a_changed_prefetch_keeps_the_ratio_of_shares(client: Client) -> None:
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 1, 100)
        await take(deliveries, PREFETCH - (COUNT - 1))
        await deliveries.set_prefetch(5)
        assert sorted(await shares(client)) == [1, 1, 3]
        await deliveries.set_prefetch(0)
        assert await shares(client) == [0, 0, 0]
        await deliveries.set_prefetch(6)
        assert await shares(client) == [2, 2, 2]


async def test_idle_shards_are_not_asked_about_credit(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[FrameType] = []
    call = Calls.call

    async def noted(calls: Calls, kind: FrameType, *fields: object, **options: object) -> object:
        asked.append(kind)
        return await call(calls, kind, *fields, **options)

    monkeypatch.setattr(Calls, "call", noted)
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 1, 1)
        await (await soon(anext(deliveries))).ack()
        await comes(lambda: asked.count(FrameType.PREFETCH) >= COUNT)
        before = asked.count(FrameType.PREFETCH)
        await asyncio.sleep(5 * module.BALANCE_PAUSE_MAX_S)  # real time: some checks
        assert asked.count(FrameType.PREFETCH) <= before + COUNT


async def test_shares_stay_fixed_with_an_older_daemon(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(part: Subscription, prefetch: int) -> tuple[int, int]:
        raise errors.BadRequest("the frame has 3 fields, expected 2: sub, prefetch")

    monkeypatch.setattr(Subscription, "update_prefetch", refused)
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 1, 100)
        assert deliveries._parts is not None
        await comes(lambda: deliveries._parts._balancing.done())
        assert sorted(await shares(client)) == [2, 3, 3]
        await take(deliveries, 2)


async def test_unconfirmed_credit_is_not_given_to_other_shards(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 0 does not say whether it has given any up."""
    share = -(-PREFETCH // COUNT)
    tell, asked = Subscription.update_prefetch, Counter[int]()

    async def silent(part: Subscription, prefetch: int) -> tuple[int, int]:
        asked[part._shard] += 1
        if part._shard == 0 and prefetch < share:
            part._prefetch = part._credit = prefetch
            raise errors.SendTimeout("PREFETCH was sent and not answered")
        return await tell(part, prefetch)

    monkeypatch.setattr(Subscription, "update_prefetch", silent)
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 1, 100)
        await take(deliveries, 4)
        await comes(lambda: asked[1] > 10)
        assert sum(await shares(client)) == PREFETCH


async def test_credit_moves_again_after_a_shard_without_the_subscription(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PREFETCH comes before the SUBSCRIBE on a new connection."""
    tell, failures = Subscription.update_prefetch, [errors.NotFound("no subscription 1 (sub)")]

    async def tell_later(part: Subscription, prefetch: int) -> tuple[int, int]:
        if failures:
            raise failures.pop()
        return await tell(part, prefetch)

    monkeypatch.setattr(Subscription, "update_prefetch", tell_later)
    async with client.subscribe("t", prefetch=PREFETCH) as deliveries:
        await put(client, 1, 3 * PREFETCH)
        most = PREFETCH - (COUNT - 1)
        assert by_shard(await take(deliveries, most)) == [0, most, 0]
    assert not failures


async def test_an_unavailable_shard_keeps_its_share(at_once: None) -> None:
    async with Shards(COUNT) as shards_:
        client = await shards_.client().connect()
        async with client.subscribe("t", prefetch=9) as deliveries:
            shards_.lose(2)
            await put(client, 1, 100)
            result = await take(deliveries, 5)
            assert by_shard(result) == [0, 5, 0]
            shards_.away.clear()
            await put(client, 2, 3)
            result = await take(deliveries, 3)
            assert by_shard(result) == [0, 0, 3]
