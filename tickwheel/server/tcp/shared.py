"""What the connections of a daemon share while it has one role: operations, handlers, counts, and
how much of what clients send is looked at in one turn of the event loop.

A client may send tens of thousands of small frames in one piece. Handled in one go they would hold
up everybody's answers and deliveries by the sum of what each costs, so work is counted in *steps*,
and a connection that has used its share waits for its next turn with the rest of its frames. Counts
only: no clock. Invariant: in one turn of the loop all connections together begin no frame once
``STEPS_PER_TURN`` are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from tickwheel.api.frames import REQUEST_MAX
from tickwheel.errors import BadRequest
from tickwheel.server import checks

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol import Frame
    from tickwheel.server.logins import Logins
    from tickwheel.server.shard.callers import Caller, Principal
    from tickwheel.server.shard.operations import Conversing

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


# --- what is shared ------------------------------------------------------------------------------


class Peer(Protocol):
    """A connection as handlers see it."""

    caller: Caller

    def send(self, data: bytes) -> None:
        """Write whole frames to the peer."""


Handler = Callable[[Any, "Frame", "Now"], None]
"""Handles a frame: (peer, frame, now)."""
RunHandler = Callable[[Peer, "Sequence[Frame]", int, int, "Now"], int]
"""Handles frames from an index up to another, as many as it can; returns where it stopped."""


class Table(NamedTuple):
    """The handlers by type of frame."""

    handlers: Mapping[int, Handler]
    otherwise: Handler
    """The handler of types that are not in the table."""
    enqueue_plain: RunHandler


def _never() -> bool:
    return False


class Shared(Generic[M]):
    """What all connections of one role of the daemon share."""

    def __init__(
        self, operations: Conversing, table_of: Callable[[Principal], Table], logins: Logins
    ) -> None:
        """``table_of`` returns the handlers for the rights of a principal."""
        self.operations = operations
        self.table_of = table_of
        self.logins = logins
        self.connections: set[M] = set()
        self.strangers: dict[M, None] = {}
        """Connections that have not said HELLO."""
        self.held: dict[M, None] = {}
        """Connections whose requests wait until others are answered."""
        self.turns = Turns[M]()
        """Decides which connection's requests are looked at now."""
        self.is_over = False
        """Whether the role has ended, so that nobody answers a connection that begins now."""
        self.is_leased = True
        """Whether the lease is held, as far as this daemon can know."""
        self.is_about_to_lead: Callable[[], bool] = _never
        """Whether the daemon stands by, and gets its shard in a moment."""
        self.elsewhere: Table | None = None
        """The handlers for a peer that looks for another shard; None: the same as for all."""
        self.unread_bytes = 0
        """The bytes of unfinished frames of all connections."""

    def landed(self) -> None:
        """Let connections go on that waited for answers to leave."""
        for connection in list(self.held):
            connection.go_on()


# --- checks of frames as such; what is in them, the operations check -----------------------------


def arity(frame: Sequence[Any], count: int, fields: str) -> None:
    """Raises BadRequest unless the frame has ``count`` fields behind type and request."""
    if len(frame) - 2 != count:
        raise BadRequest(f"the frame has {len(frame) - 2} fields, expected {count}: {fields}")


def flag(value: object, field: str) -> bool:
    """Raises BadRequest unless the value is true or false."""
    return value if isinstance(value, bool) else checks.wrong(field, "true or false", value)


def request_number(value: object) -> int:
    return checks.integer(value, "request", 0, REQUEST_MAX)
