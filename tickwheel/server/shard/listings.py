"""Requests that take a while: who may have how many, and whose turn it is.

Each connection has one of them under way at a time, the daemon a few; the others wait in line,
the connections in turn, those that do not read what they got before not at all. Knows nothing of
what is asked. Invariant: what waits of a connection that was closed is never begun.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tickwheel.errors import Overloaded

if TYPE_CHECKING:
    from tickwheel.server.tcp.connection import Connection

Work = Callable[[], Coroutine[Any, Any, None]]


class Listings:
    """``put`` begins what there is room for; each end begins the next."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        at_a_time: int,
        peer_max: int,
        all_max: int,
    ) -> None:
        self._spawn = spawn
        self._at_a_time = at_a_time
        self._peer_max = peer_max
        self._all_max = all_max
        self._waiting: OrderedDict[Connection, deque[Work]] = OrderedDict()
        self._busy: set[Connection] = set()
        self.count = 0
        """Waiting and under way."""

    def put(self, peer: Connection, work: Work, limits: tuple[str, str]) -> None:
        """``limits`` are the names of those for a connection and for all. Raises Overloaded."""
        line = self._waiting.get(peer)
        of_peer = (len(line) if line else 0) + (peer in self._busy)
        if of_peer >= self._peer_max:
            raise Overloaded(
                f"{of_peer} such requests of this connection are not answered; the limit is"
                f" {self._peer_max} ({limits[0]})"
            )
        if self.count >= self._all_max:
            raise Overloaded(
                f"{self.count} such requests are not answered; the limit is {self._all_max}"
                f" ({limits[1]})"
            )
        self.count += 1
        if line is None:
            line = self._waiting[peer] = deque()
        line.append(work)
        self.go_on()

    def go_on(self) -> None:
        """Begin what may be begun."""
        while len(self._busy) < self._at_a_time:
            peer = next((one for one in self._waiting if self._may_begin(one)), None)
            if peer is None:
                return
            line = self._waiting.pop(peer)
            work = line.popleft()
            if line:
                self._waiting[peer] = line  # behind the others
            self._busy.add(peer)
            self._spawn(self._do(peer, work))

    def _may_begin(self, peer: Connection) -> bool:
        return peer not in self._busy and not peer.paused

    def closed(self, peer: Connection) -> None:
        """Nobody waits for its answers any more."""
        self.count -= len(self._waiting.pop(peer, ()))

    async def _do(self, peer: Connection, work: Work) -> None:
        try:
            await work()
        finally:
            self._busy.discard(peer)
            self.count -= 1
            self.go_on()
