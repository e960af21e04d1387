"""SUBSCRIBE, PREFETCH, UNSUBSCRIBE and PULL, and the frames that deliveries become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tickwheel.api.frames import FrameType
from tickwheel.errors import NotFound
from tickwheel.protocol.codec import encode
from tickwheel.server import checks
from tickwheel.server.shard.groups import OF_GROUPS
from tickwheel.server.tcp import decode
from tickwheel.server.tcp.encode import delivery_items

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.topics import Item
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer

_DELIVER, _OK, _ENDED = int(FrameType.DELIVER), int(FrameType.OK), int(FrameType.ENDED)
_OPTIONS = ("lease_ms", "retry", "ack", "broadcast", *OF_GROUPS)
_PULL_OPTIONS = ("lease_ms", *OF_GROUPS)


class Consuming:
    """The frames by which consumers get tasks."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def subscribe(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 5, "sub, topic, group, prefetch, options")
        request, number, topic, group, prefetch, options = frame[1:]
        decode.request_number(request)
        wanted = checks.options(options, _OPTIONS)
        sink = SubscriptionSink(peer, number)
        self._operations.subscribe(
            peer.caller, request, number, topic, group, prefetch, wanted, sink, now
        )

    def prefetch(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 2, "sub, prefetch")
        request = decode.request_number(frame[1])
        self._operations.set_prefetch(peer.caller, request, frame[2], frame[3])

    def unsubscribe(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "sub")
        request = decode.request_number(frame[1])
        self._operations.unsubscribe(peer.caller, request, frame[2])

    def pull(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 5, "topic, group, max, wait_ms, options")
        request, topic, group, count, wait_ms, options = frame[1:]
        decode.request_number(request)
        wanted = checks.options(options, _PULL_OPTIONS)
        sink = PullSink(peer, request)
        self._operations.pull(peer.caller, request, topic, group, count, wait_ms, wanted, sink, now)


class SubscriptionSink:
    """A sink that makes DELIVER frames of deliveries."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._number = number

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        frame = (_DELIVER, self._number, epoch, now_ms, delivery_items(items))
        self._peer.send(encode(frame))

    def check(self, item: Item) -> None:
        encode(delivery_items([item]))

    def ended(self, code: str, message: str) -> None:
        self._peer.send(encode((_ENDED, self._number, code, message)))

    def closed(self) -> None:
        """Nothing has to be stopped."""


class PullSink:
    """A sink that makes the answer to a PULL of deliveries."""

    def __init__(self, peer: Peer, request: int) -> None:
        self._peer = peer
        self._request = request

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        frame = (_OK, self._request, (epoch, now_ms, delivery_items(items)))
        self._peer.send(encode(frame))

    def check(self, item: Item) -> None:
        encode(delivery_items([item]))

    def ended(self, code: str, message: str) -> None:
        self._peer.caller.refuse(self._request, NotFound(message))

    def closed(self) -> None:
        """Nothing has to be stopped."""
