"""One host as push sees it: how many requests it gets at a time from all groups, and a breaker that
stops asking it while it fails.

The breaker is closed until ``FAILURES_MAX`` requests in a row have failed. Then it is open: nobody
asks the host for a while that doubles with each further failure. When that is over one request goes
out, the probe; if it succeeds the breaker is closed, and all others go on. Who has to wait waits in
``enter``; leases are kept up meanwhile, and what comes due stays in the daemon.

Times are the event loop's, in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

FAILURES_MAX: Final = 10
"""Failures in a row after which nothing is sent for a while."""
OPEN_S: Final = 1.0
OPEN_MAX_S: Final = 60.0
"""How long nothing is sent, in seconds; doubled with each probe that fails, up to the most."""
HOST_REQUESTS_MAX: Final = 256
"""Requests to one host at a time, of all groups together."""


class Host:
    """The requests to one host, of all groups."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(HOST_REQUESTS_MAX)
        self._failures = self._openings = 0
        """Failures in a row, and how often the breaker has opened since the last success."""
        self._open_until_s = 0.0
        self._is_probing = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, or waits for the end of its probe."""
        return self._failures >= FAILURES_MAX

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """While one request may be under way. ``succeeded`` or ``failed`` says how it ended; when
        neither does, it does not count."""
        async with self._room:
            is_probe = await self._pass()
            try:
                yield
            finally:
                if is_probe:
                    self._is_probing = False
                    self._wake()

    async def _pass(self) -> bool:
        """Wait until the breaker lets a request through; whether that is the probe."""
        while self.is_open:
            left_s = self._open_until_s - asyncio.get_running_loop().time()
            if left_s <= 0 and not self._is_probing:
                self._is_probing = True
                return True
            changed = self._changed
            try:
                async with asyncio.timeout(left_s if left_s > 0 else None):
                    await changed.wait()
            except TimeoutError:
                continue
        return False

    def succeeded(self) -> None:
        """Take note that the host has answered."""
        self._failures = self._openings = 0
        self._wake()

    def failed(self) -> None:
        """Take note that the host did not answer, or could not do it."""
        self._failures += 1
        now_s = asyncio.get_running_loop().time()
        # Of requests that were under way when it opened, none makes it longer.
        if self._failures >= FAILURES_MAX and now_s >= self._open_until_s:
            open_s = min(OPEN_MAX_S, OPEN_S * 2.0 ** min(self._openings, 16))
            self._openings += 1
            self._open_until_s = now_s + open_s

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
