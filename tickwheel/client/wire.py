"""One TCP connection, on the client's side: bytes out, frames in. Knows no meaning of a frame.

Everything written in one step of the event loop leaves in one system call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from tickwheel.errors import ConnectionLost, ProtocolError, TickwheelError
from tickwheel.protocol.codec import Decoder, Frame

WRITE_BUFFER_BYTES = 1024 * 1024


class Wire(asyncio.Protocol):
    """``write`` whole frames; ``on_frames`` gets what comes; ``lost`` ends when it is over."""

    def __init__(self, on_frames: Callable[[list[Frame]], None], frame_bytes_max: int) -> None:
        self.lost: asyncio.Future[TickwheelError] = asyncio.get_running_loop().create_future()
        """Gets the reason, as a result."""
        self.on_frames = on_frames
        self.on_drained: Callable[[], None] = _nothing
        self.full = False
        """The peer does not take more at the moment."""
        self._decoder = Decoder(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.lost.done() and out:
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def close(self) -> None:
        """Flush, then close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- the event loop's ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            self.on_frames(self._decoder.feed(data))
        except ProtocolError as error:
            self._end(error)
            self.abort()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self.on_drained()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc is not None else ""
        self._end(ConnectionLost(f"the connection to the daemon broke{reason}"))

    def _end(self, error: TickwheelError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)


def _nothing(*_: Any) -> None:
    """Nobody has asked to be told yet."""
