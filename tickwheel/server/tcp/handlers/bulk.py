"""BULK_MAKE, BULK_PREVIEW, BULK_LIST, and BULK, which has a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server import checks
from tickwheel.server.shard.operations.bulk import BULK_OPTIONS, LIST_OPTIONS, PREVIEW_OPTIONS
from tickwheel.server.tcp import shared

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer

VERBS = ("show", "cancel")


class Bulks:
    """The frames about bulk operations."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def make(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 3, "topic, kind, options")
        request = shared.request_number(frame[1])
        options = checks.options(frame[4], BULK_OPTIONS)
        self._operations.make_bulk(peer.caller, request, frame[2], frame[3], options, now)

    def preview(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 3, "topic, kind, options")
        request = shared.request_number(frame[1])
        options = checks.options(frame[4], PREVIEW_OPTIONS)
        self._operations.preview_bulk(peer.caller, request, frame[2], frame[3], options, now)

    def list_bulk(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 1, "options")
        request = shared.request_number(frame[1])
        options = checks.options(frame[2], LIST_OPTIONS)
        self._operations.list_bulk(peer.caller, request, options)

    def act(self, peer: Peer, frame: Frame, now: Now) -> None:
        """Handle BULK: one verb on one bulk operation."""
        shared.arity(frame, 2, "bulk operation, verb")
        request = shared.request_number(frame[1])
        bulk, verb = frame[2], frame[3]
        if type(verb) is not str or verb not in VERBS:
            checks.wrong("verb", f"one of {', '.join(VERBS)}", verb)
        if verb == "show":
            self._operations.show_bulk(peer.caller, request, bulk)
        else:
            self._operations.cancel_bulk(peer.caller, request, bulk, now)
