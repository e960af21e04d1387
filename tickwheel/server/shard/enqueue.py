"""Enqueues: the hot path of the first half; and those whose tasks have a rule for a pending key.

The latter are decided of in their order of arrival, each in one step of the loop in which
everything is known that it rests on. What has the key is found in the index of keys, whose rows
have to be read; so these requests wait in a queue of their own, and plain ones overtake them. One
that needs no row, and has nobody before it, is decided of at once. When something came between a
read and its decision the read is done again, and while a task with the key is on its way to the
store its batch is waited for. Invariants: requests are counted in ``inflight_bytes`` from here on,
as if they were staged. The number of one that waits is taken (``Session.under_way``): what comes
again under it gets the answer of the first, and another request is refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count as count_from
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.frames import SESSION_BYTES
from tickwheel.api.tasks import once_parts, rest_key
from tickwheel.engine.enqueue import Request
from tickwheel.errors import (
    BadRequest,
    Conflict,
    Draining,
    IdempotencyKeyReused,
    LimitExceeded,
    Overloaded,
    Refused,
    RequestForgotten,
    RowMissing,
    StoreFull,
    TickwheelError,
    TooManySessions,
    WindowFull,
)
from tickwheel.model.policies import DUE, Merged, Merging
from tickwheel.model.records import ID_STEP, Once, size_of
from tickwheel.server import checks
from tickwheel.server.shard.callers import OUTBOUND
from tickwheel.server.shard.committer import STALLED
from tickwheel.server.shard.reads import IDS_PER_READ_MAX, NO_LIMIT

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.enqueue import Rules, Wanted
    from tickwheel.engine.sessions import ReplySink, Session, StoredAnswer
    from tickwheel.model.records import NewTask, OncePart, TaskOptions, TaskSnapshot
    from tickwheel.server.shard.callers import Caller, Quota
    from tickwheel.server.shard.new_tasks import NewTasks
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.reads import View

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
        self,
        caller: Caller,
        key: bytes,
        fingerprint: int,
        tasks: Sequence[Any],
        now: Now,
        *,
        is_part: bool = False,
    ) -> None:
        """``enqueue`` by a caller without a session of its own. ``key`` names the session of this
        one request, ``fingerprint`` of its payload is its number: the same again is a resend.
        ``is_part``: these are the tasks of one shard of several; the home of the key may have none
        of them, and remembers that it came. Raises as ``enqueue``, and TooManySessions,
        IdempotencyKeyReused."""
        of_key, core = key, self._core
        # What came to a shard of several alone stays with it, and so does what an earlier release
        # has remembered under the key itself.
        if is_part or (core.versions.shards == 1 and core.sessions.get(key) is None):
            of_key = _once_session(caller, key)
        caller.session = session = self._session(of_key, now.now_ms)
        if session.requests and not session.knows(fingerprint):
            raise IdempotencyKeyReused("the key came before with another payload; choose a new one")
        if session.once.shards:
            self._answer_of_former_shards(caller, fingerprint, session.once, tasks, is_part=is_part)
            return
        if of_key != key:
            session.once = Once(key)
        if tasks == () and self._core.versions.shards > 1:
            if not self._was_answered(caller, fingerprint, 0, now, tasks):
                intake = self._parts.border.act().intake
                intake.remember(caller.replies, session, fingerprint, now.now_ms)
            return
        self.enqueue(caller, fingerprint, 0, tasks, now)

    def _answer_of_former_shards(
        self, caller: Caller, request: int, once: Once, tasks: Sequence[Any], *, is_part: bool
    ) -> None:
        """Answer a request that was taken while there were other shards. Whoever asks several gets
        the answer of each of those, to put it together. Raises Conflict where the former shards
        have not taken all of it."""
        if is_part:
            parts = tuple((part.shard, *_former_answer(part)) for part in once.parts)
            told = {"shards": once.shards, "parts": parts}
            self._committer.reply(caller.replies, request, (0, (), {"before": told}))
            return
        found = dict[int, tuple[int, tuple[str, int | None]]]()
        rest, session = list(range(len(tasks))), caller.session
        while rest and session is not None and session.knows(request):
            once, places = session.once, rest
            answers = {part.shard: _former_answer(part) for part in once.parts}
            of_shards = once_parts([tasks[place] for place in places], once.key, once.shards or 1)
            for shard in of_shards.keys() & answers.keys():
                at_ms, *columns = answers[shard]
                for index, task_id, (word, due_ms) in zip(of_shards[shard], *columns, strict=True):
                    delay_ms = tasks[places[index]][2]
                    if due_ms is None and delay_ms is not None:
                        due_ms = at_ms + delay_ms
                    found[places[index]] = task_id, (word, due_ms)
            rest = [place for place in places if place not in found]
            session = self._core.sessions.get(_once_session(caller, rest_key(once.key)))
        if rest:
            raise Conflict(
                f"{len(found)} of the {len(tasks)} tasks of this idempotency-key were stored before"
                " its shards became one; send the others with another key"
            )
        ids, outcomes = zip(*(found[index] for index in range(len(tasks))), strict=True)
        accepted_ms = min(part.accepted_ms for part in once.parts)
        value = accepted_ms, ids, {"outcomes": outcomes}
        self._committer.reply(caller.replies, request, value)

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
        if self._was_answered(caller, request, floor, now, bodies, topic):
            return
        many = self.checked(bodies, "bodies")
        new_tasks, size = self._columns(topic, many, delays_ms, now.now_ms)
        self._charge(caller.quota, len(new_tasks), size)
        intake = self._parts.border.act().intake
        intake.enqueue(caller.replies, caller.session, request, new_tasks, size, now.now_ms)

    def _was_answered(
        self,
        caller: Caller,
        request: int,
        floor: object,
        now: Now,
        tasks: object,
        topic: object = None,
    ) -> bool:
        """Whether the request is a resend, and was answered. Raises what keeps a new one out.
        ``topic``: of all, where ``tasks`` are bodies alone."""
        session = caller.session
        if session is not None:
            if type(floor) is not int or not 0 <= floor <= request:
                raise BadRequest(
                    f"floor must be 0 to the request number {request}, not {checks.shown(floor)}"
                )
            if self._is_repeat(caller, session, request, floor, tasks, topic):
                return True
            self._check_outcomes(session, now.now_ms)
        self.check_door()
        if caller.quota is not None:
            caller.quota.check(self._core, now.mono_ms)
        return False

    def _charge(self, quota: Quota | None, count: int, size_bytes: int) -> None:
        """Charge a quota, as the last check before tasks are taken. Raises Overloaded."""
        if quota is not None:
            quota.check_count(self._core, count)
            quota.charge(count, size_bytes)

    def enqueue_unanswered(self, caller: Caller, tasks: Sequence[Any], now: Now) -> None:
        """``enqueue`` without an answer and without a memory for resends."""
        self.check_door()
        if caller.quota is not None:
            caller.quota.check(self._core, now.mono_ms)
        new_tasks, size, rules = self._parse(self.checked(tasks), now.now_ms)
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
        """``enqueue`` of many requests in one go, one plain task each: see ``PlainTasks``. A frame
        of such a run takes 3.6 µs; one by one, 12 µs.

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

    def leave(self, caller: Caller, request: int, now: Now) -> None:
        """Let the caller go, who will not resend: what it has in hand is released, and its session
        may be forgotten."""
        caller.has_left = True
        # What the process that sends has in hand may wait for a callback.
        if caller.principal != OUTBOUND:
            engine = self._parts.border.act()
            for subscriber in caller.consumers:
                engine.subscriptions.unsubscribe(subscriber)
            engine.settlement.release_all(caller.consumers, now.now_ms)
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
            found = checks.array(tasks, field, self._tasks_max)
            raise BadRequest(f"{field} has {len(found)} elements; at least 1 is needed")
        return tasks

    # --- resends -------------------------------------------------------------------------------

    def _is_repeat(
        self,
        caller: Caller,
        session: Session,
        request: int,
        floor: int,
        tasks: object,
        topic: object,
    ) -> bool:
        if floor > session.floor:
            session.raise_floor(floor)
        answer = session.answers.get(request)
        if answer is not None:
            self._check_same(session, answer, tasks, topic)
            if request in session.merged:
                self._coalescing.repeat(caller, session, answer)
            elif self._parts.border.act().intake.repeat(caller.replies, session, answer):
                if type(tasks) is tuple and any(map(_has_window, tasks)):
                    self._answer_with_dues(caller, answer)
                else:
                    self._answer_again(caller, answer)
            return True
        if request in session.under_way:
            self._coalescing.follow(caller, session, request, _all_named(tasks, topic))
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

    def _check_same(
        self, session: Session, answer: StoredAnswer, tasks: object, topic: object
    ) -> None:
        """Check that a request that comes again may be the one that was answered: it has as many
        tasks, with the same topics and keys, as far as these are in memory, and the same bodies
        while they are on their way to the store. Raises Conflict."""
        request, first, count, _ = answer
        named = _all_named(tasks, topic)
        is_same = len(named) == count
        if is_same and request not in session.merged:  # else tasks may have ids of others
            core = self._core
            staged = [batch.effects.enqueued for batch in core.batches]
            for task_id, sent in zip(count_from(first, ID_STEP), named, strict=False):
                row, length = core.resident_rows.get(task_id), 2
                for rows in staged:
                    if task_id in rows:
                        row, length = rows[task_id], 3
                if row is not None:
                    is_same &= sent[:length] == _name(row[2], row[4], row[3])[:length]
        if not is_same:
            raise Conflict(
                f"request {request} of this session was answered, and had {count} other tasks;"
                " another request needs a new number"
            )

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

        self._parts.commands.put(caller, partial(caller.refuse, request), ids, act, done)

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


def _all_named(tasks: object, topic: object) -> list[tuple[object, object, object]]:
    """Topic, key and body of tasks that are not checked yet; ``topic``: of all, where the tasks are
    bodies alone."""
    given = tasks if type(tasks) is tuple else ()
    if topic is not None:
        return [(topic, None, body) for body in given]
    return [_named(task) for task in given]


def _named(task: Any) -> tuple[object, object, object]:
    if type(task) is not tuple or len(task) not in (3, 4):
        return None, None, None
    options = task[3] if len(task) == 4 else None
    return task[0], options.get("key") if type(options) is dict else None, task[1]


def _name(topic: str, options: TaskOptions | None, body: bytes) -> tuple[object, object, object]:
    return topic, None if options is None else options.key, body


def _has_window(task: Any) -> bool:
    is_long = type(task) is tuple and len(task) == 4
    return is_long and type(task[3]) is dict and "within_ms" in task[3]


# --- with rules for pending keys -----------------------------------------------------------------

REQUESTS_PER_READ_MAX = 1_024
TRIES_MAX = 64
"""How often one request with rules reads, or waits for a batch, before it is refused."""
_WORDS = {int(what): what.word for what in Merging}


class MergedSink:
    """A sink for the answer of one request with rules, which knows what became of the tasks."""

    def __init__(self, sink: ReplySink, merged: Merged = ()) -> None:
        self._sink = sink
        self.merged = merged

    @property
    def label(self) -> str:
        return self._sink.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for request, _, _, accepted_ms in answers:
            self.give(self.answer_to(request, merged_answer(accepted_ms, self.merged)))

    def answer_to(self, request: int, value: object) -> Sized:
        return self._sink.answer_to(request, value)

    def give(self, answer: Sized) -> None:
        self._sink.give(answer)

    def error(self, request: int, code: str, message: str) -> None:
        self._sink.error(request, code, message)

    def flush(self) -> None:
        self._sink.flush()


def merged_answer(accepted_ms: int, merged: Merged) -> tuple[object, ...]:
    """The answer of an enqueue with rules: (time, ids, a map with (word, due_ms) of each task)."""
    outcomes = tuple((_WORDS[what], due_ms) for what, _, due_ms in merged)
    return accepted_ms, tuple(task_id for _, task_id, _ in merged), {"outcomes": outcomes}


def _once_session(caller: Caller, key: bytes) -> bytes:
    """The session of an idempotency key: each principal has keys of its own."""
    name = blake2b(caller.principal.name.encode()).digest()
    return blake2b(key, key=name, digest_size=SESSION_BYTES).digest()


FormerAnswer = tuple[int, tuple[int, ...], tuple[tuple[str, int | None], ...]]
"""(time, ids, (word, due_ms) of each); no due time where time and task say it."""


def _former_answer(part: OncePart) -> FormerAnswer:
    if part.merged:
        outcomes = tuple((_WORDS[what], due_ms) for what, _, due_ms in part.merged)
        return part.accepted_ms, tuple(task_id for _, task_id, _ in part.merged), outcomes
    ids = tuple(islice(count_from(part.first_id, ID_STEP), part.tasks))
    return part.accepted_ms, ids, ((_WORDS[Merging.STORED], None),) * part.tasks


@dataclass(slots=True, eq=False)
class Waiting:
    """One request with rules in the queue."""

    caller: Caller
    number: int
    new_tasks: Sequence[NewTask]
    rules: Rules
    size_bytes: int
    check: Callable[[], None]
    """Raises what keeps new tasks out."""
    answered: bool
    """Whether somebody wants the outcome."""
    session: Session | None = field(init=False)
    tries: int = 0
    followers: list[Caller] = field(default_factory=list)
    """Callers who sent the request again meanwhile."""

    def __post_init__(self) -> None:
        self.session = self.caller.session if self.answered else None


def _keeps_bodies(request: Waiting) -> bool:
    """Whether a task of the request may give another due time to a task whose body stays."""
    return any(rule is not None and rule.replaces == DUE for rule in request.rules)


class Coalescing:
    """The queue of enqueues with rules; ``run`` works on it once all keys are in memory."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._coalescer = parts.engine.coalescer
        self._intake = parts.engine.intake
        self._committer = parts.committer
        self._ids_max = parts.limits.key_tasks_max
        """How many tasks may have the keys of one request."""
        self._waiting: deque[Waiting] = deque()
        self._first: dict[tuple[Session, int], Waiting] = {}
        """(session, number) → the waiting request."""
        self._followers = 0
        self._wake = asyncio.Event()

    def put(self, request: Waiting) -> None:
        """Decide a request now or later. Raises Overloaded if too many wait, and what keeps it
        out."""
        if (
            not self._waiting
            and self._parts.loaded.is_set()
            and self._parts.has_room(request.caller)
        ):
            wanted = self._wanted(request)
            if not wanted.waits and not wanted.ids and self._decide(request, _nothing):
                return
        self._check_room()
        self._intake.inflight_bytes += request.size_bytes
        self._waiting.append(request)
        session, number = request.session, request.number
        if session is not None:
            session.under_way.add(number)
            session.last = max(session.last, number)
            self._first[session, number] = request
        self._wake.set()

    def follow(
        self,
        caller: Caller,
        session: Session,
        number: int,
        named: list[tuple[object, object, object]],
    ) -> None:
        """Give ``caller`` the answer of the request that is under way under this number; ``named``:
        topics, keys and bodies of what came again. Raises Conflict when these are others,
        Overloaded when too many wait."""
        first = self._first[session, number]
        if named != [_name(topic, options, body) for topic, _, body, options in first.new_tasks]:
            raise Conflict(
                f"request {number} of this session is under way with other tasks; another request"
                " needs a new number"
            )
        self._check_room()
        first.followers.append(caller)
        self._followers += 1

    def _check_room(self) -> None:
        count, said = len(self._waiting) + self._followers, "enqueues wait for what their keys have"
        checks.room(Overloaded, count, f"{said} pending", self._parts.settings, "commands_max")

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._some()

    async def _some(self) -> None:
        """Read once, and decide all requests at the head that the read suffices for."""
        head = self._waiting[0]
        if not self._parts.has_room(head.caller) or self._wanted(head).waits:
            head.tries += 1
            await self._committer.barrier()
            if head.tries <= TRIES_MAX:
                return
        ids: dict[int, None] = {}
        count = 0
        for request in islice(self._waiting, REQUESTS_PER_READ_MAX):
            more = self._wanted(request).ids
            if len(more) > self._ids_max:
                more = ()  # it will be refused
            if count and len(ids) + len(more) > IDS_PER_READ_MAX:
                break
            ids.update(dict.fromkeys(more))
            count += 1
        bodies = any(map(_keeps_bodies, islice(self._waiting, count)))
        async with self._parts.reader.read_some(list(ids), NO_LIMIT, bodies=bodies) as (view, _):
            for _ in range(count):
                if not self._is_over(self._waiting[0], view, ids.keys()):
                    self._waiting[0].tries += 1
                    break
                self._left(self._waiting.popleft())

    def _left(self, request: Waiting) -> None:
        self._intake.inflight_bytes -= request.size_bytes
        self._followers -= len(request.followers)
        session, number = request.session, request.number
        if session is not None:
            session.under_way.discard(number)
            self._first.pop((session, number), None)

    def _wanted(self, request: Waiting) -> Wanted:
        now_ms = self._parts.clock.read().now_ms
        return self._coalescer.wanted(request.new_tasks, request.rules, now_ms)

    def _is_over(self, request: Waiting, view: View, asked: Collection[int]) -> bool:
        """Whether the request was decided or refused. ``view`` shows the tasks ``asked`` for."""
        self._parts.border.begin()
        try:
            if request.tries > TRIES_MAX:
                raise Overloaded(
                    f"tasks with its keys are stored so quickly that {TRIES_MAX} times something"
                    " came between; nothing was done"
                )
            wanted = self._wanted(request)
            if len(wanted.ids) > self._ids_max:
                raise LimitExceeded(
                    f"{len(wanted.ids)} tasks have the keys of this request; the limit is"
                    f" {self._ids_max} (key_tasks_max): nothing was done"
                )
            if wanted.waits or not all(task_id in asked for task_id in wanted.ids):
                return False
            missing = self._parts.reader.missing(wanted.ids)
            if missing:
                raise RowMissing(f"the store has no row of {missing[0]}, which has not ended")
            return self._decide(request, view)
        except TickwheelError as error:
            self._refuse(request, error)
        except Exception as error:
            answer = self._parts.border.contain(f"an enqueue of {request.caller.address}", error)
            self._refuse(request, answer)
        return True

    @staticmethod
    def _refuse(request: Waiting, error: TickwheelError) -> None:
        if request.answered:
            for caller in (request.caller, *request.followers):
                caller.refuse(request.number, error)

    def _decide(self, request: Waiting, view: View) -> bool:
        """Decide the request. False: it has to wait after all. Raises what keeps it out."""
        caller, session = request.caller, request.session
        if session is not None:
            if self._parts.core.sessions.get(session.key) is not session:
                return True  # nobody waits for it any more
            if request.number < session.floor:
                raise RequestForgotten(
                    f"request {request.number} lies below the session's floor {session.floor}"
                )
        request.check()
        now_ms = self._parts.clock.read().now_ms
        sink = MergedSink(caller.replies) if request.answered else None
        asked = Request(
            sink, session, request.number, request.new_tasks, request.rules, caller.replies
        )
        answer = self._parts.border.act().coalescer.decide(asked, view, now_ms)
        if answer is None:
            return False
        if sink is not None:
            sink.merged = answer.merged
            if answer.is_certain:
                value = merged_answer(answer.accepted_ms, answer.merged)
                self._committer.reply(caller.replies, request.number, value)
        if session is not None:
            for follower in request.followers:
                self.repeat(follower, session, session.answers[request.number])
        self._committer.kick()
        return True

    def repeat(self, caller: Caller, session: Session, answer: StoredAnswer) -> None:
        """Answer a repeated request with the answer of the first one."""
        request, _, _, accepted_ms = answer
        merged = session.merged.get(request, ())
        sink = MergedSink(caller.replies, merged)
        if self._parts.border.act().intake.repeat(sink, session, answer):
            value = merged_answer(accepted_ms, merged)
            self._committer.reply(caller.replies, request, value)


def _nothing(ids: Sequence[int]) -> Mapping[int, TaskSnapshot]:
    """The view of a request that needs no records."""
    return {}
