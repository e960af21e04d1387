"""What the connections of a daemon share while it has one role: operations, handlers, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from tickwheel.server.tcp.turns import Member, Turns

if TYPE_CHECKING:
    from tickwheel.clock import Clock, Now
    from tickwheel.errors import TickwheelError
    from tickwheel.limits import Limits
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.logins import Logins
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.access import Principal
    from tickwheel.server.shard.callers import Caller


class Conversing(Protocol):
    """The operations about a conversation itself, as a leader and a standby have them."""

    settings: Settings
    limits: Limits
    """The limits of the daemon, as HELLO announces them."""
    frame_bytes_max: int
    clock: Clock

    def begin(self) -> None: ...

    def contain(self, what: str, error: Exception) -> TickwheelError: ...

    def survive(self, what: str, error: Exception) -> TickwheelError: ...

    def fail(self, error: BaseException) -> None: ...

    def greeting(self) -> dict[str, Any]: ...

    def opened(self, caller: Caller) -> None: ...

    def join(self, caller: Caller, session: bytes, now_ms: int) -> None: ...

    def heard(self, caller: Caller) -> None: ...

    def blocked(self, caller: Caller) -> None: ...

    def unblocked(self, caller: Caller) -> None: ...

    def closed(self, caller: Caller, broke: str = "") -> None: ...

    def is_behind(self, caller: Caller) -> bool: ...

    def handled(self) -> None: ...

    def after_all(self, act: Callable[[], None]) -> None: ...

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None: ...


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


M = TypeVar("M", bound=Member)


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
        self.held: dict[M, None] = {}
        """Connections whose requests wait until others are answered."""
        self.turns = Turns[M]()
        """Decides which connection's requests are looked at now."""
        self.is_over = False
        """Whether the role has ended, so that nobody answers a connection that begins now."""
        self.unread_bytes = 0
        """The bytes of unfinished frames of all connections."""

    def landed(self) -> None:
        """Let connections go on that waited for answers to leave."""
        for connection in list(self.held):
            connection.go_on()
