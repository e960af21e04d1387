"""SCHEDULE_PUT, SCHEDULE_LIST, and SCHEDULE, which has a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server import checks
from tickwheel.server.shard.operations.scheduling import LIST_OPTIONS, PUT_OPTIONS
from tickwheel.server.tcp import shared

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer

VERBS: dict[str, tuple[str, ...]] = {
    "show": ("next",),
    "pause": (),
    "resume": (),
    "run": (),
    "backfill": ("from_ms", "to_ms"),
    "delete": (),
}
"""The options that each verb on a schedule takes."""


class Scheduling:
    """The frames about schedules."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def put(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 2, "name, options")
        request = shared.request_number(frame[1])
        options = checks.options(frame[3], PUT_OPTIONS)
        self._operations.put_schedule(peer.caller, request, frame[2], options, now)

    def list_schedules(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 1, "options")
        request = shared.request_number(frame[1])
        options = checks.options(frame[2], LIST_OPTIONS)
        self._operations.list_schedules(peer.caller, request, options)

    def act(self, peer: Peer, frame: Frame, now: Now) -> None:
        """Handle SCHEDULE: one verb on one schedule."""
        shared.arity(frame, 3, "name, verb, options")
        request = shared.request_number(frame[1])
        name, verb = frame[2], frame[3]
        if type(verb) is not str or verb not in VERBS:
            checks.wrong("verb", f"one of {', '.join(VERBS)}", verb)
        options = checks.options(frame[4], VERBS[verb])
        caller, operations = peer.caller, self._operations
        if verb == "show":
            operations.show_schedule(caller, request, name, options, now)
        elif verb == "run":
            operations.run_schedule(caller, request, name, now)
        elif verb == "backfill":
            operations.backfill_schedule(caller, request, name, options, now)
        elif verb == "delete":
            operations.delete_schedule(caller, request, name)
        else:
            operations.pause_schedule(caller, request, name, paused=verb == "pause")
