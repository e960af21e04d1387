"""How many requests are worked on in one turn of the event loop: a few, so that what is due is
delivered between them.

Answers that waited for one commit come all at once, and so do the requests of as many connections.
Each costs a fraction of a millisecond; all of them in one turn would make a delivery late by their
sum.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """The turns of requests: ``await mine()`` before each piece of work, unless ``taken()``."""

    def __init__(self, at_a_time: int) -> None:
        self._at_a_time = self._left = at_a_time
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_armed = False

    def taken(self) -> bool:
        """Whether the request may work at once, which takes one place of this turn."""
        if self._left <= 0 or self._waiting:
            return False
        self._left -= 1
        self._arm()
        return True

    async def mine(self) -> None:
        """Wait for a turn, in the order of the calls."""
        if self.taken():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._arm()
        await turn

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_armed = False
        self._left = self._at_a_time
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # its request was not cut off meanwhile
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._arm()
