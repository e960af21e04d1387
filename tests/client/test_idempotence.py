"""``Once`` within a process: done once, claimed by one at a time, forgotten by size and age."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon, turns
from support.waiting import soon
from tickwheel import Delivery, errors
from tickwheel.client import idempotence
from tickwheel.client.idempotence import Once


class Clock:
    """Stands for ``time`` in ``idempotence``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


async def do(once: Once, key: str | Delivery) -> bool:
    async with once.claim(key) as first:
        return first


async def test_a_second_claim_of_done_work_is_not_first() -> None:
    once = Once()
    assert [await do(once, key) for key in ("a", "a", "b", "a")] == [True, False, True, False]
    assert await once.is_done("a") and not await once.is_done("c")
    await once.forget("a")
    assert await do(once, "a")
    await once.close()


async def test_a_failed_body_frees_the_claim() -> None:
    once = Once()
    for error in (ValueError, asyncio.CancelledError):
        with pytest.raises(error):
            async with once.claim("a") as first:
                assert first
                raise error
    assert not await once.is_done("a")
    assert await do(once, "a")


async def test_a_second_claim_waits_and_learns_when_the_first_is_done() -> None:
    once, go_on = Once(), asyncio.Event()

    async def slow() -> None:
        async with once.claim("a"):
            await go_on.wait()

    working = asyncio.ensure_future(slow())
    await turns()
    waiting = [asyncio.ensure_future(do(once, "a")) for _ in range(3)]
    await turns()
    assert not any(task.done() for task in waiting)
    assert await do(once, "b"), "other keys do not wait"
    go_on.set()
    assert await soon(asyncio.gather(*waiting)) == [False] * 3
    await working


async def test_a_failed_claim_passes_to_one_waiter() -> None:
    once, go_on = Once(), asyncio.Event()

    async def failing() -> None:
        async with once.claim("a"):
            await go_on.wait()
            raise LookupError

    working = asyncio.ensure_future(failing())
    await turns()
    waiting = [asyncio.ensure_future(do(once, "a")) for _ in range(3)]
    await turns()
    waiting.pop(1).cancel()
    go_on.set()
    assert sorted(await soon(asyncio.gather(*waiting))) == [False, True]
    with pytest.raises(LookupError):
        await working


async def test_a_claim_that_waits_too_long_raises_conflict() -> None:
    once = Once(wait=0.05)
    async with once.claim("a"):
        with pytest.raises(errors.Conflict, match=r"'tickwheel:once:a'.*0\.05 s"):
            await do(once, "a")
    assert not await do(once, "a")


async def test_a_timeout_in_the_body_is_raised_unchanged() -> None:
    once = Once(wait=0.01)
    with pytest.raises(TimeoutError, match="mine"):
        async with once.claim("a"):
            raise TimeoutError("mine")


async def test_done_claims_expire_by_number_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(idempotence, "time", clock)
    once = Once(size=2, ttl=10)
    for key in "abc":
        await do(once, key)
    assert [await once.is_done(key) for key in "abc"] == [False, True, True]
    clock.now_s += 9.9
    assert await once.is_done("c")
    clock.now_s += 0.2
    assert not await once.is_done("c")
    assert await do(once, "c")


async def delivered(*tasks: tuple[int, str | None]) -> list[Delivery]:
    """Deliveries of tasks, (id, key) each, to the groups a and b of one topic."""
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        deliveries: list[Delivery] = []
        for group in ("a", "b"):
            subscription = client.subscribe("t", group=group)
            starting = asyncio.ensure_future(subscription.start())
            sub = await peer.subscribed()
            await soon(starting)
            items = [(i, 1, 0, b"x", {} if key is None else {"key": key}) for i, key in tasks]
            peer.send(67, sub, 1, 0, items)
            deliveries += [await soon(anext(subscription)) for _ in items]
        return deliveries


async def test_claims_are_per_task_by_default() -> None:
    deliveries = await delivered(
        (5, "ann"), (6, "ann"), (5, "ann"), (7, None), (8, None), (7, None)
    )
    for once in (Once(), Once(size=10)):
        firsts = [await do(once, delivery) for delivery in deliveries]
        assert firsts == [True, True, False, True, True, False] * 2


async def test_tasks_share_a_claim_if_the_handler_passes_a_key() -> None:
    deliveries = await delivered(
        (5, "ann"), (6, "ann"), (7, "bob"), (8, None), (9, None), (8, None)
    )
    once = Once()

    async def by_key(delivery: Delivery) -> bool:
        async with once.claim(delivery, key=delivery.key) as first:
            return first

    firsts = [await by_key(delivery) for delivery in deliveries]
    # A task without a key shares its work with nobody.
    assert firsts == [True, False, True, True, True, False] * 2
    assert await once.is_done(deliveries[1], key="ann") and not await once.is_done(deliveries[1])
    await once.forget(deliveries[0], key="ann")
    assert await by_key(deliveries[1]) and not await by_key(deliveries[0])


async def test_claim_names_are_unique() -> None:
    first, second = (await delivered((5, "5"), (6, "#5")))[:2]
    keys = ["5", "#5", "6", "#6", "=5", "a#5", "t#a#5"]
    names = [
        idempotence.name_of(item, key) for item in (first, second) for key in (None, "5", "#5")
    ]
    assert len(set(names)) == 4  # by its own id each, and by the two keys
    assert len({idempotence.name_of(first, key) for key in [None, *keys]}) == len(keys) + 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": 0}, "size"),
        ({"ttl": 0}, "ttl"),
        ({"claim": -1}, "claim"),
        ({"wait": "soon"}, "wait"),
        ({"url": "http://x"}, "redis://"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(errors.BadRequest, match=word):
        Once(**options)


@pytest.mark.parametrize("wrong", ["", 5, "k" * 1025, "\ud800"])
async def test_invalid_claims_are_refused(wrong: Any) -> None:
    (delivery, *_) = await delivered((5, "ann"))
    with pytest.raises(errors.BadRequest, match="work must be"):
        await do(Once(), wrong)
    with pytest.raises(errors.BadRequest, match="key must be"):
        Once().claim(delivery, key=wrong)
    with pytest.raises(errors.BadRequest, match="key is only valid with a delivery"):
        Once().claim("text", key="ann")


def test_a_missing_redis_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis", "redis.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.BadRequest, match=r"pip install 'tickwheel\[redis\]'"):
        Once("redis://127.0.0.1:1")
