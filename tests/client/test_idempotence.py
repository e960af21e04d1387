"""``Once`` within a process: done once, claimed by one at a time, forgotten by size and age."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon, turns
from support.waiting import soon
from tickwheel import Delivery, errors
from tickwheel.client import idempotence as marks
from tickwheel.client.idempotence import Once


class Clock:
    """Stands for ``time`` in ``marks``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


async def do(once: Once, key: str | Delivery) -> bool:
    async with once.claim(key) as first:
        return first


async def test_the_second_time_is_not_the_first() -> None:
    once = Once()
    assert [await do(once, key) for key in ("a", "a", "b", "a")] == [True, False, True, False]
    assert await once.is_done("a") and not await once.is_done("c")
    await once.forget("a")
    assert await do(once, "a")
    await once.close()


async def test_a_body_that_fails_lets_the_next_one_in() -> None:
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


async def test_when_the_first_fails_one_of_those_who_wait_is_first() -> None:
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


async def test_who_waits_too_long_gets_an_error() -> None:
    once = Once(wait=0.05)
    async with once.claim("a"):
        with pytest.raises(errors.Conflict, match=r"'tickwheel:once:a'.*0\.05 s"):
            await do(once, "a")
    assert not await do(once, "a")


async def test_the_bodys_own_time_out_is_its_own() -> None:
    once = Once(wait=0.01)
    with pytest.raises(TimeoutError, match="mine"):
        async with once.claim("a"):
            raise TimeoutError("mine")


async def test_the_oldest_are_forgotten_by_number_and_by_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(marks, "time", clock)
    once = Once(size=2, ttl=10)
    for key in "abc":
        await do(once, key)
    assert [await once.is_done(key) for key in "abc"] == [False, True, True]
    clock.now_s += 9.9
    assert await once.is_done("c")
    clock.now_s += 0.2
    assert not await once.is_done("c")
    assert await do(once, "c")


async def test_a_delivery_stands_for_its_topic_group_and_key() -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        once = Once()
        found: list[Delivery] = []
        for group in ("g", "h"):
            subscription = client.subscribe("t", group=group)
            starting = asyncio.ensure_future(subscription.start())
            sub = await peer.subscribed()
            await soon(starting)
            items = [(i, 1, 0, b"x", {"key": "k"} if i < 7 else {}) for i in (5, 6, 7, 8)]
            peer.send(67, sub, 1, 0, items)
            found += [await soon(anext(subscription)) for _ in items]
        firsts = [await do(once, delivery) for delivery in found]
        assert firsts == [True, False, True, True] * 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": 0}, "size"),
        ({"ttl": 0}, "ttl"),
        ({"claim": -1}, "claim"),
        ({"wait": "5"}, "wait"),
        ({"url": "http://x"}, "redis://"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(errors.BadRequest, match=word):
        Once(**options)


@pytest.mark.parametrize("key", ["", 5, None, "k" * 1025])
async def test_a_wrong_key_is_named(key: Any) -> None:
    with pytest.raises(errors.BadRequest, match="key"):
        await do(Once(), key)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis", "redis.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.BadRequest, match=r"pip install 'tickwheel\[redis\]'"):
        Once("redis://127.0.0.1:1")
