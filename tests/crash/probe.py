"""Asks a daemon whether everything works, without leaving anything behind.

Where a nemesis fills the store, "there is no room" is an answer of a daemon that works: one that
was waited for until there is room would keep the other frozen for longer than a client's patience.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from crash.link import Link, Lost, Numbers
from crash.plan import Plan
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.errors import StoreFull

WELL_S_MAX = 30.0
POLL_S = 0.05
FAR_MS = 3_600_000


class Probe:
    """A task is put and cancelled: whatever was confirmed before is durable by then."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._session = plan.rnd("probe").randbytes(16)
        self._numbers = Numbers()
        self._number = 0
        """Number of the ENQUEUE that is repeated until it is answered."""
        self._ids: Sequence[int] = ()
        """To be cancelled until that is answered."""
        self.port = 0
        """Port of the daemon that worked last."""
        self.problems: list[str] = []

    async def works(self, ports: Sequence[int]) -> bool:
        """One try at each of these daemons."""
        for port in ports:
            try:
                link = await self._plan.try_link(port, self._numbers, session=self._session)
            except Lost:
                continue
            self.port = port
            try:
                if await self._takes(link):
                    return await self._has_loaded(link)
            except Lost:
                continue
            finally:
                link.abort()
        return False

    async def well(
        self, ports: Sequence[int], when: str, look: Callable[[str], Awaitable[None]]
    ) -> float:
        """Wait until it works; how long that took in seconds. ``look`` is called in between."""
        began_s = time.monotonic()
        while not await self.works(ports):
            await look(when)
            if time.monotonic() > began_s + WELL_S_MAX:
                self.problems.append(f"nothing works for {WELL_S_MAX} s {when}")
                break
            await rest(POLL_S)
        return time.monotonic() - began_s

    async def _has_loaded(self, link: Link) -> bool:
        """Whether its memory holds everything that its store does."""
        frame = await link.call(FrameType.STATUS)
        return bool(frame[0] == FrameType.OK and frame[2]["state"] != "loading")

    async def _takes(self, link: Link) -> bool:
        refusal = await self._put(link)
        if refusal is None:
            return await self._cancel(link)
        return refusal == StoreFull.code and self._plan.may_be_full

    async def _put(self, link: Link) -> str | None:
        """The code of an error; None: it was put."""
        if self._ids:
            return None
        self._number = number = self._number or self._numbers.next()
        task = ["probe", b"probe", FAR_MS]
        frame = await link.wait(link.send_as(number, FrameType.ENQUEUE, number, [task]))
        if frame[0] != FrameType.OK:
            return str(frame[2])
        self._number, self._ids = 0, frame[2][1]
        return None

    async def _cancel(self, link: Link) -> bool:
        frame = await link.call(FrameType.CANCEL, self._ids)
        if frame[0] != FrameType.OK:
            return False
        if frame[2][0][1] not in ("cancelled", "already_cancelled"):
            self.problems.append(f"the cancel of a probe was answered {frame}")
        self._ids = ()
        return True
