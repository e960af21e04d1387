"""JOB_MAKE, JOB_PREVIEW, JOB_LIST, and JOB, which has a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.server import checks
from tickwheel.server.shard.operations.jobs import JOB_OPTIONS, LIST_OPTIONS, PREVIEW_OPTIONS
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer

VERBS = ("show", "cancel")


class Jobs:
    """What operators send about jobs."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def make(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, kind, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], JOB_OPTIONS)
        self._operations.make_job(peer.caller, request, frame[2], frame[3], options, now)

    def preview(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 3, "topic, kind, options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[4], PREVIEW_OPTIONS)
        self._operations.preview_job(peer.caller, request, frame[2], frame[3], options, now)

    def list_jobs(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[2], LIST_OPTIONS)
        self._operations.list_jobs(peer.caller, request, options)

    def act(self, peer: Peer, frame: Frame, now: Now) -> None:
        """One verb on one job."""
        decode.arity(frame, 2, "job, verb")
        request = decode.request_number(frame[1])
        job, verb = frame[2], frame[3]
        if type(verb) is not str or verb not in VERBS:
            checks.wrong("verb", f"one of {', '.join(VERBS)}", verb)
        if verb == "show":
            self._operations.show_job(peer.caller, request, job)
        else:
            self._operations.cancel_job(peer.caller, request, job, now)
