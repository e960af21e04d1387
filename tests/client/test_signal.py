"""Who waits is woken: all, or as many as there is something for."""

from __future__ import annotations

import asyncio

from support.fake_daemon import turns
from tickwheel.client.connection import Signal


async def waiting(count: int) -> tuple[Signal, list[asyncio.Task[None]]]:
    signal = Signal()
    waiters = [asyncio.create_task(signal.wait()) for _ in range(count)]
    await turns()
    return signal, waiters


def woken(waiters: list[asyncio.Task[None]]) -> list[bool]:
    return [waiter.done() and not waiter.cancelled() for waiter in waiters]


async def test_notify_wakes_all_waiters() -> None:
    signal, waiters = await waiting(3)
    signal.notify()
    await turns()
    assert woken(waiters) == [True] * 3


async def test_notify_wakes_a_number_of_waiters_longest_first() -> None:
    signal, waiters = await waiting(4)
    signal.notify(1)
    await turns()
    assert woken(waiters) == [True, False, False, False]
    signal.notify(2)
    await turns()
    assert woken(waiters) == [True, True, True, False]
    signal.notify(5)
    await turns()
    assert woken(waiters) == [True] * 4


async def test_a_cancelled_waiter_is_not_counted() -> None:
    signal, waiters = await waiting(3)
    waiters[0].cancel()
    signal.notify(1)
    await turns()
    assert woken(waiters) == [False, True, False]
    signal.notify()
    await asyncio.gather(*waiters, return_exceptions=True)


async def test_a_woken_waiter_that_is_cancelled_wakes_the_next() -> None:
    signal, waiters = await waiting(3)
    signal.notify(1)
    waiters[0].cancel()
    await turns()
    assert woken(waiters) == [False, True, False]
    signal.notify()
    await asyncio.gather(*waiters, return_exceptions=True)


async def test_cancelled_waiters_are_forgotten() -> None:
    signal, waiters = await waiting(2)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    signal.notify(2)
    assert not signal._waiters
