"""Sends encoded requests over several connections as fast as their windows allow.

One epoll loop, the same for every system: it counts replies while the clock runs and keeps
them for a check afterwards. Knows no protocol; that is in the counters it is given.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.payload import Encoded

READ_BYTES = 1 << 18
_STALL_S = 30.0

CountReplies = Callable[[bytes], int]


class Stream:
    """A connection with its load. ``answered`` is the number of replies."""

    def __init__(
        self, sock: socket.socket, load: Encoded, window: int, count_replies: CountReplies
    ) -> None:
        self.sock = sock
        self.window = window
        self.answered = 0
        self.replies: list[bytes] = []
        self.sendable = 0
        """Number of requests that may be sent, which ``pump`` raises with each answer."""
        self._view = memoryview(load.blob)
        self._ends = load.ends
        self._sent = 0
        self._count = count_replies
        self._step = max(1, window // 4)

    @property
    def total(self) -> int:
        return len(self._ends)

    def read(self) -> None:
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.replies.append(data)
        self.answered += self._count(data)

    def open_window(self) -> None:
        """Allow more requests, a quarter of the window at a time, to avoid small writes."""
        allowed = min(self.answered + self.window, self.total)
        if allowed - self.sendable >= self._step or allowed == self.total:
            self.sendable = allowed

    def send(self) -> bool:
        """Send the allowed requests. Return whether the socket did not accept all of them."""
        end = self._ends[self.sendable - 1] if self.sendable else 0
        if self._sent < end:
            with contextlib.suppress(BlockingIOError):
                self._sent += self.sock.send(self._view[self._sent : end])
        return self._sent < end


def pump(streams: Sequence[Stream]) -> float:
    """Send all requests and wait for all answers. Return the seconds until the last answer."""
    selector = selectors.DefaultSelector()
    waiting: dict[int, bool] = {}
    for stream in streams:
        stream.sock.setblocking(False)
        selector.register(stream.sock, selectors.EVENT_READ, stream)
        waiting[stream.sock.fileno()] = False
    unfinished = sum(1 for stream in streams if stream.total)
    started_s = time.perf_counter()
    for stream in streams:
        stream.open_window()
        _send(selector, waiting, stream)
    while unfinished:
        ready = selector.select(_STALL_S)
        if not ready:
            raise TimeoutError(f"no answer for {_STALL_S} s")
        for key, events in ready:
            stream = key.data
            if events & selectors.EVENT_READ:
                stream.read()
                stream.open_window()
                if stream.answered >= stream.total:
                    unfinished -= 1
                    selector.unregister(stream.sock)
                    continue
            _send(selector, waiting, stream)
    elapsed_s = time.perf_counter() - started_s
    selector.close()
    return elapsed_s


def timed_pump(streams: Sequence[Stream]) -> dict[str, Any]:
    """Call ``pump``. Return its seconds and the CPU time of this process."""
    cpu_s = time.process_time()
    elapsed_s = pump(streams)
    return {"elapsed_s": elapsed_s, "client_cpu_s": time.process_time() - cpu_s}


def _send(selector: selectors.BaseSelector, waiting: dict[int, bool], stream: Stream) -> None:
    more = stream.send()
    if more != waiting[stream.sock.fileno()]:
        waiting[stream.sock.fileno()] = more
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        selector.modify(stream.sock, events, stream)


def one_by_one(stream: Stream) -> list[float]:
    """Send each request after the previous answer. Return the seconds of each."""
    stream.sock.setblocking(True)
    took: list[float] = []
    while stream.answered < stream.total:
        stream.sendable = wanted = stream.answered + 1
        started_s = time.perf_counter()
        while stream.send():
            pass
        while stream.answered < wanted:
            stream.read()
        took.append(time.perf_counter() - started_s)
    return took
