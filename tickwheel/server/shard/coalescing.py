"""Enqueues whose tasks have a rule for a pending key: decided of in their order of arrival, each in
one step of the loop in which everything is known that it rests on.

What has the key is found in the index of keys, whose rows have to be read; so these requests wait
in a queue of their own, and plain ones overtake them. One that needs no row, and has nobody before
it, is decided of at once. When something came between a read and its decision the read is
done again, and while a task with the key is on its way to the store its batch is waited for.
Invariants: requests are counted in ``inflight_bytes`` from here on, as if they were staged. The
number of one that waits is taken (``Session.under_way``): whatever else comes under it gets the
answer of the first, so that one of them is done and no more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.engine.enqueue import Request
from tickwheel.errors import (
    LimitExceeded,
    Overloaded,
    RequestForgotten,
    RowMissing,
    TickwheelError,
)
from tickwheel.model.coalescing import DUE, Merged, Merging
from tickwheel.server.shard.reads import NO_LIMIT

if TYPE_CHECKING:
    from tickwheel.engine.enqueue import Rules, Wanted
    from tickwheel.engine.sessions import ReplySink, Session, StoredAnswer
    from tickwheel.model.records import NewTask, TaskSnapshot
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.reads import View

IDS_PER_READ_MAX = 16_384
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


class Waiting:
    """One request with rules in the queue."""

    __slots__ = ("answered", "caller", "check", "followers", "new_tasks", "number", "rules",
                 "session", "size_bytes", "tries")  # fmt: skip

    def __init__(
        self,
        caller: Caller,
        number: int,
        new_tasks: Sequence[NewTask],
        rules: Rules,
        size_bytes: int,
        check: Callable[[], None],
        *,
        answered: bool,
    ) -> None:
        """``check`` raises what keeps new tasks out; ``answered``: somebody wants the outcome."""
        self.caller = caller
        self.session: Session | None = caller.session if answered else None
        self.number = number
        self.new_tasks = new_tasks
        self.rules = rules
        self.size_bytes = size_bytes
        self.check = check
        self.answered = answered
        self.tries = 0
        self.followers: list[Caller] = []
        """Callers who sent the request again, or another one under its number, meanwhile."""


def _keeps_bodies(request: Waiting) -> bool:
    """Whether a task of the request may give another due time to a task whose body stays."""
    return any(rule is not None and rule.replaces == DUE for rule in request.rules)


class Coalescing:
    """The queue of enqueues with rules; ``run`` works on it once all keys are in memory."""

    def __init__(self, parts: Parts) -> None:
        self._core = parts.core
        self._coalescer = parts.engine.coalescer
        self._intake = parts.engine.intake
        self._reader = parts.reader
        self._border = parts.border
        self._committer = parts.committer
        self._clock = parts.clock
        self._loaded = parts.loaded
        self._has_room = parts.has_room
        self._requests_max = parts.settings.commands_max
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
        if not self._waiting and self._loaded.is_set() and self._has_room(request.caller):
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

    def follow(self, caller: Caller, session: Session, number: int) -> None:
        """Give ``caller`` the answer of the request that is under way under this number. Raises
        Overloaded when too many wait."""
        self._check_room()
        self._first[session, number].followers.append(caller)
        self._followers += 1

    def _check_room(self) -> None:
        count = len(self._waiting) + self._followers
        if count >= self._requests_max:
            raise Overloaded(
                f"{count} enqueues wait for what their keys have pending; the limit is"
                f" {self._requests_max} (commands_max)"
            )

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._some()

    async def _some(self) -> None:
        """Read once, and decide all requests at the head that the read suffices for."""
        head = self._waiting[0]
        if not self._has_room(head.caller) or self._wanted(head).waits:
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
        async with self._reader.read_some(list(ids), NO_LIMIT, bodies=bodies) as (view, _):
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
        now_ms = self._clock.read().now_ms
        return self._coalescer.wanted(request.new_tasks, request.rules, now_ms)

    def _is_over(self, request: Waiting, view: View, asked: Collection[int]) -> bool:
        """Whether the request was decided or refused. ``view`` shows the tasks ``asked`` for."""
        self._border.begin()
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
            missing = self._reader.missing(wanted.ids)
            if missing:
                raise RowMissing(f"the store has no row of {missing[0]}, which has not ended")
            return self._decide(request, view)
        except TickwheelError as error:
            self._refuse(request, error)
        except Exception as error:
            answer = self._border.contain(f"an enqueue of {request.caller.address}", error)
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
            if self._core.sessions.get(session.key) is not session:
                return True  # nobody waits for it any more
            if request.number < session.floor:
                raise RequestForgotten(
                    f"request {request.number} lies below the session's floor {session.floor}"
                )
        request.check()
        now_ms = self._clock.read().now_ms
        sink = MergedSink(caller.replies) if request.answered else None
        asked = Request(
            sink, session, request.number, request.new_tasks, request.rules, caller.replies
        )
        answer = self._border.act().coalescer.decide(asked, view, now_ms)
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
        if self._border.act().intake.repeat(sink, session, answer):
            value = merged_answer(accepted_ms, merged)
            self._committer.reply(caller.replies, request, value)


def _nothing(ids: Sequence[int]) -> Mapping[int, TaskSnapshot]:
    """The view of a request that needs no records."""
    return {}
