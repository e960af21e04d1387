"""How long a test waits for what should happen at once; only a failing one waits so long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 20.0
LOOK_S = 0.01


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, within a bounded time."""
    async with asyncio.timeout(WAIT_S):
        return await awaitable


def until(
    look: Callable[[], T], timeout_s: float = 60.0, log: Callable[[], object] = lambda: ""
) -> T:
    """What ``look`` finds, as soon as it finds something: for what another process does, and says
    nowhere else. ``log`` is what to show when that does not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {log()}"
        time.sleep(LOOK_S)  # real time: another process
    return found


async def comes(
    look: Callable[[], T | Awaitable[T]], timeout_s: float = 60.0, every_s: float = LOOK_S
) -> T:
    """The same in an event loop; ``look`` may have to be awaited."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = look()
            if isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(every_s)  # real time: another process, or a thread


async def rest(seconds: float) -> None:
    """A pause of whoever loads or disturbs a daemon in another process; it waits for nothing."""
    await asyncio.sleep(seconds)  # real time: it is the load
