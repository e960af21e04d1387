"""A client of blocking sockets and frames that sends exactly what a test says."""

from __future__ import annotations

import os
import socket
from typing import Any, Self

from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.protocol import Decoder, Frame, encode

TIMEOUT_S = 30.0
"""Maximum seconds to wait; only a failing test waits this long."""


class Raw:
    """A connection. ``call`` numbers requests; ``send_bytes`` sends any bytes."""

    def __init__(self, port: int, *, hello: bool = True, **options: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._decoder = Decoder(64 * 1024 * 1024)
        self._frames: list[Frame] = []
        self.request = 0
        self.limits: dict[str, int] = {}
        self.hello_answer: dict[str, Any] = {}
        if hello:
            try:
                answer = self.hello(**options)
                assert answer[0] == FrameType.OK, answer
            except BaseException:
                self.socket.close()
                raise
            self.hello_answer = answer[2]
            self.limits = answer[2]["limits"]

    def hello(self, **options: Any) -> Frame:
        fields = {"v": PROTOCOL_VERSION, "session": os.urandom(16), "token": None, "client": "raw"}
        return self.call(FrameType.HELLO, fields | options)

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, kind: int, *fields: Any) -> int:
        """Send a frame with the next request number and return that number."""
        self.request += 1
        self.send_bytes(encode((int(kind), self.request, *fields)))
        return self.request

    def call(self, kind: int, *fields: Any) -> Frame:
        """Send a request and return its OK or ERROR. Frames received before it are kept for
        ``next``."""
        return self.answer(self.send(kind, *fields))

    def answer(self, request: int) -> Frame:
        passed: list[Frame] = []
        while True:
            frame = self.next()
            if frame[0] in (FrameType.OK, FrameType.ERROR) and frame[1] in (request, 0):
                self._frames[:0] = passed
                return frame
            passed.append(frame)

    def enqueue(self, *tasks: Any) -> Frame:
        return self.call(FrameType.ENQUEUE, self.request + 1, tasks)

    def next(self) -> Frame:
        """Return the next frame. Raise EOFError if the daemon closed, TimeoutError if it is
        silent."""
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def closed(self) -> bool:
        """Return whether the daemon closes the connection after its remaining frames."""
        try:
            while True:
                self.next()
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
