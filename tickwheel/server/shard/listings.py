"""Requests that take a while: who may have how many, and whose turn it is.

Each caller has one of them under way at a time, the daemon a few; the others wait in line, the
callers in turn, those that can take no more answers not at all. Knows nothing of what is asked.
Invariant: what waits of a caller that is gone is never begun.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tickwheel.errors import Overloaded

if TYPE_CHECKING:
    from tickwheel.server.shard.callers import Caller

Work = Callable[[], Coroutine[Any, Any, None]]


class Listings:
    """A queue of slow requests: ``put`` begins what there is room for, each end begins the next."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        takes_more: Callable[[Caller], bool],
        at_a_time: int,
        caller_max: int,
        all_max: int,
    ) -> None:
        """``takes_more``: whether a caller may be sent another answer."""
        self._spawn = spawn
        self._takes_more = takes_more
        self._at_a_time = at_a_time
        self._caller_max = caller_max
        self._all_max = all_max
        self._waiting: OrderedDict[Caller, deque[Work]] = OrderedDict()
        self._busy: set[Caller] = set()
        self.count = 0
        """How many requests wait or are under way."""

    def put(self, caller: Caller, work: Work, limits: tuple[str, str]) -> None:
        """Queue ``work``; ``limits``: names of those per caller and of all. Raises Overloaded."""
        line = self._waiting.get(caller)
        of_caller = (len(line) if line else 0) + (caller in self._busy)
        if of_caller >= self._caller_max:
            raise Overloaded(
                f"{of_caller} such requests of this connection are not answered; the limit is"
                f" {self._caller_max} ({limits[0]})"
            )
        if self.count >= self._all_max:
            raise Overloaded(
                f"{self.count} such requests are not answered; the limit is {self._all_max}"
                f" ({limits[1]})"
            )
        self.count += 1
        if line is None:
            line = self._waiting[caller] = deque()
        line.append(work)
        self.go_on()

    def go_on(self) -> None:
        """Begin waiting requests while there is room for more."""
        while len(self._busy) < self._at_a_time:
            caller = next((one for one in self._waiting if self._may_begin(one)), None)
            if caller is None:
                return
            line = self._waiting.pop(caller)
            work = line.popleft()
            if line:
                self._waiting[caller] = line  # behind the others
            self._busy.add(caller)
            self._spawn(self._do(caller, work))

    def _may_begin(self, caller: Caller) -> bool:
        return caller not in self._busy and self._takes_more(caller)

    def closed(self, caller: Caller) -> None:
        """Drop the waiting requests of a caller that is gone."""
        self.count -= len(self._waiting.pop(caller, ()))

    async def _do(self, caller: Caller, work: Work) -> None:
        try:
            await work()
        finally:
            self._busy.discard(caller)
            self.count -= 1
            self.go_on()
