"""A few pieces of work in one turn of the loop, in their order."""

from __future__ import annotations

import asyncio

from support.waiting import soon
from tickwheel.server.http.call import Turns


async def test_work_per_turn_is_limited_and_in_order() -> None:
    turns, done = Turns(2), list[int]()

    async def work(number: int) -> None:
        await turns.wait_for_turn()
        done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(7)]
    counts = []
    while len(done) < 7:
        await asyncio.sleep(0)
        counts.append(len(done))
    assert done == list(range(7))
    assert all(after - before <= 2 for before, after in zip([0, *counts], counts, strict=False))
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    await soon(turns.wait_for_turn())


async def test_a_cancelled_waiter_takes_no_turn() -> None:
    turns = Turns(1)
    await turns.wait_for_turn()
    waiting = [asyncio.create_task(turns.wait_for_turn()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.wait(waiting, timeout=5)
    assert waiting[1].cancelled() and all(task.done() for task in waiting)
