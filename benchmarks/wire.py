"""Minimal clients of both protocols for loads: connect, count, check.

Replies are counted during the measurement and decoded completely afterwards. A run with a wrong
answer is not valid.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from benchmarks.payload import FIRST_REQUEST
from tickwheel.api.frames import PROTOCOL_VERSION, SESSION_BYTES, FrameType
from tickwheel.protocol import encode

_TIMEOUT_S = 60.0
OK, ERROR = int(FrameType.OK), int(FrameType.ERROR)


class WrongAnswer(Exception):
    """A server's answer was not a success."""


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def unpacker() -> Any:
    return msgpack.Unpacker(use_list=False, raw=False, max_buffer_size=1 << 28)


class Control:
    """A Tickwheel connection that sends a request and waits for its answer."""

    def __init__(self, port: int, *, session: bool = False) -> None:
        self.sock = connect(port)
        self._unpacker = unpacker()
        self._request = 0
        key = os.urandom(SESSION_BYTES) if session else None
        hello = {"v": PROTOCOL_VERSION, "session": key, "token": None, "client": "benchmarks"}
        answer = self.ask(FrameType.HELLO, hello)
        self.gathers_acks = answer.get("ack_gather_ms", 0) > 0
        """Whether an ACK can say that no caller waits for its answer."""

    def ask(self, kind: FrameType, *fields: object) -> Any:
        self._request += 1
        self.sock.sendall(encode((int(kind), self._request, *fields)))
        while True:
            for frame in self._unpacker:
                if frame[0] == OK and frame[1] == self._request:
                    return frame[2]
                raise WrongAnswer(f"{kind.name}: {frame!r:.200}")
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the daemon closed the connection")
            self._unpacker.feed(data)

    def close(self) -> None:
        self.sock.close()


class FrameCounter:
    """Counts complete msgpack values in a stream of bytes without decoding them."""

    def __init__(self) -> None:
        self._unpacker = unpacker()

    def __call__(self, data: bytes) -> int:
        self._unpacker.feed(data)
        skip, count = self._unpacker.skip, 0
        try:
            while True:
                skip()
                count += 1
        except msgpack.OutOfData:
            return count


def count_lines(data: bytes) -> int:
    """Replies of beanstalkd with one line each."""
    return data.count(b"\n")


def results(replies: Sequence[bytes], first: int = FIRST_REQUEST) -> Iterator[Any]:
    """Return the results of OK frames. They must be in the order of the requests, because the
    floors of later requests assume it."""
    reader = unpacker()
    expected = first
    for data in replies:
        reader.feed(data)
        for frame in reader:
            if frame[0] != OK or frame[1] != expected:
                raise WrongAnswer(f"request {expected}: {frame!r:.200}")
            expected += 1
            yield frame[2]


def check_inserted(replies: Sequence[bytes]) -> int:
    """Return the number of accepted puts. All answers must be ``INSERTED``."""
    lines = b"".join(replies).split(b"\r\n")
    if lines.pop() != b"":
        raise WrongAnswer("the last reply is cut")
    for line in lines:
        if not line.startswith(b"INSERTED "):
            raise WrongAnswer(f"put: {line!r:.200}")
    return len(lines)
