"""The operations of a daemon that does not lead: it says who does, and takes no work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tickwheel.errors import InternalError, NotActive, TickwheelError

if TYPE_CHECKING:
    from tickwheel.api.daemon import Nothing
    from tickwheel.clock import Clock
    from tickwheel.limits import Limits
    from tickwheel.persistence.election import Leader
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.border import OnEvent
    from tickwheel.server.shard.callers import Ask, Caller

FRAME_BYTES_MAX = 64 * 1024
"""Bytes of a request that are looked at: nobody who knows the role sends more."""


class StandbyOperations:
    """The operations of a standby: ``ping``, ``status``, ``leave``; others are ``not_active``."""

    role = "standby"
    frame_bytes_max = FRAME_BYTES_MAX

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        clock: Clock,
        *,
        active: Callable[[], Leader | None],
        status: Callable[[], dict[str, Any]],
        on_event: OnEvent,
    ) -> None:
        """``active`` returns the daemon that leads, as far as is known."""
        self.settings = settings
        self.limits = limits
        self.clock = clock
        self._active = active
        self._status = status
        self._on_event = on_event

    def refusal(self) -> NotActive:
        """The answer to all that only the leader can do."""
        leader = self._active()
        if leader is None:
            return NotActive("this daemon stands by; none is known to be active")
        http = f" (HTTP: {leader.http})" if leader.http else ""
        return NotActive(f"this daemon stands by; the active one is {leader.address}{http}")

    def whereabouts(self) -> tuple[str | None, str | None]:
        """(address, HTTP URL) of the leader, as far as they are known."""
        leader = self._active()
        return (None, None) if leader is None else (leader.address, leader.http or None)

    def ping(self, ask: Ask[Nothing]) -> None:
        """Say that the daemon is there."""
        ask.answer(None)

    def status(self, ask: Ask[Nothing]) -> None:
        """Answer what the daemon says of itself."""
        ask.answer(self._status())

    def leave(self, caller: Caller, request: int) -> None:
        """Let the caller go; there is nothing to forget."""
        caller.answer(request, None)

    def greeting(self) -> dict[str, Any]:
        """The daemon's part in the cluster, with which a conversation begins."""
        return {"epoch": 0, "role": self.role, "active": self.whereabouts()[0]}

    # --- a conversation, of which nothing is remembered ------------------------------------------

    def begin(self) -> None: ...

    def contain(self, what: str, error: Exception) -> TickwheelError:
        return self.survive(what, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        self._on_event("internal_error", f"{what}: {type(error).__name__}: {error}")
        return InternalError(f"{type(error).__name__}: the daemon's log says more")

    def fail(self, error: BaseException) -> None:
        raise error

    def opened(self, caller: Caller) -> None: ...

    def join(self, caller: Caller, session: bytes, now_ms: int) -> None: ...

    def heard(self, caller: Caller) -> None: ...

    def blocked(self, caller: Caller) -> None:
        caller.is_blocked = True

    def unblocked(self, caller: Caller) -> None:
        caller.is_blocked = False

    def closed(self, caller: Caller, broke: str = "") -> None:
        caller.close()

    def finished(self, caller: Caller) -> None:
        caller.close()

    def is_behind(self, caller: Caller) -> bool:
        return False

    def handled(self) -> None: ...

    def after_all(self, act: Callable[[], None]) -> None:
        act()

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None: ...

    def unreadable(self, caller: Caller, verb: str, error: TickwheelError) -> None: ...
