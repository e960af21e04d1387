"""ENQUEUE, ONEWAY and BYE: the hot path of the first half."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from tickwheel.clock import Now
from tickwheel.engine.sessions import Session
from tickwheel.errors import (
    BadRequest,
    Draining,
    Overloaded,
    ProtocolError,
    Refused,
    RequestForgotten,
    StoreFull,
    WindowFull,
)
from tickwheel.model.records import Draft
from tickwheel.protocol.codec import Frame
from tickwheel.protocol.frames import REQUEST_MAX, FrameType
from tickwheel.server.shard.committer import STALLED
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp import decode as checks
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.replies import enqueue_reply

LOOK_AGAIN_MS = 1_000
"""When no session can be forgotten, none is looked for again so soon."""
_ENQUEUE = int(FrameType.ENQUEUE)


class Producing:
    """What producers send."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._core = shell.core
        self._intake = shell.engine.intake
        self._committer = shell.committer
        self._parse = shell.drafts.parse
        self._tasks_max = shell.limits.tasks_per_frame_max
        self._window_max = shell.limits.window_max
        self._body_max = shell.limits.body_bytes_max
        self._delay_max = shell.limits.delay_ms_max
        self._staged_bytes_max = shell.settings.staged_bytes_max
        self._look_again_ms = 0

    def second_hello(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        raise ProtocolError("HELLO was sent before on this connection")

    def enqueue(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """All tasks of the frame or none; answered when they are durable."""
        checks.arity(frame, 2, "floor, tasks")
        _, request, floor, tasks = frame
        if type(request) is not int or not 0 < request <= REQUEST_MAX:
            raise BadRequest(f"request must be 1 to {REQUEST_MAX}, not {checks.shown(request)}")
        session = peer.session
        if session is not None:
            if type(floor) is not int or not 0 <= floor <= request:
                raise BadRequest(
                    f"floor must be 0 to the request number {request}, not {checks.shown(floor)}"
                )
            if self._is_repeat(peer, session, request, floor):
                return
            self._check_outcomes(now.now_ms)
        self._check_door()
        drafts, size = self._parse(self._checked(tasks), now.now_ms)
        self._shell.act().intake.enqueue(peer, session, request, drafts, size, now.now_ms)

    def enqueue_run(self, peer: Connection, frames: Sequence[Frame], start: int, now: Now) -> int:
        """Take consecutive ENQUEUE frames of one plain task each in one go: the hot path.

        Returns the index of the first frame that it left alone, because something about it is
        not plain, new and right; ``enqueue`` says what, or deals with it.
        """
        session, core = peer.session, self._core
        if session is None or not self._is_clear():
            return start
        topics, body_max, delay_max = core.topics, self._body_max, self._delay_max
        now_ms, last, floor_max, size = now.now_ms, session.last, session.floor, 0
        requests: list[int] = []
        drafts: list[Draft] = []
        for frame in islice(frames, start, None):
            if len(frame) != 4:
                break
            kind, request, floor, tasks = frame
            if kind != _ENQUEUE or type(tasks) is not tuple or len(tasks) != 1:
                break
            task = tasks[0]
            if type(task) is not tuple or len(task) != 3:
                break
            topic, body, delay_ms = task
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
            drafts.append((topic, now_ms + delay_ms, body, None))
            size += len(body)
        session.raise_floor(floor_max)
        room = self._window_max - len(session.outcomes)
        room = max(0, min(room, self._room_for_outcomes(), core.room))
        if room < len(requests):
            del requests[room:], drafts[room:]
        if requests:
            self._intake.enqueue_singles(peer, session, requests, drafts, size, now_ms)
        return start + len(requests)

    def _is_clear(self) -> bool:
        """No reason to refuse any enqueue."""
        core = self._core
        return not (
            self._shell.draining
            or self._committer.full
            or self._committer.stalled
            or core.full_topics
            or self._intake.inflight_bytes >= self._staged_bytes_max
        )

    def _room_for_outcomes(self) -> int:
        core = self._core
        return core.config.session_outcomes_max - core.sessions.outcomes

    def _check_outcomes(self, now_ms: int) -> None:
        """One more must be remembered: a session that nobody is likely to resume makes room."""
        core = self._core
        while self._room_for_outcomes() <= 0 and now_ms >= self._look_again_ms:
            unused = core.sessions.make_room(now_ms, core.config.session_evict_idle_ms_min)
            if unused is None:
                # All have to be looked at to find none.
                self._look_again_ms = now_ms + LOOK_AGAIN_MS
                break
            self._shell.engine.forget_session(unused)
        if self._room_for_outcomes() <= 0:
            raise Overloaded(
                f"{core.sessions.outcomes} answers are remembered for resends; the limit is"
                f" {core.config.session_outcomes_max} (session_outcomes_max)"
            )

    def _is_repeat(self, peer: Connection, session: Session, request: int, floor: int) -> bool:
        if floor > session.floor:
            session.raise_floor(floor)
        outcome = session.outcomes.get(request)
        if outcome is not None:
            if self._shell.act().intake.repeat(peer, session, outcome):
                self._committer.reply(peer, enqueue_reply(*outcome))
            return True
        if request < session.floor:
            raise RequestForgotten(
                f"request {request} lies below the session's floor {session.floor}"
            )
        if len(session.outcomes) >= self._window_max:
            raise WindowFull(
                f"{len(session.outcomes)} requests from the floor {session.floor} up are"
                f" remembered; the limit is {self._window_max} (window_max)"
            )
        return False

    def _check_door(self) -> None:
        if self._shell.draining:
            raise Draining("the daemon is shutting down; nothing was kept")
        if self._committer.full:
            raise StoreFull(f"the store has no room: {self._committer.trouble}")
        if self._committer.stalled:
            raise Refused(f"{STALLED}: {self._committer.trouble}")
        if self._intake.inflight_bytes >= self._staged_bytes_max:
            raise Overloaded(
                f"{self._intake.inflight_bytes} bytes wait for the store; the limit is"
                f" {self._staged_bytes_max} (staged_bytes_max)"
            )

    def _checked(self, tasks: object) -> Sequence[Any]:
        if type(tasks) is not tuple or not 0 < len(tasks) <= self._tasks_max:
            found = checks.sequence(tasks, "tasks", self._tasks_max)
            raise BadRequest(f"tasks has {len(found)} elements; at least 1 is needed")
        return tasks

    def oneway(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """Like ENQUEUE without an answer and without a memory for resends."""
        checks.arity(frame, 1, "tasks")
        self._check_door()
        drafts, size = self._parse(self._checked(frame[2]), now.now_ms)
        self._shell.act().intake.enqueue(None, None, 0, drafts, size, now.now_ms, peer)

    def bye(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """The client will not resend: its session may be forgotten."""
        checks.arity(frame, 0, "none")
        request = checks.request_number(frame[1])
        session, peer.session = peer.session, None
        if session is not None:
            self._shell.leave_session(session, for_good=True)
        peer.ok(request, None)
