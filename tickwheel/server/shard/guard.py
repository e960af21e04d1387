"""The way of a request to its verb, in stages: the log, the rights, the verb.

A stage takes a declared verb and its operation, and returns the operation with itself before it;
``Pipeline`` puts the stages of a principal together once. A verb that needs no check and no line
stays the operation itself: nothing is added to its way. Invariants of the rights:

* An operation that no declaration names cannot be asked for; a right that is not held is refused.
* What a principal may not touch it learns nothing of: a topic that is named is refused before it is
  looked for, and what is found by an id or a name is as if it were not there.

The log says what operators did: who, when, what they named, how it ended; one JSON object a line.
``AuditLog`` is the file, written by a thread: the event loop does not wait for a disk. Its stage
comes before that of the rights, so that refused requests are in the log as well. Invariants of the
log:

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
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tickwheel.api.kinds import Ids, Letters
from tickwheel.api.verb import Audit, Need, Of, Right, Verb
from tickwheel.api.verbs import VERBS
from tickwheel.errors import Forbidden, InternalError, OutcomeUnknown, TickwheelError, shown
from tickwheel.log_writer import LogWriter
from tickwheel.server import checks
from tickwheel.server.shard.callers import PRINCIPALS_KEPT_MAX, Ask, Nobody, Principal, Topics
from tickwheel.server.shard.operations import table

if TYPE_CHECKING:
    from tickwheel.api.shapes import Request
    from tickwheel.clock import Clock
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.shard.callers import Caller, OnEvent
    from tickwheel.server.shard.enqueue import PlainTasks
    from tickwheel.server.shard.operations import Operation, Operations, Unreadable
    from tickwheel.server.shard.verbs import Verbs

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


class AuditStage:
    """The stage that logs: each request of the verbs in ``AUDITED`` leaves a line."""

    def __init__(
        self,
        log: AuditLog,
        is_own: Callable[[Caller, str], bool] = lambda caller, transaction: False,
    ) -> None:
        """``is_own``: whether a transaction is a caller's own to decide."""
        self._log = log
        self._is_own = is_own

    def before(self, verb: Verb, operation: Operation) -> Operation:
        """The operation with a line for each request, which names what was said in it."""
        if verb.name not in AUDITED:
            return operation

        def audited(ask: Ask[Any]) -> None:
            if verb.name in DECISIONS and self._is_own(ask.caller, ask.request.transaction):
                operation(ask)
                return
            line = _Line(self._log, said_of(ask.caller, verb.name, _named(ask.request)))
            try:
                operation(ask._replace(witness=line))
            except TickwheelError as error:
                line.ended(error.code)
                raise

        return audited

    async def awaited(
        self, caller: Caller, verb: str, request: Request, answer: Awaitable[Any]
    ) -> Any:
        """Return the answer of another process, with its line written first. Raises what ``answer``
        raises. Where nobody waits for the answer any more, the line says ``outcome_unknown``: the
        other process may have done it."""
        if verb not in AUDITED:
            return await answer
        line = _Line(self._log, said_of(caller, verb, _named(request)))
        try:
            value = await answer
        except asyncio.CancelledError:
            line.ended(OutcomeUnknown.code)
            raise
        except Exception as error:
            line.ended(error.code if isinstance(error, TickwheelError) else InternalError.code)
            raise
        line.give(line.answer_to(0, value))
        return value

    def unreadable(self, caller: Caller, verb: str, error: TickwheelError) -> None:
        """Log a request whose values are not what the verb takes: who, and how it ended."""
        if verb in AUDITED:
            _Line(self._log, said_of(caller, verb, {})).ended(error.code)


class _Line(Nobody):
    """The line of one request: a sink that is given the answer before the caller is."""

    def __init__(self, log: AuditLog, said: Mapping[str, object]) -> None:
        self._log = log
        self._said = said

    def ended(self, outcome: str, counts: Mapping[str, int] | None = None) -> None:
        """Write the line of a request that has ended so."""
        more = {"counts": counts} if counts else {}
        self._log.write({**self._said, "outcome": outcome, **more})

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for _, _, count, _ in answers:
            self.ended("ok", {"tasks": count})

    def answer_to(self, request: int, value: object) -> Sized:
        return _counts(value)

    def give(self, answer: Any) -> None:
        self.ended("ok", answer)

    def error(self, request: int, code: str, message: str) -> None:
        self.ended(code)


def _counts(value: object) -> dict[str, int]:
    """The counts of an answer: ids by word, or new tasks; of another it has none."""
    if not isinstance(value, (tuple, list)):
        return {}
    if len(value) > 1 and type(value[0]) is int and isinstance(value[1], tuple):
        return {"tasks": len(value[1])}
    words = (one[1] if isinstance(one, (tuple, list)) and len(one) > 1 else one for one in value)
    return dict(Counter(word for word in words if isinstance(word, str)))


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


_TASKS = ("tasks", "new_tasks")


def behind(
    stage: Callable[[Verb, Operation], Operation],
    verbs: Verbs,
    plain_tasks: PlainTasks,
    unreadable: Unreadable,
) -> Verbs:
    """The verbs with a stage before each. What no declaration names is not among them."""
    found = {name: stage(verb, getattr(verbs, name)) for name, verb in VERBS.items()}
    return table(found, plain_tasks, unreadable)


class Pipeline:
    """The way of a request to its verb: the log, the rights of who asks, the verb itself."""

    def __init__(
        self,
        operations: Operations,
        refused: Callable[[], None],
        log: AuditLog | None = None,
    ) -> None:
        """``refused`` is called for each refused request; ``log``: what operators do."""
        self._verbs = operations.verbs
        self._refused = refused
        self._audit = None if log is None else AuditStage(log, operations.is_own)
        self._unlimited = self._logged(self._verbs)
        self._limited = lru_cache(maxsize=PRINCIPALS_KEPT_MAX)(self._checked)

    def of(self, principal: Principal) -> Verbs:
        """The principal's verbs: the same object while it is in use."""
        return self._limited(principal) if principal.is_limited else self._unlimited

    def _checked(self, principal: Principal) -> Verbs:
        verbs, rights = self._verbs, RightsStage(principal, self._refused)
        plain = rights.plain_tasks(verbs.plain_tasks)
        return self._logged(behind(rights.before, verbs, plain, verbs.unreadable))

    def _logged(self, verbs: Verbs) -> Verbs:
        audit = self._audit
        if audit is None:
            return verbs
        return behind(audit.before, verbs, verbs.plain_tasks, audit.unreadable)


class RightsStage:
    """The stage that checks what one principal may do."""

    def __init__(self, principal: Principal, refused: Callable[[], None]) -> None:
        self._principal = principal
        self._count = refused

    def plain_tasks(self, plain: PlainTasks) -> PlainTasks:
        """What the principal's plain tasks may be."""
        topics = self._principal.topics(Right.PRODUCE)
        return plain if topics.are_all else plain._replace(topics=_Both(plain.topics, topics))

    def before(self, verb: Verb, operation: Operation) -> Operation:
        """The operation behind a check of the verb's right."""
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
        return self._named(need, topics, operation)

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

    def _named(self, need: Need, topics: Topics, operation: Operation) -> Operation:
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
