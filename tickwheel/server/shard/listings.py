"""Requests that take a while: who may have how many, whose turn it is, and their answers.

Each caller has one of them under way at a time, the daemon a few; the others wait in line, the
callers in turn, those that can take no more answers not at all. Knows nothing of what is asked.
Invariant: what waits of a caller that is gone is never begun.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tickwheel.errors import Overloaded, Refused, TickwheelError
from tickwheel.persistence.contract import Fenced, StoreBroken, StoreBusy, StoreError
from tickwheel.server.checks import room

if TYPE_CHECKING:
    from tickwheel.server.shard.callers import Ask, Caller
    from tickwheel.server.shard.parts import Parts

Work = Callable[[], Coroutine[Any, Any, None]]


class Listings:
    """A queue of slow requests: ``answer`` begins what there is room for, each end begins the
    next."""

    def __init__(
        self, parts: Parts, caller_max: str, all_max: str = "", *, at_a_time: int = 1
    ) -> None:
        """``caller_max`` and ``all_max`` are settings: the limits of a caller and of all (default:
        the same)."""
        self._parts = parts
        self._limits = caller_max, all_max or caller_max
        self._at_a_time = at_a_time
        self._waiting: OrderedDict[Caller, deque[Work]] = OrderedDict()
        self._busy: set[Caller] = set()
        self.count = 0
        """How many requests wait or are under way."""

    def answer(
        self,
        ask: Ask[Any],
        work: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        *,
        at_once: bool = False,
    ) -> None:
        """Do ``work`` when its turn comes, then answer with what it returns. ``at_once``: it needs
        none of the tasks that a start is still loading. Raises Overloaded."""
        parts = self._parts

        async def run() -> None:
            try:
                if not at_once:
                    await parts.loaded.wait()
                result = await work()
            except TickwheelError as error:
                if isinstance(error, (Fenced, StoreBroken)):
                    raise  # it ends the daemon
                if isinstance(error, StoreBusy):
                    error = Overloaded(error.message)
                elif isinstance(error, StoreError):
                    error = Refused(f"the store could not do it: {error.message}")
                ask.refuse(error)
            except Exception as error:
                ask.refuse(parts.border.survive(f"a look-up of {ask.caller.address}", error))
            else:
                parts.committer.answer(ask, result)

        self._put(ask.caller, run)

    def _put(self, caller: Caller, work: Work) -> None:
        line = self._waiting.get(caller)
        of_caller = (len(line) if line else 0) + (caller in self._busy)
        settings, (caller_max, all_max) = self._parts.settings, self._limits
        said = "such requests of this connection are not answered"
        room(Overloaded, of_caller, said, settings, caller_max)
        room(Overloaded, self.count, "such requests are not answered", settings, all_max)
        self.count += 1
        if line is None:
            line = self._waiting[caller] = deque()
        line.append(work)
        self.go_on()

    def go_on(self) -> None:
        """Begin waiting requests while there is room for more."""
        while self._waiting and len(self._busy) < self._at_a_time:
            caller = next((one for one in self._waiting if self._may_begin(one)), None)
            if caller is None:
                return
            line = self._waiting.pop(caller)
            work = line.popleft()
            if line:
                self._waiting[caller] = line  # behind the others
            self._busy.add(caller)
            self._parts.spawn(self._do(caller, work))

    def _may_begin(self, caller: Caller) -> bool:
        return caller not in self._busy and self._parts.takes_more(caller)

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


def when_free(
    parts: Parts,
    caller: Caller,
    what: str,
    is_free: Callable[[], bool],
    act: Callable[[], None],
    refuse: Callable[[TickwheelError], None],
) -> None:
    """``act`` when ``is_free``: at once, or behind the batches that hold what may still be undone.
    A caller that is gone by then is forgotten. ``what``: the command, for the log."""
    if is_free():
        act()
        return

    def again() -> None:
        if caller.is_open:
            parts.border.run(
                what, lambda: when_free(parts, caller, what, is_free, act, refuse), refuse
            )

    parts.committer.after_all(again)
