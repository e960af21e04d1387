"""Waiting for the ends of tasks."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tickwheel import waiting
from tickwheel.waiting import cancel_all


async def test_a_task_that_loses_its_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "AGAIN_S", 0.01)
    lost = 0

    async def work() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost == 2:
                    raise
                lost += 1  # as a driver does whose connection ends at this moment

    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    tasks = [asyncio.create_task(work()), asyncio.create_task(fail())]
    await asyncio.sleep(0)  # real time: none
    await cancel_all([*tasks, asyncio.create_task(asyncio.sleep(0))])
    assert [task.done() for task in tasks] == [True, True] and lost == 2
    await cancel_all([])


async def test_no_error_of_an_ended_task_is_reported_as_never_retrieved() -> None:
    """Whether the task had ended before, or ends because of the cancellation."""
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))

    async def fail(wait: asyncio.Event) -> None:
        try:
            await wait.wait()
        finally:
            raise ValueError

    over = asyncio.Event()
    over.set()
    tasks = [asyncio.create_task(fail(event)) for event in (over, asyncio.Event())]
    await asyncio.sleep(0)  # real time: none
    assert [task.done() for task in tasks] == [True, False]
    await cancel_all(tasks)
    del tasks
    gc.collect()
    assert reports == []
