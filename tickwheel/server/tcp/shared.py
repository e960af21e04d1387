"""State that the connections of a daemon share while it has one role: operations, handlers, counts,
and the budget of frames handled in one turn of the event loop.

A client can send tens of thousands of small frames at once. Handling them all at once would delay
the answers and deliveries of every client. Work is therefore counted in *steps*, and a connection
that has used its share keeps its remaining frames for its next turn. Time is not measured.
Invariant: once all connections together have used ``STEPS_PER_TURN``, the handling of no further
frame begins in that turn.
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
    from tickwheel.server.access.logins import Logins
    from tickwheel.server.shard.callers import Caller, Principal
    from tickwheel.server.shard.operations import ShardInterface

FRAME_STEPS = 16
"""Steps that a frame takes if it is handled individually. A plain ENQUEUE in a run takes 1 step."""
STEPS_PER_TURN = 2_048
"""Maximum steps of all connections in one turn of the event loop."""
STEPS_AT_A_TIME = 512
"""Steps after which a connection must wait if other connections are waiting."""
PLAIN_RUN_MAX, PLAIN_RUN_MIN = 1_024, 16
"""Plain ENQUEUE frames that are offered in one run. After a run that was not handled completely,
the next run is short, because frames that are not handled in a run are examined twice."""


class Member(Protocol):
    """The interface of a connection that ``Turns`` uses."""

    def resume(self) -> None:
        """Handle the kept frames if the connection no longer has to wait."""


M = TypeVar("M", bound=Member)


class Turns(Generic[M]):
    """Distributes the turns among a daemon's connections."""

    def __init__(self, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        """``soon`` calls a function in the next turn of the event loop."""
        self._soon = soon or (lambda act: asyncio.get_running_loop().call_soon(act))
        self._left = STEPS_PER_TURN
        self._waiting: dict[M, None] = {}
        """Waiting connections, in the order of their turns."""
        self._is_armed = False

    def take(self, steps: int) -> None:
        """Count steps that are used in this turn of the event loop."""
        self._left -= steps
        if not self._is_armed:
            self._is_armed = True
            self._soon(self._next)

    def is_over(self, used: int) -> bool:
        """Return whether a connection that has used ``used`` steps has to wait."""
        return self._left <= 0 or (used >= STEPS_AT_A_TIME and bool(self._waiting))

    def wait(self, member: M) -> None:
        """Queue a connection for its next turn."""
        self._waiting[member] = None
        self.take(0)

    def forget(self, member: M) -> None:
        """Remove a closed connection."""
        self._waiting.pop(member, None)

    def _next(self) -> None:
        self._is_armed = False
        self._left = STEPS_PER_TURN
        for member in list(self._waiting):
            if self._left <= 0:
                break
            if member in self._waiting:
                del self._waiting[member]
                member.resume()
        if self._waiting:
            self.take(0)


# --- shared state --------------------------------------------------------------------------------


class Peer(Protocol):
    """The interface of a connection that handlers use."""

    caller: Caller

    def send(self, data: bytes) -> None:
        """Write whole frames to the peer."""


Handler = Callable[[Any, "Frame", "Now"], None]
"""Handles a frame: (peer, frame, now)."""
RunHandler = Callable[[Peer, "Sequence[Frame]", int, int, "Now"], int]
"""Handles frames between two indexes, and returns the index of the first unhandled frame."""


class Table(NamedTuple):
    """Handlers by frame type."""

    handlers: Mapping[int, Handler]
    otherwise: Handler
    """Handler of all other types."""
    enqueue_plain: RunHandler


def _never() -> bool:
    return False


class Shared(Generic[M]):
    """The state that all connections share while the daemon has one role."""

    def __init__(
        self, operations: ShardInterface, table_of: Callable[[Principal], Table], logins: Logins
    ) -> None:
        """``table_of`` returns the handlers for the rights of a principal."""
        self.operations = operations
        self.table_of = table_of
        self.logins = logins
        self.connections: set[M] = set()
        self.strangers: dict[M, None] = {}
        """Connections that have not sent HELLO."""
        self.waiting: dict[M, None] = {}
        """Connections whose frames wait until earlier requests are answered."""
        self.turns = Turns[M]()
        """Schedules the handling of frames."""
        self.is_over = False
        """Whether the role has ended, so new connections must be aborted."""
        self.is_leased = True
        """Whether the lease is held, as far as this daemon knows."""
        self.is_about_to_lead: Callable[[], bool] = _never
        """Returns whether the daemon is a standby that is about to lead."""
        self.elsewhere: Table | None = None
        """Handlers for a peer that requests another shard; None if they are the usual ones."""
        self.unread_bytes = 0
        """Bytes that unfinished frames of all connections take."""

    def resume_waiting(self) -> None:
        """Resume connections that waited for the answers to earlier requests."""
        for connection in list(self.waiting):
            connection.resume()


# --- checks of frames; the operations check their values -----------------------------------------


def arity(frame: Sequence[Any], count: int, fields: str) -> None:
    """Raise BadRequest unless the frame has ``count`` fields after type and request."""
    if len(frame) - 2 != count:
        raise BadRequest(f"the frame must have {count} fields, not {len(frame) - 2}: {fields}")


def flag(value: object, field: str) -> bool:
    """Return the value. Raise BadRequest unless it is true or false."""
    return value if isinstance(value, bool) else checks.wrong(field, "true or false", value)


def request_number(value: object) -> int:
    return checks.integer(value, "request", 0, REQUEST_MAX)
