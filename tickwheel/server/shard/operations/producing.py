"""Enqueues: the hot path of the first half."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.errors import (
    BadRequest,
    Draining,
    IdempotencyKeyReused,
    Overloaded,
    Refused,
    RequestForgotten,
    StoreFull,
    TooManySessions,
    WindowFull,
)
from tickwheel.model.records import ID_STEP, size_of
from tickwheel.server import checks
from tickwheel.server.shard.coalescing import Waiting
from tickwheel.server.shard.committer import STALLED

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.enqueue import Rules
    from tickwheel.engine.sessions import Session, StoredAnswer
    from tickwheel.model.records import NewTask, TaskSnapshot
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.coalescing import Coalescing
    from tickwheel.server.shard.new_tasks import NewTasks
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.quotas import Quota

LOOK_AGAIN_MS = 1_000
"""How soon, in ms, sessions are searched again after none could be forgotten."""


class PlainTasks(NamedTuple):
    """Which tasks a transport may hand to ``enqueue_plain``: nothing but a body for a known topic,
    and a delay, and perhaps a key, within these limits (``new_tasks.key_alone``)."""

    topics: Container[str]
    body_bytes_max: int
    delay_ms_max: int
    key_length_max: int


class Producing:
    """The operations of producers."""

    def __init__(self, parts: Parts, new_tasks: NewTasks, coalescing: Coalescing) -> None:
        self._parts = parts
        self._new_tasks = new_tasks
        self._coalescing = coalescing
        self._core = parts.core
        self._intake = parts.engine.intake
        self._committer = parts.committer
        self._parse = new_tasks.parse
        self._columns = new_tasks.columns
        self._tasks_max = parts.limits.tasks_per_frame_max
        self._window_max = parts.limits.window_max
        self._outcomes_max = parts.core.config.outcomes_per_session_max
        self._staged_bytes_max = parts.settings.staged_bytes_max
        self._look_again_ms = 0
        self.plain_tasks = PlainTasks(
            parts.core.topics,
            parts.limits.body_bytes_max,
            parts.limits.delay_ms_max,
            new_tasks.key_alone_max,
        )

    def enqueue(
        self, caller: Caller, request: int, floor: object, tasks: Sequence[Any], now: Now
    ) -> None:
        """All of the tasks or none; the sink's ``accepted`` gets their ids when they are durable.

        A task is ``(topic, body, delay_ms)``, or that and a map of options. ``request``, in
        ascending order, makes a resend harmless for a caller with a session; below ``floor`` the
        caller has seen every answer. Raises BadRequest, LimitExceeded, BodyTooLarge, DueTooFar,
        BacklogFull, WindowFull, RequestForgotten, StoreFull, Refused, Overloaded, Draining.
        """
        if self._was_answered(caller, request, floor, now, tasks):
            return
        new_tasks, size, rules = self._parse(self.checked(tasks), now.now_ms)
        if caller.quota is not None:
            self._charge(caller.quota, len(new_tasks), size)
        placed, intake = self._new_tasks.has_windows, self._parts.border.act().intake
        if placed:
            new_tasks = intake.place(new_tasks, now.now_ms)
        if rules is not None:
            self._coalesce(caller, request, new_tasks, rules, size, answered=True)
            return
        sink, session = caller.replies, caller.session
        intake.enqueue(sink, session, request, new_tasks, size, now.now_ms, placed=placed)

    def enqueue_once(
        self, caller: Caller, key: bytes, fingerprint: int, tasks: Sequence[Any], now: Now
    ) -> None:
        """``enqueue`` by a caller without a session of its own. ``key`` is the session of this one
        request, ``fingerprint`` of its payload is its number: the same again is a resend. Raises
        as ``enqueue``, and TooManySessions, IdempotencyKeyReused."""
        caller.session = session = self._session(key, now.now_ms)
        if session.requests and not session.knows(fingerprint):
            raise IdempotencyKeyReused("the key came before with another payload; choose a new one")
        self.enqueue(caller, fingerprint, 0, tasks, now)

    def _coalesce(
        self,
        caller: Caller,
        request: int,
        new_tasks: list[NewTask],
        rules: Rules,
        size_bytes: int,
        *,
        answered: bool,
    ) -> None:
        """Queue tasks with rules for pending keys."""
        parts = self._parts

        def check() -> None:
            self._check_open()
            self._new_tasks.check_room(new_tasks)
            if caller.quota is not None:
                caller.quota.check_count(self._core, len(new_tasks))
            if answered and caller.session is not None:
                self._check_outcomes(caller.session, parts.clock.read().now_ms, len(new_tasks))

        self._coalescing.put(
            Waiting(caller, request, new_tasks, rules, size_bytes, check, answered=answered)
        )

    def enqueue_columns(
        self,
        caller: Caller,
        request: int,
        floor: object,
        topic: object,
        bodies: object,
        delays_ms: object,
        now: Now,
    ) -> None:
        """``enqueue`` of tasks of one topic that differ in body and delay only; ``delays_ms``:
        one for all, or one each. Raises as ``enqueue``."""
        if self._was_answered(caller, request, floor, now):
            return
        many = self.checked(bodies, "bodies")
        new_tasks, size = self._columns(topic, many, delays_ms, now.now_ms)
        if caller.quota is not None:
            self._charge(caller.quota, len(new_tasks), size)
        intake = self._parts.border.act().intake
        intake.enqueue(caller.replies, caller.session, request, new_tasks, size, now.now_ms)

    def _was_answered(
        self, caller: Caller, request: int, floor: object, now: Now, tasks: Sequence[Any] = ()
    ) -> bool:
        """Whether the request is a resend, and was answered. Raises what keeps a new one out."""
        session = caller.session
        if session is not None:
            if type(floor) is not int or not 0 <= floor <= request:
                raise BadRequest(
                    f"floor must be 0 to the request number {request}, not {checks.shown(floor)}"
                )
            if self._is_repeat(caller, session, request, floor, tasks):
                return True
            self._check_outcomes(session, now.now_ms)
        self.check_door()
        if caller.quota is not None:
            caller.quota.check(self._core, now.mono_ms)
        return False

    def _charge(self, quota: Quota, count: int, size_bytes: int) -> None:
        """Charge a quota, as the last check before tasks are taken. Raises Overloaded."""
        quota.check_count(self._core, count)
        quota.charge(count, size_bytes)

    def enqueue_unanswered(self, caller: Caller, tasks: Sequence[Any], now: Now) -> None:
        """``enqueue`` without an answer and without a memory for resends."""
        self.check_door()
        if caller.quota is not None:
            caller.quota.check(self._core, now.mono_ms)
        new_tasks, size, rules = self._parse(self.checked(tasks), now.now_ms)
        if caller.quota is not None:
            self._charge(caller.quota, len(new_tasks), size)
        intake = self._parts.border.act().intake
        if self._new_tasks.has_windows:
            new_tasks = intake.place(new_tasks, now.now_ms)
        if rules is not None:
            self._coalesce(caller, 0, new_tasks, rules, size, answered=False)
            return
        intake.enqueue(None, None, 0, new_tasks, size, now.now_ms, caller.replies)

    def enqueue_plain(
        self,
        caller: Caller,
        requests: list[int],
        floor: int,
        new_tasks: list[NewTask],
        size_bytes: int,
        now_ms: int,
        *,
        keyed: bool = False,
    ) -> int:
        """``enqueue`` of many requests in one go, one plain task each: see ``PlainTasks``.

        The requests ascend and are above ``session.last``, so that none is a resend; ``floor`` is
        that of the last one; ``keyed``: some have a key. Returns how many of them were taken;
        ``enqueue`` says of the next one why it was not.
        """
        session, core = caller.session, self._core
        if session is None or not self._is_clear():
            return 0
        if keyed and core.ruled_topics:
            return 0
        session.raise_floor(floor)
        room = self._window_max - session.requests
        room = min(room, self._outcomes_max - session.weight)
        room = max(0, min(room, self._room_for_outcomes(), core.room))
        quota = caller.quota
        if quota is not None:
            room = max(0, min(room, quota.room(core, self._parts.clock.read().mono_ms)))
        if room < len(requests):
            size_bytes -= sum(size_of(*new_task[2:]) for new_task in new_tasks[room:])
            del requests[room:], new_tasks[room:]
        if requests:
            if quota is not None:
                quota.charge(len(requests), size_bytes)
            sink = caller.replies
            self._intake.enqueue_singles(
                sink, session, requests, new_tasks, size_bytes, now_ms, keyed=keyed
            )
        return len(requests)

    # --- sessions ------------------------------------------------------------------------------

    def join(self, caller: Caller, session: bytes, now_ms: int) -> None:
        """Remember the caller's enqueues in a session, for resends. Raises TooManySessions."""
        caller.session = self._session(session, now_ms)

    def _session(self, key: bytes, now_ms: int) -> Session:
        """The session of one more connection. Raises TooManySessions."""
        engine = self._parts.border.act()
        sessions = self._core.sessions
        session = sessions.open(key, now_ms)
        if session is None:
            unused = sessions.make_room(now_ms, self._core.config.session_evict_idle_ms_min)
            if unused is not None:
                engine.forget_session(unused)
                session = sessions.open(key, now_ms)
        if session is None:
            raise TooManySessions(
                f"{len(sessions)} sessions are remembered; the limit is"
                f" {self._parts.settings.sessions_max} (sessions_max)"
            )
        session.connections += 1
        return session

    def end_session(self, caller: Caller, *, for_good: bool = False) -> None:
        """Take the caller's session from it. One that was never used, or is left for good, is
        forgotten; that costs no commit of its own: it goes with the next one."""
        session, caller.session = caller.session, None
        if session is None:
            return
        engine = self._parts.border.act()
        session.connections -= 1
        if not session.connections and (for_good or not (session.floor or session.answers)):
            engine.forget_session(session.key)

    def leave(self, caller: Caller, request: int) -> None:
        """Let the caller go, who will not resend: its session may be forgotten."""
        caller.has_left = True
        self.end_session(caller, for_good=True)
        self._committer.reply(caller.replies, request, None)

    def _is_clear(self) -> bool:
        """Whether no enqueue has to be refused."""
        core = self._core
        return not (
            self._parts.draining
            or self._committer.full
            or self._committer.stalled
            or core.full_topics
            or core.closing_topics
            or self._intake.inflight_bytes >= self._staged_bytes_max
        )

    def check_door(self) -> None:
        """Raises what keeps every new task out."""
        self._check_open()
        if self._intake.inflight_bytes >= self._staged_bytes_max:
            raise Overloaded(
                f"{self._intake.inflight_bytes} bytes wait for the store; the limit is"
                f" {self._staged_bytes_max} (staged_bytes_max)"
            )

    def _check_open(self) -> None:
        """Raises what keeps out tasks, also of requests that have waited."""
        if self._parts.draining:
            raise Draining("the daemon is shutting down; nothing was kept")
        if self._committer.full:
            raise StoreFull(f"the store has no room: {self._committer.trouble}")
        if self._committer.stalled:
            raise Refused(f"{STALLED}: {self._committer.trouble}")

    def checked(self, tasks: object, field: str = "tasks") -> Sequence[Any]:
        """The tasks, if one request may have so many. Raises BadRequest, LimitExceeded."""
        if type(tasks) is not tuple or not 0 < len(tasks) <= self._tasks_max:
            found = checks.sequence(tasks, field, self._tasks_max)
            raise BadRequest(f"{field} has {len(found)} elements; at least 1 is needed")
        return tasks

    # --- resends -------------------------------------------------------------------------------

    def _is_repeat(
        self, caller: Caller, session: Session, request: int, floor: int, tasks: Sequence[Any]
    ) -> bool:
        if floor > session.floor:
            session.raise_floor(floor)
        answer = session.answers.get(request)
        if answer is not None:
            if request in session.merged:
                self._coalescing.repeat(caller, session, answer)
            elif self._parts.border.act().intake.repeat(caller.replies, session, answer):
                if type(tasks) is tuple and any(map(_has_window, tasks)):
                    self._answer_with_dues(caller, answer)
                else:
                    self._answer_again(caller, answer)
            return True
        if request in session.under_way:
            self._coalescing.follow(caller, session, request)
            return True
        if request < session.floor:
            raise RequestForgotten(
                f"request {request} lies below the session's floor {session.floor}"
            )
        if session.requests >= self._window_max:
            raise WindowFull(
                f"{session.requests} requests from the floor {session.floor} up are remembered or"
                f" under way; the limit is {self._window_max} (window_max)"
            )
        return False

    def _answer_again(self, caller: Caller, answer: StoredAnswer) -> None:
        request, first, count, accepted_ms = answer
        ids = tuple(range(first, first + count * ID_STEP, ID_STEP))
        self._committer.reply(caller.replies, request, (accepted_ms, ids))

    def _answer_with_dues(self, caller: Caller, answer: StoredAnswer) -> None:
        """Answer with the chosen due times, which stand in the tasks; None for ended ones."""
        request, first, count, accepted_ms = answer
        ids = tuple(range(first, first + count * ID_STEP, ID_STEP))
        dues_ms: list[int | None] = [None] * count

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            for index in some:
                found = known.get(ids[index])
                dues_ms[index] = None if found is None else found.row.due_ms

        def done() -> None:
            value = accepted_ms, ids, {"dues_ms": dues_ms}
            self._committer.reply(caller.replies, request, value)

        self._parts.commands.put(caller, request, ids, act, done)

    def _room_for_outcomes(self) -> int:
        core = self._core
        return core.config.session_outcomes_max - core.sessions.answers

    def _check_outcomes(self, session: Session, now_ms: int, count: int = 1) -> None:
        """Make room for ``count`` more answers to remember: unlikely sessions are forgotten."""
        core = self._core
        if session.weight + count > self._outcomes_max:
            raise Overloaded(
                f"{session.weight} answers of this session are remembered for resends, and {count}"
                f" would be more; the limit is {self._outcomes_max} (outcomes_per_session_max):"
                " raise the floor"
            )
        while self._room_for_outcomes() < count and now_ms >= self._look_again_ms:
            unused = core.sessions.make_room(now_ms, core.config.session_evict_idle_ms_min)
            if unused is None:
                # All have to be looked at to find none.
                self._look_again_ms = now_ms + LOOK_AGAIN_MS
                break
            self._parts.engine.forget_session(unused)
        if self._room_for_outcomes() < count:
            raise Overloaded(
                f"{core.sessions.answers} answers are remembered for resends; the limit is"
                f" {core.config.session_outcomes_max} (session_outcomes_max)"
            )


def _has_window(task: Any) -> bool:
    is_long = type(task) is tuple and len(task) == 4
    return is_long and type(task[3]) is dict and "within_ms" in task[3]
