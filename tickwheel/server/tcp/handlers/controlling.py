"""Resets of groups: GROUP_RESET and GROUP_RESET_PREVIEW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server import checks
from tickwheel.server.shard.operations.resetting import PREVIEW_OPTIONS, RESET_OPTIONS
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer


class Controlling:
    """The frames about resets."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def reset_group(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], RESET_OPTIONS)
        self._operations.reset_group(peer.caller, request, frame[2], frame[3], options, now)

    def preview_reset(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, group, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], PREVIEW_OPTIONS)
        self._operations.preview_reset(peer.caller, request, frame[2], frame[3], options, now)
