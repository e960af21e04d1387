"""Where ``Once`` keeps what is done: the contract, and the one in this process.

Invariant: of all claims of one key that is not done at most one is held; the next waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any, Protocol


class Marks(Protocol):
    """Keys are text; a claim is whatever ``claim`` returned."""

    async def claim(self, key: str) -> Any:
        """A claim, or None when the key is done; waits while another one holds it."""

    async def done(self, claim: Any) -> None:
        """The work is done."""

    async def give_back(self, claim: Any) -> None:
        """The work failed. Raises nothing: a claim that cannot be given back ends by itself."""

    async def is_done(self, key: str) -> bool:
        """Whether it is done, and not forgotten."""

    async def forget(self, key: str) -> None:
        """Not done any more."""

    async def close(self) -> None:
        """Harmless twice."""


class MemoryMarks:
    """The last ``size`` keys that were done, each for ``ttl_ms``."""

    def __init__(self, size: int, ttl_ms: int) -> None:
        self._size = size
        self._ttl_s = ttl_ms / 1000
        self._done: OrderedDict[str, float] = OrderedDict()
        """key → until when, by the monotonic clock; the oldest first."""
        self._claims: dict[str, asyncio.Future[None]] = {}

    async def claim(self, key: str) -> str | None:
        while not await self.is_done(key):
            held = self._claims.get(key)
            if held is None:
                self._claims[key] = asyncio.get_running_loop().create_future()
                return key
            await asyncio.shield(held)
        return None

    async def done(self, claim: str) -> None:
        self._done[claim] = time.monotonic() + self._ttl_s
        self._done.move_to_end(claim)
        if len(self._done) > self._size:
            self._done.popitem(last=False)
        self._let_go(claim)

    async def give_back(self, claim: str) -> None:
        self._let_go(claim)

    def _let_go(self, claim: str) -> None:
        held = self._claims.pop(claim)
        if not held.done():
            held.set_result(None)

    async def is_done(self, key: str) -> bool:
        until_s = self._done.get(key)
        if until_s is None:
            return False
        if time.monotonic() < until_s:
            return True
        del self._done[key]
        return False

    async def forget(self, key: str) -> None:
        self._done.pop(key, None)

    async def close(self) -> None:
        """Nothing is open."""
