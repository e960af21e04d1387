"""How long a test waits for what should happen at once; only a failing one waits so long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 20.0


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, within a bounded time."""
    async with asyncio.timeout(WAIT_S):
        return await awaitable
