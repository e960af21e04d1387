"""Futures that somebody may or may not look at, and a way to wait for a change."""

from __future__ import annotations

import asyncio
from typing import Any

from tickwheel.errors import TickwheelError


def fail(future: asyncio.Future[Any], error: TickwheelError) -> bool:
    """Set the exception unless it is done; whether it was set.

    It counts as seen: a future of ``enqueue_nowait`` or ``ack_nowait`` that nobody looks at
    must not end in "exception was never retrieved". The client logs such failures itself, one
    line a frame.
    """
    if future.done():
        return False
    future.set_exception(error)
    future.exception()
    return True


class Signal:
    """Wakes everybody who waits at the moment; each looks again whether it was for them."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Until the next ``tell``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def tell(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
