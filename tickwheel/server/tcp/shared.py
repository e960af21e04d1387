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
    """The operations about a conversation itself, of a daemon that leads or stands by."""

    settings: Settings
    limits: Limits
    """As announced."""
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
    """What a handler sees of a connection."""

    caller: Caller

    def send(self, data: bytes) -> None:
        """Write whole frames."""


Handler = Callable[[Any, "Frame", "Now"], None]
"""Of (Peer, frame, now)."""
RunHandler = Callable[[Peer, "Sequence[Frame]", int, int, "Now"], int]
"""Takes as many frames as it can from an index on, up to another; returns the one it came to."""


class Table(NamedTuple):
    """Which handler a frame is for."""

    handlers: Mapping[int, Handler]
    otherwise: Handler
    """For types that are not in the table."""
    enqueue_plain: RunHandler


M = TypeVar("M", bound=Member)


class Shared(Generic[M]):
    """One for each role that the daemon has had."""

    def __init__(
        self, operations: Conversing, table_of: Callable[[Principal], Table], logins: Logins
    ) -> None:
        """``table_of``: what somebody with these rights can ask for."""
        self.operations = operations
        self.table_of = table_of
        self.logins = logins
        self.connections: set[M] = set()
        self.held: dict[M, None] = {}
        """Those whose requests wait until others are answered."""
        self.turns = Turns[M]()
        """Whose requests are looked at now."""
        self.is_over = False
        """The role has ended: nobody answers a connection that begins now."""
        self.unread_bytes = 0
        """Of frames of all connections that have not come to their ends."""

    def landed(self) -> None:
        """Answers have left: whoever had to wait for that may go on."""
        for connection in list(self.held):
            connection.go_on()
