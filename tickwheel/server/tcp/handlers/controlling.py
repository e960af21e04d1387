"""Commands by id or key, what is there, groups and settings: CANCEL to CONFIGURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server import checks
from tickwheel.server.shard.operations.controlling import KEY_OPTIONS
from tickwheel.server.shard.operations.listing import DEAD_OPTIONS, LOAD_OPTIONS, TASK_OPTIONS
from tickwheel.server.shard.operations.resetting import PREVIEW_OPTIONS, RESET_OPTIONS
from tickwheel.server.shard.operations.watching import CONSUMER_OPTIONS
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer


class Controlling:
    """The frames about tasks and groups."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    # --- by id ---------------------------------------------------------------------------------

    def cancel(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "ids")
        self._operations.cancel(peer.caller, decode.request_number(frame[1]), frame[2])

    def reschedule(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "items")
        self._operations.reschedule(peer.caller, decode.request_number(frame[1]), frame[2], now)

    def run_now(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "ids")
        self._operations.run_now(peer.caller, decode.request_number(frame[1]), frame[2], now)

    def look_up(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "ids")
        self._operations.look_up(peer.caller, decode.request_number(frame[1]), frame[2])

    # --- by key --------------------------------------------------------------------------------

    def cancel_key(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 2, "topic, key")
        request = decode.request_number(frame[1])
        self._operations.cancel_key(peer.caller, request, frame[2], frame[3])

    def reschedule_key(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 4, "topic, key, delay_ms, due_ms")
        request = decode.request_number(frame[1])
        _, _, topic, key, delay_ms, due_ms = frame
        self._operations.reschedule_key(peer.caller, request, topic, key, delay_ms, due_ms, now)

    def run_now_key(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 2, "topic, key")
        request = decode.request_number(frame[1])
        self._operations.run_now_key(peer.caller, request, frame[2], frame[3], now)

    def look_up_key(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, key, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], KEY_OPTIONS)
        self._operations.look_up_key(peer.caller, request, frame[2], frame[3], options)

    # --- dead letters --------------------------------------------------------------------------

    def requeue_dead(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "pairs")
        self._operations.requeue_dead(peer.caller, decode.request_number(frame[1]), frame[2])

    def delete_dead(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "pairs")
        self._operations.delete_dead(peer.caller, decode.request_number(frame[1]), frame[2])

    # --- groups --------------------------------------------------------------------------------

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

    # --- what is there -------------------------------------------------------------------------

    def list_tasks(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[2], TASK_OPTIONS)
        self._operations.list_tasks(peer.caller, request, options)

    def list_dead(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[2], DEAD_OPTIONS)
        self._operations.list_dead(peer.caller, request, options)

    def stats(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 0, "none")
        self._operations.stats(peer.caller, decode.request_number(frame[1]), now)

    def load(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[2], LOAD_OPTIONS)
        self._operations.load(peer.caller, request, options, now)

    def list_consumers(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[2], CONSUMER_OPTIONS)
        self._operations.consumers(peer.caller, request, options)

    def backup(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "name")
        self._operations.backup(peer.caller, decode.request_number(frame[1]), frame[2])
