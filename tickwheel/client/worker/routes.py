"""What ``worker.on`` was given, checked where it is written."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

from tickwheel.api.retry import Retry, policy_wire
from tickwheel.api.times import Duration, duration_ms
from tickwheel.client.delivery import Delivery
from tickwheel.client.keywords import GroupKeywords
from tickwheel.client.tasks import TaskChecker
from tickwheel.client.wire import wire_of
from tickwheel.errors import BadRequest, shown

Handler = Callable[[Delivery], Awaitable[Any]] | Callable[[Delivery], Any]
CONCURRENCY_DEFAULT = 32
CONCURRENCY_MAX = 65_535
"""As many deliveries as a subscription can have out."""


@dataclass(frozen=True, slots=True)
class Route:
    """One handler, with its topic and group, its concurrency and its time limit."""

    handler: Handler
    is_async: bool
    """Whether the handler is awaited; else it runs in a thread."""
    topic: str
    group: str
    concurrency: int
    prefetch: int | None
    """Deliveries that may be out here; None: as many as handlers may run."""
    retry: Retry | None
    timeout_s: float | None
    lease: Duration | None
    settings: GroupKeywords

    @property
    def name(self) -> str:
        """The topic and group, for logs."""
        return f"{self.topic} ({self.group})"

    @property
    def is_for_plain_tasks(self) -> bool:
        """Whether ``retry`` says how tasks are tried again, which does not apply to order keys."""
        says = (self.settings.get(f"order_{word}") for word in ("retry", "attempts", "failure"))
        return self.retry is not None and all(word is None for word in says)

    def unfit(self, delivery: Delivery) -> BadRequest | None:
        """Why the handler cannot work on the delivery; None: it can."""
        if not self.is_for_plain_tasks or delivery.order_key is None:
            return None
        return BadRequest(
            f"the handler of {self.name} has retry, which does not apply to tasks with an order"
            f" key, and task {delivery.id} has one: name order_retry, order_attempts or"
            " order_failure beside it, or leave retry out"
        )

    def limited(self, concurrency: int | None) -> Route:
        """The route with another concurrency."""
        if concurrency is None:
            return self
        return replace(self, concurrency=checked_concurrency(concurrency))


def route(
    handler: Handler,
    topic: str,
    *,
    group: str,
    concurrency: int,
    prefetch: int | None,
    retry: Retry | None,
    timeout: Duration | None,
    lease: Duration | None,
    **settings: Unpack[GroupKeywords],
) -> Route:
    """A checked route. Raises BadRequest naming field and value."""
    check_handler(handler)
    checker = TaskChecker()
    checked_concurrency(concurrency)
    if prefetch is not None:
        _integer(prefetch, "prefetch", 1, checker.limits.prefetch_max)
    if retry is not None:
        policy_wire(retry, "retry")
    if lease is not None:
        duration_ms(lease, "lease")
    wire_of(settings)
    return Route(
        handler,
        _is_async(handler),
        checker.name(topic, "topic"),
        checker.name(group, "group"),
        concurrency,
        prefetch,
        retry,
        None if timeout is None else seconds(timeout, "timeout"),
        lease,
        settings,
    )


AWAITED = frozenset(("ack", "nack", "reject", "release", "extend", "snooze"))
"""Verbs of a delivery that do nothing unless they are awaited."""


def check_handler(handler: Any) -> None:
    """Raises BadRequest for what cannot be called with one delivery, and for a plain function that
    calls what has to be awaited: its delivery would be acked whatever it meant to do."""
    if not callable(handler):
        raise BadRequest(f"a handler must be a function of a delivery, not {shown(handler)}")
    name = getattr(handler, "__qualname__", None) or repr(handler)
    if isinstance(handler, type):
        raise BadRequest(f"a handler must be a function of a delivery, not the class {name}")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise BadRequest(f"{name} has a yield: a handler runs to its end when it is called")
    try:
        inspect.signature(handler).bind(None)
    except TypeError as problem:
        raise BadRequest(
            f"a handler is called with one argument, the delivery; {name} is not: {problem}"
        ) from None
    except ValueError:  # of what is not written in Python nothing is known
        return
    verb = None if _is_async(handler) else _awaited_verb(handler)
    if verb is not None:
        raise BadRequest(
            f"{name} is a plain function and calls delivery.{verb}, which has to be awaited: write"
            f" async def {name}, or raise Reject, RetryLater, Snooze, or return, which is an ack"
        )


def _awaited_verb(function: Any) -> str | None:
    """The first verb of AWAITED that the function calls on its first argument without using the
    result; None: there is none, or no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    made = tree.body[0] if tree.body else None
    if not isinstance(made, ast.FunctionDef):
        return None
    names = [one.arg for one in (*made.args.posonlyargs, *made.args.args)]
    taken = names[int(inspect.ismethod(function)) :][:1]
    for node in ast.walk(made):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), verb))):
                if [name] == taken and verb in AWAITED:
                    return verb
    return None


def _is_async(handler: Handler) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004  # objects with async __call__
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def checked_concurrency(value: Any) -> int:
    return _integer(value, "concurrency", 1, CONCURRENCY_MAX)


def seconds(value: Any, field: str, *, zero: bool = False) -> float:
    """A length of time as seconds. Raises BadRequest."""
    found_ms = duration_ms(value, field)
    if found_ms <= 0 and not zero:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return found_ms / 1000


def _integer(value: Any, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{field} must be an integer of {low} to {high}, not {shown(value)}")
    return value
