"""How much of what clients send is looked at in one turn of the event loop.

A client may send tens of thousands of small frames in one piece. Handled in one go they would hold
up everybody's answers and deliveries by the sum of what each costs, so work is counted in *steps*,
and a connection that has used its share waits for its next turn with the rest of its frames. Counts
only: no clock. Invariant: in one turn of the loop all connections together begin no frame once
``STEPS_PER_TURN`` are used.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

FRAME_STEPS = 16
"""Steps of a frame that is handled alone; a plain ENQUEUE in a run is one step."""
STEPS_PER_TURN = 2_048
"""Steps that all connections together take in one turn of the event loop."""
STEPS_AT_A_TIME = 512
"""Steps of one connection after which it waits, if others do."""
PLAIN_RUN_MAX, PLAIN_RUN_MIN = 1_024, 16
"""Plain ENQUEUE frames that are offered in one go; few, once some were left: a frame that is looked
at and not taken is looked at again."""


class Member(Protocol):
    """A connection, as the turns know it."""

    def go_on(self) -> None:
        """Look at the frames that were held, if the connection need not wait any more."""


M = TypeVar("M", bound=Member)


class Turns(Generic[M]):
    """The turns of a daemon's connections."""

    def __init__(self, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        """``soon`` calls a function in the next turn of the event loop."""
        self._soon = soon or (lambda act: asyncio.get_running_loop().call_soon(act))
        self._left = STEPS_PER_TURN
        self._waiting: dict[M, None] = {}
        """The waiting connections, in the order of their turns."""
        self._is_armed = False

    def take(self, steps: int) -> None:
        """Count steps that are used in this turn of the event loop."""
        self._left -= steps
        if not self._is_armed:
            self._is_armed = True
            self._soon(self._next)

    def is_over(self, used: int) -> bool:
        """Whether a connection that has used so many steps now has to wait."""
        return self._left <= 0 or (used >= STEPS_AT_A_TIME and bool(self._waiting))

    def wait(self, member: M) -> None:
        """Queue a connection, which goes on when its turn comes, behind those that wait."""
        self._waiting[member] = None
        self.take(0)

    def forget(self, member: M) -> None:
        """Drop a connection that is gone."""
        self._waiting.pop(member, None)

    def _next(self) -> None:
        self._is_armed = False
        self._left = STEPS_PER_TURN
        for member in list(self._waiting):
            if self._left <= 0:
                break
            if member in self._waiting:
                del self._waiting[member]
                member.go_on()
        if self._waiting:
            self.take(0)
