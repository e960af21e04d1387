"""HELD_KEYS, KEY_LINES, RELEASE_KEY and SKIP_KEY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server import checks
from tickwheel.server.shard.operations.lining import LINE_OPTIONS
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer


class Lining:
    """The frames about order keys and fair shares."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def held_keys(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], LINE_OPTIONS)
        self._operations.held_keys(peer.caller, request, frame[2], frame[3], options)

    def key_lines(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], LINE_OPTIONS)
        self._operations.key_lines(peer.caller, request, frame[2], frame[3], options)

    def release_key(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 4, "topic, group, ids, key")
        request = decode.request_number(frame[1])
        self._operations.release_key(peer.caller, request, *frame[2:6])

    def skip_key(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 4, "topic, group, ids, key")
        request = decode.request_number(frame[1])
        self._operations.skip_key(peer.caller, request, *frame[2:6])
