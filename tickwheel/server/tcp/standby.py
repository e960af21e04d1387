"""A connection to a daemon that does not lead: it says who does, and takes no work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from tickwheel.errors import (
    HelloRequired,
    NotActive,
    ProtocolError,
    TickwheelError,
    TooManyConnections,
)
from tickwheel.protocol.codec import Decoder, Frame, encode
from tickwheel.protocol.frames import REQUEST_MAX, FrameType, Limits
from tickwheel.server.settings import Settings
from tickwheel.server.tcp.greeting import hello_answer, read_hello

FRAME_BYTES_MAX = 64 * 1024
"""More of a frame is not looked at here: nobody who knows the role sends it."""
_OK, _ERROR = int(FrameType.OK), int(FrameType.ERROR)


class Standby:
    """What the connections of a daemon that stands by share."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        active: Callable[[], str | None],
        status: Callable[[], dict[str, Any]],
        now_ms: Callable[[], int],
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.active = active
        self.status = status
        self.now_ms = now_ms
        self.connections: set[StandbyConnection] = set()

    def refusal(self) -> NotActive:
        address = self.active()
        where = f"; the active one is {address}" if address else "; none is known to be active"
        return NotActive(f"this daemon stands by{where}")

    def end(self, message: str) -> None:
        """The role changes: clients connect again and are told the new one."""
        for connection in list(self.connections):
            connection.say_goodbye(message)


class StandbyConnection(asyncio.Protocol):
    """HELLO, PING, STATUS and BYE; everything else is ``not_active``."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._decoder = Decoder(FRAME_BYTES_MAX)
        self._greeted = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        standby = self._standby
        if len(standby.connections) >= standby.limits.connections_max:
            self._end(
                0,
                TooManyConnections(
                    f"{len(standby.connections)} connections are open; the limit is"
                    f" {standby.limits.connections_max} (connections_max)"
                ),
            )
            return
        standby.connections.add(self)
        timeout_s = standby.settings.hello_timeout_s
        late = HelloRequired(f"no HELLO within {timeout_s} s (hello_timeout_s)")
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end, 0, late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._standby.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """It asks faster than it reads."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._end(0, error)
            return
        for frame in frames:
            number = frame[1] if len(frame) > 1 else 0
            request = number if type(number) is int and 0 <= number <= REQUEST_MAX else 0
            try:
                self._answer(frame, request)
            except TickwheelError as error:
                if error.closes_connection or not self._greeted:
                    self._end(request, error)
                    return
                self._send((_ERROR, request, error.code, error.message))
        if self._decoder.error is not None:
            self._end(0, self._decoder.error)

    def _answer(self, frame: Frame, request: int) -> None:
        standby = self._standby
        if not self._greeted:
            hello = read_hello(frame, standby.settings)
            self._greeted = True
            if self._timer is not None:
                self._timer.cancel()
            answer = hello_answer(
                standby.settings, standby.limits, standby.now_ms(), 0, "standby", standby.active()
            )
            self._send((_OK, hello.request, answer))
        elif frame[0] == FrameType.STATUS:
            self._send((_OK, request, standby.status()))
        elif frame[0] in (FrameType.PING, FrameType.BYE):
            self._send((_OK, request, None))
        else:
            raise standby.refusal()

    def say_goodbye(self, message: str) -> None:
        self._send((int(FrameType.GOODBYE), NotActive.code, message))
        if self._transport is not None:
            self._transport.close()

    def _send(self, frame: tuple[Any, ...]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(frame))

    def _end(self, request: int, error: TickwheelError) -> None:
        self._send((_ERROR, request, error.code, error.message))
        if self._transport is not None:
            self._transport.close()
