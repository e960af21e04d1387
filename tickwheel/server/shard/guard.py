"""The operations as a principal with limited rights has them: each checks its verb's right first.

One without limits gets the operations themselves: nothing is checked on its way. Invariants:

* What the table does not name is refused, and so is a right that is not held.
* What a principal may not touch it learns nothing of: a topic that is named is refused before it is
  looked for, and what is found by an id or a name is as if it were not there.

Around it is the log of what operators did: who, when, what it named, how it ended; one JSON object
a line. ``AuditLog`` is the file, written by a thread: the event loop does not wait for a disk.
``Audited`` stands in the place of a principal's operations, outside of what checks its rights, so
that what is refused is in the log as well; both transports call through it. Where there is no log,
it is not there either.

Invariants of the log:

* A line is given to the thread before its answer is given. A clean stop waits for all of them; a
  daemon that is killed loses those that the thread had not come to.
* What waits for the thread is bounded. Lines that found no room, or could not be written, are
  counted, and the next line that is written says how many they were.
* Of a request a line has what was said, each value cut to a length: never a body, the properties
  of a task, the task of a schedule, a token.
* A log that cannot be written stops nothing; that is said once, and shown by a metric.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence, Sized
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from tickwheel.api.kinds import Ids, Letters
from tickwheel.api.verb import Audit, Need, Of, Right, Verb
from tickwheel.api.verbs import VERBS
from tickwheel.errors import Forbidden, InternalError, TickwheelError, shown
from tickwheel.log_writer import LogWriter
from tickwheel.server import checks
from tickwheel.server.shard.callers import PRINCIPALS_KEPT_MAX, Ask, Principal, Topics

if TYPE_CHECKING:
    from tickwheel.api.shapes import Request
    from tickwheel.clock import Clock
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.shard.callers import Caller, OnEvent
    from tickwheel.server.shard.operations import Operations

TEXT_LENGTH_MAX: Final = 255
IDS_MAX: Final = 10
"""Ids shown in one line of the log; of more, the line has only the count."""
AUDITED: Final = frozenset(verb.name for verb in VERBS.values() if verb.audit is not Audit.NEVER)
"""The verbs that are logged."""
DECISIONS: Final = frozenset(n for n in AUDITED if VERBS[n].audit is Audit.OF_OTHERS)
"""Decisions that are logged unless the owner makes them: see ``CheckBacks.is_own``."""


class AuditLog(LogWriter):
    """The file of logged operations."""

    def __init__(
        self, path: str, bytes_max: int, clock: Clock, on_event: OnEvent, observed: Observed
    ) -> None:
        super().__init__("audit")
        self._path = Path(path)
        self._bytes_max = bytes_max
        self._clock = clock
        self._on_event = on_event
        self._observed = observed
        self._loop: asyncio.AbstractEventLoop | None = None
        # the thread's own
        self._fd: int | None = None
        self._bytes = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """Queue a line with the time before ``fields``. Never waits."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.put(self._line(fields))

    def _line(self, fields: Mapping[str, object]) -> bytes:
        now_s = self._clock.read().now_ms / 1000
        at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"at": at, **fields}, ensure_ascii=True).encode() + b"\n"

    # --- the thread ------------------------------------------------------------------------------

    def _line_of_dropped(self, count: int) -> bytes:
        return self._line({"operation": "audit_lines_lost", "count": count})

    def _note(self, error: OSError | None) -> None:
        was_ok, self._observed.audit_ok = self._observed.audit_ok, error is None
        if error is None:
            return
        self._end()
        if was_ok and self._loop is not None:
            said = f"{self._path}: {error.strerror}"
            self._loop.call_soon_threadsafe(self._on_event, "audit_unwritable", said)

    def _write(self, line: bytes) -> None:
        if self._fd is not None and self._bytes + len(line) > self._bytes_max:
            self._end()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._bytes = os.fstat(self._fd).st_size
            if self._bytes and self._bytes + len(line) > self._bytes_max:
                self._write(line)
                return
        self._bytes += os.write(self._fd, line)

    def _end(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


async def logged(
    log: AuditLog | None, caller: Caller, verb: str, request: Request, answer: Awaitable[Any]
) -> Any:
    """Return an answer that comes later, and leave the line in the log that belongs to its verb.
    Raises what ``answer`` raises."""
    if log is None or verb not in AUDITED:
        return await answer
    line = said_of(caller, verb, _named(request))
    try:
        value = await answer
    except Exception as error:
        of = error if isinstance(error, TickwheelError) else InternalError
        log.write({**line, "outcome": of.code})
        raise
    counts = _counts(value)
    log.write({**line, "outcome": "ok", **({"counts": counts} if counts else {})})
    return value


def log_unreadable(log: AuditLog | None, caller: Caller, verb: str, error: TickwheelError) -> None:
    """Log a request whose values are not what the verb takes: who, and how it ended."""
    if log is not None and verb in AUDITED:
        log.write({**said_of(caller, verb, {}), "outcome": error.code})


def said_of(caller: Caller, operation: str, named: Mapping[str, object]) -> dict[str, object]:
    """The first fields of a line: who asks, from where, for which operation."""
    principal = caller.principal
    return {
        "who": principal.name or "anonymous",
        **({"token": principal.token_id} if principal.token_id else {}),
        "from": caller.address,
        "client": caller.name[:TEXT_LENGTH_MAX],
        "operation": operation,
        "named": named,
    }


class Audited:
    """A principal's operations, of which those in ``AUDITED`` leave a line in the log."""

    def __init__(self, operations: Operations, guarded: Operations, log: AuditLog) -> None:
        """``operations``: those without a guard."""
        self._operations = operations
        self._guarded = guarded
        self._log = log
        for name in vars(operations):
            if not name.startswith("_") and name not in ("shard", "unreadable"):
                setattr(self, name, getattr(guarded, name))
        for name in AUDITED:
            setattr(self, name, self._audited(name, getattr(guarded, name)))

    def __getattr__(self, name: str) -> Any:
        """An attribute of the guarded operations, such as a fact of their class."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._guarded, name)

    def unreadable(self, caller: Caller, verb: str, error: TickwheelError) -> None:
        """Log the request besides."""
        self._guarded.unreadable(caller, verb, error)
        log_unreadable(self._log, caller, verb, error)

    def is_behind(self, caller: Caller) -> bool:
        """Whether too many answers wait for the caller, those included that leave a line."""
        committer, audited = self._operations.shard.committer, caller.audited
        if audited is not None and committer.is_behind(audited):
            return True
        return self._guarded.is_behind(caller)

    def _audited(self, name: str, operation: Callable[[Ask[Any]], None]) -> Callable[..., None]:
        """The operation with a line for each request, which names what was said in it."""
        log = self._log

        def audited(ask: Ask[Any]) -> None:
            if name in DECISIONS and self._is_own(ask.caller, ask.request.transaction):
                operation(ask)
                return
            line = said_of(ask.caller, name, _named(ask.request))

            def ended(outcome: str, counts: dict[str, int] | None = None) -> None:
                log.write({**line, "outcome": outcome, **({"counts": counts} if counts else {})})

            asking = _Asking(ask.caller)
            asking.replies.expect(ask.number, ended)
            try:
                operation(ask._replace(caller=cast("Caller", asking)))
            except TickwheelError as error:
                asking.replies.failed(ask.number, error.code)
                raise

        return audited

    def _is_own(self, caller: Caller, transaction: str) -> bool:
        shard = self._operations.shard
        found = shard.core.transaction_registry.known.get(transaction)
        return found is not None and shard.checkbacks.is_own(caller, found.row)


class _Asking:
    """The caller of one logged request, whose answer is seen on its way."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        replies = caller.audited
        if not isinstance(replies, AuditedReplies):
            replies = caller.audited = AuditedReplies(caller)
        self.replies = replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    def __hash__(self) -> int:
        return hash(self._caller)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same caller, so that its waiting requests are found by it."""
        return (other._caller if isinstance(other, _Asking) else other) is self._caller

    def answer(self, request: int, value: object) -> None:
        self.replies.give(self.replies.answer_to(request, value))
        self.replies.flush()

    def refuse(self, request: int, error: TickwheelError) -> None:
        self.replies.error(request, error.code, error.message)
        self.replies.flush()


class _Answer:
    """An answer that may wait for the store, and the request that it answers."""

    __slots__ = ("counts", "request", "value")

    def __init__(self, request: int, counts: dict[str, int] | None, value: Sized) -> None:
        self.request = request
        self.counts = counts
        self.value = value

    def __len__(self) -> int:
        return len(self.value)


class AuditedReplies:
    """A ``ReplySink`` in front of the caller's own, whatever that is by then. One for all requests
    of a caller, because the answers of a batch come together."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._expected: dict[int, list[Callable[..., None]]] = {}
        """Request number → what to call with its end; a client may use a number twice."""

    def expect(self, request: int, ended: Callable[..., None]) -> None:
        """Call ``ended`` when the request is answered."""
        self._expected.setdefault(request, []).append(ended)

    def failed(self, request: int, code: str) -> None:
        """End a request that was refused before it was taken."""
        self._end(request, code)

    def _end(self, request: int, outcome: str, counts: dict[str, int] | None = None) -> None:
        waiting = self._expected.get(request)
        if waiting is None:
            return
        waiting.pop(0)(outcome, counts)
        if not waiting:
            del self._expected[request]

    @property
    def label(self) -> str:
        return self._caller.replies.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for request, _, count, _ in answers:
            self._end(request, "ok", {"tasks": count})
        self._caller.replies.accepted(answers)

    def answer_to(self, request: int, value: object) -> Sized:
        return _Answer(request, _counts(value), self._caller.replies.answer_to(request, value))

    def give(self, answer: Any) -> None:
        self._end(answer.request, "ok", answer.counts)
        self._caller.replies.give(answer.value)

    def error(self, request: int, code: str, message: str) -> None:
        self._end(request, code)
        self._caller.replies.error(request, code, message)

    def flush(self) -> None:
        self._caller.replies.flush()


def _counts(value: object) -> dict[str, int] | None:
    """The counts of an answer: ids by word, or new tasks; None: it has neither."""
    if not isinstance(value, (tuple, list)):
        return None
    if len(value) > 1 and type(value[0]) is int and isinstance(value[1], tuple):
        return {"tasks": len(value[1])}
    words = (one[1] if isinstance(one, (tuple, list)) and len(one) > 1 else one for one in value)
    return dict(Counter(word for word in words if isinstance(word, str))) or None


def _named(request: Request) -> dict[str, object]:
    """What a line shows of a request: all that was said and may be shown; of many ids the first."""
    said = request.said()
    named: dict[str, object] = {}
    for field in request.fields():
        value = said.get(field.name)
        if isinstance(field.kind, (Ids, Letters)) and value is not None:
            ids = [one[0] if isinstance(one, tuple) else one for one in value]
            named |= {"ids": [str(one) for one in ids[:IDS_MAX]], "count": len(ids)}
        elif field.name not in said or not field.kind.is_logged:
            continue
        elif value is not None or (request.none_is_said and not field.is_place):
            named[field.name] = _short(None if value is None else field.kind.logged(value))
    return dict(sorted(named.items()))


def _short(value: object) -> object:
    if isinstance(value, str):
        return value[:TEXT_LENGTH_MAX]
    if value is None or type(value) in (bool, int, float):
        return value
    return shown(value)


CONVERSATION = (
    "begin", "contain", "survive", "fail", "opened", "join", "heard", "blocked", "unblocked",
    "closed", "finished", "is_behind", "handled", "after_all", "mistake", "greeting",
    "unreadable",
)  # fmt: skip
"""The operations that a transport needs for any conversation; no client asks for them."""
FACTS = ("role", "settings", "limits", "frame_bytes_max", "clock", "epoch")
_TASKS = ("tasks", "new_tasks")
Operation = Callable[..., Any]


class Guards:
    """Makes the operations of each principal."""

    def __init__(
        self,
        operations: Operations,
        refused: Callable[[], None],
        log: AuditLog | None = None,
    ) -> None:
        """``refused`` is called for each refused request; ``log``: what operators do."""
        self._operations = operations
        self._refused = refused
        self._log = log
        self._unlimited = self._audited(operations)
        self._limited = lru_cache(maxsize=PRINCIPALS_KEPT_MAX)(self._guard)

    def of(self, principal: Principal) -> Operations:
        """The principal's operations: the same object while it is in use."""
        return self._limited(principal) if principal.is_limited else self._unlimited

    def _guard(self, principal: Principal) -> Operations:
        guarded = Guarded(self._operations, principal, self._refused)
        return self._audited(cast("Operations", guarded))  # it has what a transport uses of them

    def _audited(self, guarded: Operations) -> Operations:
        if self._log is None:
            return guarded
        return cast("Operations", Audited(self._operations, guarded, self._log))


class Guarded:
    """The operations as one principal may use them."""

    def __init__(
        self, operations: Operations, principal: Principal, refused: Callable[[], None]
    ) -> None:
        self._principal = principal
        self._count = refused
        for name in (*CONVERSATION, *FACTS):
            setattr(self, name, getattr(operations, name))
        for name, verb in VERBS.items():
            setattr(self, name, self._guarded(verb, getattr(operations, name)))
        plain, topics = operations.plain_tasks, principal.topics(Right.PRODUCE)
        known = plain.topics if topics.are_all else _Both(plain.topics, topics)
        self.plain_tasks = plain._replace(topics=known)

    def __getattr__(self, name: str) -> Operation:
        """A refusal, for operations that are not in the table of rights."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._refuse, f"{name} is in no table of rights")

    def _guarded(self, verb: Verb, operation: Operation) -> Operation:
        name, need = verb.name, verb.need
        if need is None:
            return operation
        topics = self._principal.topics(need.right)
        if topics.are_all:
            return operation
        if not self._has(need.right):
            return partial(self._refuse, f"{name} needs the right {need.right}")
        if need.of is Of.ANY:
            return partial(self._refuse, f"{name} needs the right {need.right} for all topics")
        if not verb.is_by_hand:
            return self._asked(need, topics, operation)
        if need.of is Of.FOUND:  # the answers of a client that was asked about transactions
            return partial(operation, only=topics)
        return self._checked(need, topics, operation)

    def _asked(self, need: Need, topics: Topics, operation: Operation) -> Operation:
        """The operation behind a check of the topic that is named, or with what may be found."""

        def asked(ask: Ask[Any]) -> None:
            if need.of is Of.FOUND or (need.of is Of.SELECTED and ask.request.topic is None):
                ask = ask._replace(only=topics)
            else:
                self._check(need, topics, ask.request.topic)
            operation(ask)

        return asked

    def _check(self, need: Need, topics: Topics, topic: str) -> None:
        if not topics(topic):
            self._refuse(f"there is no right {need.right} for topic {checks.shown(topic)}")

    def _checked(self, need: Need, topics: Topics, operation: Operation) -> Operation:
        """The operation behind a check of the topics that its arguments name."""
        each = need.of is Of.EACH_TASK
        field, place = _argument(operation, _TASKS if each else ("topic",))

        check = partial(self._check, need, topics)

        def checked(*args: Any, **named: Any) -> Any:
            given = args[place] if len(args) > place else named.get(field)
            if each:
                _check_each(given, field, check)
            else:
                check(checks.name(given, field))
            return operation(*args, **named)

        return checked

    def _has(self, right: Right) -> bool:
        return any(held == right and patterns for held, patterns in self._principal.grants or ())

    def _refuse(self, why: str, *args: Any, **named: Any) -> NoReturn:
        self._count()
        raise Forbidden(f"{self._principal.name} may not do this: {why}")


class _Both:
    """Topics that are in both of two sets."""

    def __init__(self, known: Container[str], topics: Topics) -> None:
        self._known = known
        self._topics = topics

    def __contains__(self, topic: object) -> bool:
        return topic in self._known and type(topic) is str and self._topics(topic)


def _argument(operation: Operation, names: tuple[str, ...]) -> tuple[str, int]:
    """The first of ``names`` that is a parameter of the operation, and its place."""
    parameters = list(inspect.signature(operation).parameters)
    return next((name, parameters.index(name)) for name in names if name in parameters)


def _check_each(tasks: object, field: str, check: Callable[[str], None]) -> None:
    """Check the topic of each task. What is not shaped like a task never gets past here."""
    if not isinstance(tasks, (tuple, list)):
        checks.wrong(field, "an array", tasks)
    for index, task in enumerate(tasks):
        if type(task) is not tuple or not task or type(task[0]) is not str:
            checks.wrong(f"{field}[{index}]", "[topic, body, delay_ms], or with options", task)
        check(task[0])
