"""ENQUEUE and ONEWAY."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.api.frames import REQUEST_MAX, FrameType
from tickwheel.errors import BadRequest
from tickwheel.model.records import keys_bytes
from tickwheel.server import checks
from tickwheel.server.shard.new_tasks import key_alone
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.model.records import NewTask
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer

_ENQUEUE = int(FrameType.ENQUEUE)


class Producing:
    """The frames of producers."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._plain = operations.plain_tasks

    def enqueue(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 2, "floor, tasks")
        _, request, floor, tasks = frame
        _check_number(request)
        self._operations.enqueue(peer.caller, request, floor, tasks, now)

    def enqueue_columns(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 4, "floor, topic, bodies, delays_ms")
        _, request, floor, topic, bodies, delays_ms = frame
        _check_number(request)
        self._operations.enqueue_columns(peer.caller, request, floor, topic, bodies, delays_ms, now)

    def enqueue_plain(
        self, peer: Peer, frames: Sequence[Frame], start: int, stop: int, now: Now
    ) -> int:
        """Take consecutive ENQUEUE frames of one plain task each in one go, those before ``stop``:
        the hot path.

        Returns the index of the first frame that it left alone, because something about it is
        not plain, new and right; ``enqueue`` says what, or deals with it.
        """
        session = peer.caller.session
        if session is None:
            return start
        topics, body_max, delay_max, key_max = self._plain
        now_ms, last, floor_max, size = now.now_ms, session.last, session.floor, 0
        requests: list[int] = []
        new_tasks: list[NewTask] = []
        keys: list[str] = []
        for frame in islice(frames, start, stop):
            if len(frame) != 4:
                break
            kind, request, floor, tasks = frame
            if kind != _ENQUEUE or type(tasks) is not tuple or len(tasks) != 1:
                break
            task, options = tasks[0], None
            if type(task) is not tuple:
                break
            if len(task) == 3:
                topic, body, delay_ms = task
            else:
                if (options := key_alone(task, key_max)) is None:
                    break
                topic, body, delay_ms = task[:3]
            if not (
                type(request) is int
                and last < request <= REQUEST_MAX
                and type(floor) is int
                and 0 <= floor <= request
                and type(body) is bytes
                and type(delay_ms) is int
                and 0 <= delay_ms <= delay_max
                and len(body) <= body_max
                and type(topic) is str
                and topic in topics
            ):
                break
            last = request
            if floor > floor_max:
                floor_max = floor
            requests.append(request)
            new_tasks.append((topic, now_ms + delay_ms, body, options))
            size += len(body)
            if options is not None:
                keys.append(task[3]["key"])
        if not requests:
            return start
        size += keys_bytes(keys)  # the decoder has let nothing through that is no UTF-8
        taken: int = self._operations.enqueue_plain(
            peer.caller, requests, floor_max, new_tasks, size, now_ms, keyed=bool(keys)
        )
        return start + taken

    def oneway(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "tasks")
        self._operations.enqueue_unanswered(peer.caller, frame[2], now)


def _check_number(request: object) -> None:
    if type(request) is not int or not 0 < request <= REQUEST_MAX:
        raise BadRequest(f"request must be 1 to {REQUEST_MAX}, not {checks.shown(request)}")
