"""The stages between a request and its verb: the audit log and the rights.

A stage takes a declared verb and its operation, and returns an operation that performs the stage
first. ``Pipeline`` builds the chain of stages once for each principal. An operation that needs
neither a check nor a log line stays unwrapped. The rights check guarantees:

* Only declared operations can be called, and only with the right that they need.
* A principal learns nothing about topics outside its rights. A request that names such a topic is
  refused before the topic is looked up, and tasks found by id or name are treated as absent.

The audit log records the operations of operators: the caller, the time, the named objects and the
outcome, as one JSON object per line. A thread writes the file (``AuditLog``), because the event
loop must not wait for a disk. The audit stage comes first, so the log includes refused requests.
Invariants:

* A line is queued for the thread before the answer to its request is sent, or when the daemon stops
  leading. A clean stop waits for all queued lines; a killed daemon loses them.
* The queue is bounded. Lines that do not fit or cannot be written are counted, and the next line
  states their number.
* A line contains the fields of the request, each cut to a maximum length. It never contains a body,
  a task's properties, a token, or the task of a schedule.
* Operations continue if the log cannot be written. The failure is logged once and shown by a
  metric.
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
from weakref import WeakSet

from tickwheel.api.kinds import DeadLetterPairs, Ids
from tickwheel.api.verb import Audit, Need, Of, Right, Verb
from tickwheel.api.verbs import VERBS
from tickwheel.errors import Forbidden, InternalError, OutcomeUnknown, TickwheelError, shown
from tickwheel.log_writer import LogWriter, ends_torn
from tickwheel.server import checks
from tickwheel.server.shard.callers import PRINCIPALS_KEPT_MAX, Call, NullSink, Principal, Topics
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
"""Maximum number of ids in a line of the log. The line also contains the count of all ids."""
AUDITED: Final = frozenset(verb.name for verb in VERBS.values() if verb.audit is not Audit.NEVER)
"""The verbs that are logged."""
DECISIONS: Final = frozenset(n for n in AUDITED if VERBS[n].audit is Audit.OF_OTHERS)
"""Decisions on transactions, which are logged unless the owner makes them
(``CheckBacks.is_own``)."""


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
        self.open_lines: WeakSet[_Line] = WeakSet()
        """The lines of requests that are not yet answered."""
        # the following are used only by the thread
        self._fd: int | None = None
        self._bytes = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """Queue a line with the time and ``fields``. This never waits."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.put(self._line(fields))

    def write_open_lines(self) -> None:
        """Write the lines of all requests that this daemon no longer answers. Their changes may be
        in the store."""
        for line in list(self.open_lines):
            line.write(OutcomeUnknown.code)

    def _line(self, fields: Mapping[str, object]) -> bytes:
        now_s = self._clock.read().now_ms / 1000
        at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"at": at, **fields}, ensure_ascii=True).encode() + b"\n"

    # --- the thread ------------------------------------------------------------------------------

    def line_for_lost_lines(self, count: int) -> bytes:
        return self._line({"operation": "audit_lines_lost", "count": count})

    def on_write_result(self, error: OSError | None) -> None:
        was_ok, self._observed.audit_ok = self._observed.audit_ok, error is None
        if error is None:
            return
        self.end()
        if was_ok and self._loop is not None:
            detail = f"{self._path}: {error.strerror}"
            self._loop.call_soon_threadsafe(self._on_event, "audit_unwritable", detail)

    def write_line(self, line: bytes) -> None:
        if self._fd is not None and self._bytes + len(line) > self._bytes_max:
            self.end()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._bytes = os.fstat(self._fd).st_size
            self.is_torn = self._bytes > 0 and ends_torn(self._path)
            if self._bytes and self._bytes + len(line) > self._bytes_max:
                self.write_line(line)
                return
        self._bytes += self.write_to(self._fd, line)

    def end(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def caller_fields(caller: Caller, operation: str, named: Mapping[str, object]) -> dict[str, object]:
    """Return the fields with which a line begins: caller, address, operation and named objects."""
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
    """Writes a line of the audit log for each request of the verbs in ``AUDITED``."""

    def __init__(
        self,
        log: AuditLog,
        is_own: Callable[[Caller, str], bool] = lambda caller, transaction: False,
    ) -> None:
        """``is_own`` returns whether the caller decides a transaction of its own."""
        self._log = log
        self._is_own = is_own

    def before(self, verb: Verb, operation: Operation) -> Operation:
        """Wrap the operation so that each request writes a line of the log."""
        if verb.name not in AUDITED:
            return operation

        def audited(call: Call[Any]) -> None:
            if verb.name in DECISIONS and self._is_own(call.caller, call.request.transaction):
                operation(call)
                return
            line = _Line(self._log, caller_fields(call.caller, verb.name, _named(call.request)))
            try:
                operation(call._replace(witness=line))
            except TickwheelError as error:
                line.write(error.code)
                raise

        return audited

    async def relayed(
        self, caller: Caller, verb: str, request: Request, answer: Awaitable[Any]
    ) -> Any:
        """Await another process's ``answer``, log the request, and return or raise the result. If
        the wait is cancelled, the outcome in the line is ``outcome_unknown``, because the other
        process may have executed the request."""
        if verb not in AUDITED:
            return await answer
        line = _Line(self._log, caller_fields(caller, verb, _named(request)))
        try:
            value = await answer
        except asyncio.CancelledError:
            line.write(OutcomeUnknown.code)
            raise
        except Exception as error:
            line.write(error.code if isinstance(error, TickwheelError) else InternalError.code)
            raise
        line.give(line.answer_to(0, value))
        return value

    def unreadable(self, caller: Caller, verb: str, error: TickwheelError) -> None:
        """Log a request that contains invalid values, without its values."""
        if verb in AUDITED:
            _Line(self._log, caller_fields(caller, verb, {})).write(error.code)


class _Line(NullSink):
    """The line of one request. It is a sink that gets the answer before the caller."""

    def __init__(self, log: AuditLog, fields: Mapping[str, object]) -> None:
        self._log = log
        self._fields = fields
        log.open_lines.add(self)

    def write(self, outcome: str, counts: Mapping[str, int] | None = None) -> None:
        """Write the line with the outcome of the request, unless it is written."""
        if self not in self._log.open_lines:
            return
        self._log.open_lines.discard(self)
        more = {"counts": counts} if counts else {}
        self._log.write({**self._fields, "outcome": outcome, **more})

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for _, _, count, _ in answers:
            self.write("ok", {"tasks": count})

    def answer_to(self, request: int, value: object) -> Sized:
        return _counts(value)

    def give(self, answer: Any) -> None:
        self.write("ok", answer)

    def error(self, request: int, code: str, message: str) -> None:
        self.write(code)


def _counts(value: object) -> dict[str, int]:
    """Return the counts in an answer: ids by outcome, or new tasks. Other answers contain none."""
    if not isinstance(value, (tuple, list)):
        return {}
    if len(value) > 1 and type(value[0]) is int and isinstance(value[1], tuple):
        return {"tasks": len(value[1])}
    outcomes = (
        item[1] if isinstance(item, (tuple, list)) and len(item) > 1 else item for item in value
    )
    return dict(Counter(item for item in outcomes if isinstance(item, str)))


def _named(request: Request) -> dict[str, object]:
    """Return the logged fields of the request. A long list of ids is cut to ``IDS_MAX``."""
    values = request.values()
    named: dict[str, object] = {}
    for field in request.fields():
        value = values.get(field.name)
        if isinstance(field.kind, (Ids, DeadLetterPairs)) and value is not None:
            ids = [item[0] if isinstance(item, tuple) else item for item in value]
            named |= {"ids": [str(task_id) for task_id in ids[:IDS_MAX]], "count": len(ids)}
        elif field.name not in values or not field.kind.is_logged:
            continue
        elif value is not None or (request.none_is_sent and not field.is_place):
            named[field.name] = _short(None if value is None else field.kind.logged(value))
    return dict(sorted(named.items()))


def _short(value: object) -> object:
    if isinstance(value, str):
        return value[:TEXT_LENGTH_MAX]
    if value is None or type(value) in (bool, int, float):
        return value
    return shown(value)


_TASKS = ("tasks", "new_tasks")


def with_stage(
    stage: Callable[[Verb, Operation], Operation],
    verbs: Verbs,
    plain_tasks: PlainTasks,
    unreadable: Unreadable,
) -> Verbs:
    """Wrap the operations of all declared verbs in a stage."""
    operations = {name: stage(verb, getattr(verbs, name)) for name, verb in VERBS.items()}
    return table(operations, plain_tasks, unreadable)


class Pipeline:
    """Combines the audit log, the check of the caller's rights, and the verbs."""

    def __init__(
        self,
        operations: Operations,
        refused: Callable[[], None],
        log: AuditLog | None = None,
    ) -> None:
        """``refused`` is called for each refused request; ``log`` is the audit log, if any."""
        self._verbs = operations.verbs
        self._refused = refused
        self._audit = None if log is None else AuditStage(log, operations.is_own)
        self._unlimited = self._logged(self._verbs)
        self._limited = lru_cache(maxsize=PRINCIPALS_KEPT_MAX)(self._checked)

    def of(self, principal: Principal) -> Verbs:
        """Return the principal's verbs. The object is the same while it is cached."""
        return self._limited(principal) if principal.is_limited else self._unlimited

    def _checked(self, principal: Principal) -> Verbs:
        verbs, rights = self._verbs, RightsStage(principal, self._refused)
        plain = rights.plain_tasks(verbs.plain_tasks)
        return self._logged(with_stage(rights.before, verbs, plain, verbs.unreadable))

    def _logged(self, verbs: Verbs) -> Verbs:
        audit = self._audit
        if audit is None:
            return verbs
        return with_stage(audit.before, verbs, verbs.plain_tasks, audit.unreadable)


class RightsStage:
    """Checks the rights of one principal."""

    def __init__(self, principal: Principal, refused: Callable[[], None]) -> None:
        self._principal = principal
        self._count_refused = refused

    def plain_tasks(self, plain: PlainTasks) -> PlainTasks:
        """Restrict ``plain`` to the topics to which the principal may produce."""
        topics = self._principal.topics(Right.PRODUCE)
        return (
            plain
            if topics.matches_all
            else plain._replace(topics=_Intersection(plain.topics, topics))
        )

    def before(self, verb: Verb, operation: Operation) -> Operation:
        """Wrap the operation so that the verb's right is checked first."""
        name, need = verb.name, verb.need
        if need is None:
            return operation
        topics = self._principal.topics(need.right)
        if topics.matches_all:
            return operation
        if not self._has(need.right):
            return partial(self._refuse, f"{name} needs the right {need.right}")
        if need.of is Of.ANY:
            return partial(self._refuse, f"{name} needs the right {need.right} for all topics")
        if not verb.has_custom_arguments:
            return self._for_request(need, topics, operation)
        if need.of is Of.FOUND:  # the verb by which a client answers check-backs
            return partial(operation, topic_filter=topics)
        return self._for_arguments(need, topics, operation)

    def _for_request(self, need: Need, topics: Topics, operation: Operation) -> Operation:
        """Wrap the operation so that it checks the topic that the request names, and limit its
        results to ``topics``."""

        def checked(call: Call[Any]) -> None:
            topic: Any = getattr(call.request, "topic", None)
            if need.of is Of.NAMED or topic is not None:
                self._check(need, topics, topic)
            if need.of is Of.FOUND or (need.of is Of.SELECTED and topic is None):
                call = call._replace(topic_filter=topics)
            operation(call)

        return checked

    def _check(self, need: Need, topics: Topics, topic: str) -> None:
        if not topics(topic):
            self._refuse(f"the right {need.right} is required for topic {checks.shown(topic)}")

    def _for_arguments(self, need: Need, topics: Topics, operation: Operation) -> Operation:
        """Wrap the operation so that the topics in its arguments are checked first."""
        each = need.of is Of.EACH_TASK
        field, index = _argument(operation, _TASKS if each else ("topic",))

        check = partial(self._check, need, topics)

        def checked(*args: Any, **kwargs: Any) -> Any:
            value = args[index] if len(args) > index else kwargs.get(field)
            if each:
                _check_each(value, field, check)
            else:
                check(checks.name(value, field))
            return operation(*args, **kwargs)

        return checked

    def _has(self, right: Right) -> bool:
        return any(held == right and patterns for held, patterns in self._principal.grants or ())

    def _refuse(self, why: str, *args: Any, **kwargs: Any) -> NoReturn:
        self._count_refused()
        raise Forbidden(f"{self._principal.name} may not do this: {why}")


class _Intersection:
    """The intersection of two sets of topics."""

    def __init__(self, known: Container[str], topics: Topics) -> None:
        self._known = known
        self._topics = topics

    def __contains__(self, topic: object) -> bool:
        return topic in self._known and type(topic) is str and self._topics(topic)


def _argument(operation: Operation, names: tuple[str, ...]) -> tuple[str, int]:
    """Return the first of ``names`` that is a parameter of the operation, and its index."""
    parameters = list(inspect.signature(operation).parameters)
    return next((name, parameters.index(name)) for name in names if name in parameters)


def _check_each(tasks: object, field: str, check: Callable[[str], None]) -> None:
    """Check the topic of each task. Raise BadRequest for values that are not shaped like tasks."""
    if not isinstance(tasks, (tuple, list)):
        checks.wrong(field, "an array", tasks)
    for index, task in enumerate(tasks):
        if type(task) is not tuple or not task or type(task[0]) is not str:
            form = "[topic, body, delay_ms] or [topic, body, delay_ms, options]"
            checks.wrong(f"{field}[{index}]", form, task)
        check(task[0])
