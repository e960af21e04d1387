"""Consumers that take deliveries over several connections and finish each at once.

Tickwheel's acks all that one read brought in one frame and waits for the (durable) answers.
beanstalkd's has ``reserve`` commands pipelined and sends a ``delete`` and the next ``reserve``
for each job, joined per read. Both run in one loop of one process.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from typing import Any

from benchmarks.payload import TOPIC
from benchmarks.pump import READ_BYTES
from benchmarks.scale import BODY_BYTES
from benchmarks.wire import OK, Control, WrongAnswer, connect, unpacker
from tickwheel.api.frames import FrameType
from tickwheel.protocol import encode

_DELIVER, _ACK = int(FrameType.DELIVER), int(FrameType.ACK)
GROUP = "bench"


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p99 and max, or nothing without values."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "p50": ordered[round(last * 0.50)],
        "p99": ordered[round(last * 0.99)],
        "max": ordered[last],
    }


class _Connection:
    """A subscribed connection. ``unanswered`` maps each unanswered ack request to its ids."""

    def __init__(self, port: int, prefetch: int) -> None:
        control = Control(port)
        # No credit before the answer is read: deliveries must not end in the control's buffer.
        try:
            control.ask(FrameType.SUBSCRIBE, 1, TOPIC, GROUP, 0, None)
        except BaseException:
            control.close()
            raise
        self.sock = control.sock
        self.may_gather: tuple[bool, ...] = (True,) if control.gathers_acks else ()
        self.reader = unpacker()
        self.request = 1_000
        self.unanswered: dict[int, int] = {}
        self.sock.sendall(encode((int(FrameType.PREFETCH), self.request, 1, prefetch)))
        self.unanswered[self.request] = 0


class TickwheelConsumer:
    """Acks ``count`` tasks, and records the lateness of tasks due at ``from_due_ms`` or later."""

    def __init__(self, port: int, connections: int, prefetch: int) -> None:
        self.acked = self.delivered = self.early = self.repeated = 0
        self.daemon_late_ms: list[float] = []
        self.client_late_ms: list[float] = []
        self.first_s = self.last_s = 0.0
        """Return the wall times of the first delivery and of the last confirmed ack."""
        self._selector = selectors.DefaultSelector()
        for _ in range(connections):
            peer = _Connection(port, prefetch)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.sock.close()
        self._selector.close()

    def run(self, count: int, timeout_s: float, from_due_ms: int = 0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.acked < count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.acked} of {count} acks in {timeout_s:.0f} s")
            for key, _ in self._selector.select(left_s):
                self._read(key.data, from_due_ms)

    def _read(self, peer: _Connection, from_due_ms: int) -> None:
        data = peer.sock.recv(READ_BYTES)
        received_s = time.time()
        if not data:
            raise ConnectionError("the daemon closed the connection")
        peer.reader.feed(data)
        ids: list[int] = []
        attempts: list[int] = []
        epoch = 0
        for frame in peer.reader:
            if frame[0] == _DELIVER:
                epoch = frame[2]
                self._note(frame[3], frame[4], received_s * 1000, from_due_ms)
                for delivery in frame[4]:
                    ids.append(delivery[0])
                    attempts.append(delivery[1])
            elif frame[0] == OK and frame[2] is None:
                acked = peer.unanswered.pop(frame[1])
                self.acked += acked
                if acked:
                    self.last_s = received_s
            else:
                raise WrongAnswer(f"{frame!r:.200}")
        if ids:
            if not self.first_s:
                self.first_s = received_s
            self.delivered += len(ids)
            self.repeated += len(ids) - attempts.count(1)
            peer.request += 1
            peer.unanswered[peer.request] = len(ids)
            ack = _ACK, peer.request, TOPIC, GROUP, epoch, ids, attempts, *peer.may_gather
            peer.sock.sendall(encode(ack))

    def _note(self, delivered_ms: int, items: Any, received_ms: float, from_due_ms: int) -> None:
        for item in items:
            due_ms = item[2]
            if delivered_ms < due_ms or received_ms < due_ms:
                self.early += 1
            if due_ms >= from_due_ms:
                self.daemon_late_ms.append(delivered_ms - due_ms)
                self.client_late_ms.append(received_ms - due_ms)


class BeanstalkdConsumer:
    """Reserves and deletes jobs, with ``window`` unanswered reserves per connection."""

    _REPLY = re.compile(
        rb"RESERVED (\d+) %d\r\n.{%d}\r\n|DELETED\r\n" % (BODY_BYTES, BODY_BYTES), re.DOTALL
    )

    def __init__(self, port: int, connections: int, window: int) -> None:
        self._socks = [connect(port) for _ in range(connections)]
        self._window = window
        self._rest = dict.fromkeys(self._socks, b"")
        self._to_reserve: dict[socket.socket, int] = {}
        self.deleted = 0

    def run(self, count: int, timeout_s: float) -> float:
        """Take and delete ``count`` ready jobs. Return the seconds."""
        selector = selectors.DefaultSelector()
        share, odd = divmod(count, len(self._socks))
        for index, sock in enumerate(self._socks):
            self._to_reserve[sock] = share + (index < odd)
            selector.register(sock, selectors.EVENT_READ)
        started_s = time.perf_counter()
        for sock in self._socks:
            sock.sendall(self._reserves(sock, self._window))
        while self.deleted < count:
            left_s = started_s + timeout_s - time.perf_counter()
            if left_s <= 0:
                raise TimeoutError(f"{self.deleted} of {count} deletes in {timeout_s:.0f} s")
            for key, _ in selector.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)
        elapsed_s = time.perf_counter() - started_s
        selector.close()
        return elapsed_s

    def _reserves(self, sock: socket.socket, wanted: int) -> bytes:
        number = min(wanted, self._to_reserve[sock])
        self._to_reserve[sock] -= number
        return b"reserve\r\n" * number

    def _read(self, sock: socket.socket) -> None:
        data = sock.recv(READ_BYTES)
        if not data:
            raise ConnectionError("beanstalkd closed the connection")
        data = self._rest[sock] + data
        end, reserved = 0, []
        for match in self._REPLY.finditer(data):
            if match.start() != end:
                raise WrongAnswer(f"{data[end : end + 100]!r}")
            end = match.end()
            if match[1] is None:
                self.deleted += 1
            else:
                reserved.append(match[1])
        self._rest[sock] = data[end:]
        if len(self._rest[sock]) > 2 * BODY_BYTES:
            raise WrongAnswer(f"{self._rest[sock][:100]!r}")
        if reserved:
            deletes = b"".join([b"delete %b\r\n" % job for job in reserved])
            sock.sendall(deletes + self._reserves(sock, len(reserved)))
