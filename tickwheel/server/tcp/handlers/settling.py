"""ACK, NACK, REJECT, SNOOZE, EXTEND and RELEASE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer


class Settling:
    """The frames by which consumers settle deliveries."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def ack(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 5, "topic, group, epoch, ids, attempts")
        _, request, topic, group, epoch, ids, attempts = frame
        decode.request_number(request)
        self._operations.ack(peer.caller, request, topic, group, epoch, ids, attempts)

    def nack(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, items")
        _, request, topic, group, items = frame
        decode.request_number(request)
        self._operations.nack(peer.caller, request, topic, group, items, now)

    def reject(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, items")
        _, request, topic, group, items = frame
        decode.request_number(request)
        self._operations.reject(peer.caller, request, topic, group, items, now)

    def snooze(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, items")
        _, request, topic, group, items = frame
        decode.request_number(request)
        self._operations.snooze(peer.caller, request, topic, group, items, now)

    def extend(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 6, "topic, group, epoch, ids, attempts, lease_ms")
        _, request, topic, group, epoch, ids, attempts, lease_ms = frame
        decode.request_number(request)
        self._operations.extend(
            peer.caller, request, topic, group, epoch, ids, attempts, lease_ms, now
        )

    def release(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 5, "topic, group, epoch, ids, attempts")
        _, request, topic, group, epoch, ids, attempts = frame
        decode.request_number(request)
        self._operations.release(peer.caller, request, topic, group, epoch, ids, attempts, now)
