"""The operations as a principal with limited rights has them: each checks its verb's right first.

One without limits gets the operations themselves: nothing is checked on its way. Invariants:

* What the table does not name is refused, and so is a right that is not held.
* What a principal may not touch it learns nothing of: a topic that is named is refused before it is
  looked for, and what is found by an id or a name is as if it were not there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from tickwheel.api.verb import Need, Of, Right, Verb
from tickwheel.api.verbs import VERBS
from tickwheel.errors import Forbidden
from tickwheel.server import checks
from tickwheel.server.shard.access import PRINCIPALS_KEPT_MAX, Principal, Topics
from tickwheel.server.shard.audit import Audited
from tickwheel.server.shard.callers import Ask

if TYPE_CHECKING:
    from tickwheel.server.shard.audit import AuditLog
    from tickwheel.server.shard.operations import Operations

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
