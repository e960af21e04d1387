"""The blocks of keywords that several calls take, each declared once, with what each keyword means.

A function takes a block as ``**options: Unpack[TaskKeywords]`` and hands it on as ``**options``:
type checkers look at each keyword where it is written, and a keyword that is added here is
everybody's. Under ``@spelled_out(TaskKeywords)`` its signature names them, too. Whoever takes a
block calls ``refuse_unknown`` first. Knows nothing of the wire: ``wire.py`` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypedDict, TypeVar

from tickwheel.api.pending import IfPending
from tickwheel.api.retry import Retry
from tickwheel.api.times import Duration
from tickwheel.api.words import Action, OrderFailure, TaskState
from tickwheel.client.tasks import Task, Value

F = TypeVar("F", bound=Callable[..., Any])

# --- tasks ---------------------------------------------------------------------------------------


class ScheduledTaskKeywords(TypedDict, total=False):
    """What may be said of a task, also of those that a schedule makes."""

    key: str | None
    """Your own name for the task, by which it is cancelled, rescheduled and looked up; several
    tasks may have the same."""
    tag: str | None
    """One word for consumers, by which groups filter."""
    properties: Mapping[str, Value] | None
    """For consumers, by name: text, numbers (whole ones of 64 bits, finite ones), booleans."""
    priority: int
    """0 (which is the default) to 255: among tasks that are due the higher goes first."""
    ttl: Duration | None
    """The task expires when it was not delivered so long after it was due: in seconds, or a
    timedelta."""
    retry: Retry | None
    """Its own policy, which wins over its group's and its topic's."""
    within: Duration | None
    """Any moment from when it would be due to so much later (seconds, or a timedelta) will do; the
    daemon chooses the emptiest of them, and the receipt's ``due`` is it."""
    order_key: str | None
    """Each group gets the tasks of one order key one at a time, by when they are due, then in the
    order in which they were enqueued. The group's ``order_retry`` says when one that has failed is
    tried again, so ``retry`` does not go with it."""


class TaskKeywords(ScheduledTaskKeywords, total=False):
    """What may be said of a task that is enqueued."""

    delay_level: int | None
    """Instead of ``delay`` or ``at``: a number from 1 on of the daemon's table of delays; over the
    highest it is the highest."""
    if_pending: Action | IfPending | None
    """What becomes of the task when another one with its ``key`` is pending: "keep", "replace",
    "reject", "add", or an IfPending; the receipt's ``outcome`` says what it was."""


# --- groups --------------------------------------------------------------------------------------


class FilterKeywords(TypedDict, total=False):
    """Which tasks are meant; what both say must hold."""

    tags: str | None
    """Tasks with one of these tags: "eu || uk"."""
    where: str | None
    """Tasks of which this is true: "amount > 10 AND region IS NOT NULL"."""


class GroupKeywords(FilterKeywords, total=False):
    """What whoever makes a group, or takes from it, says of it: the filter (a task that it leaves
    out is not owed to the group), how tasks of order keys are tried again, whose tasks have equal
    turns. Who takes from a group that has others gets a Conflict."""

    order_retry: Duration | None
    """After how long (seconds, or a timedelta) a failed task of an order key is tried again; by
    default 1 s."""
    order_attempts: int | None
    """After so many failed attempts comes ``order_failure``; by default 16."""
    order_failure: OrderFailure | None
    """What becomes of a task of an order key then: "hold", which is the default: its key is held
    until an operator acts. "dead": it goes to the dead letters, and its key goes on. "retry": it is
    tried until it succeeds, so ``order_attempts`` does not go with it."""
    fair_by: str | None
    """What has equal turns: "key", "tag", or the name of a property."""
    limit_each: int | None
    """So many deliveries of each value of ``fair_by`` may be in flight."""
    rate_each: float | None
    """Deliveries a second of each value of ``fair_by``, at most."""


class NewGroupKeywords(GroupKeywords, total=False):
    """What a group may be made with."""

    retry: Retry | None
    """The policy for its tasks that have none of their own."""
    rate: float | None
    """Deliveries a second, at most."""
    burst: int | None
    """With ``rate``: so many deliveries at once after a pause."""
    paused: bool
    """Nothing is delivered until ``resume``; enqueues go on."""


class SettingsKeywords(NewGroupKeywords, total=False):
    """What can be changed of a group, or of a topic. What is not named stays; None takes a setting
    away."""

    if_pending: Action | IfPending | None
    """Of a topic: what becomes of its tasks whose key is pending and that do not say it
    themselves."""
    broadcast_only: bool
    """Of a topic without groups: its tasks go to the broadcast subscriptions that are connected
    when they come due, and end; nobody is owed them."""


# --- selections ----------------------------------------------------------------------------------


class SelectionKeywords(FilterKeywords, total=False):
    """All of a topic of which each part that is named is true."""

    key_prefix: str | None
    """Whose key begins so."""
    due_from: datetime | None
    """Due then or later."""
    due_to: datetime | None
    """Due before then."""


class TaskSelectionKeywords(SelectionKeywords, total=False):
    """Which tasks of a topic are meant."""

    state: TaskState | None
    """Those in this state."""


class DeadSelectionKeywords(SelectionKeywords, total=False):
    """Which dead letters of a topic are meant."""

    group: str | None
    """This group's."""
    reason: str | None
    """Those whose last failure's reason contains this."""


class AnySelectionKeywords(TaskSelectionKeywords, DeadSelectionKeywords, total=False):
    """Which tasks or dead letters of a topic are meant."""


# --- for those who take a block ------------------------------------------------------------------


def spelled_out(block: Any) -> Callable[[F], F]:
    """For a function that takes ``**options: Unpack[block]``: its signature names each of them, for
    ``help``, for mocks, for whoever inspects it. A call of it costs nothing more."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=...,
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in block.__annotations__.items()
        ]
        parameters = [*list(signature.parameters.values())[:-1], *named]
        told = signature.replace(parameters=parameters)
        function.__signature__ = told  # type: ignore[attr-defined]  # inspect reads it
        return function

    return decorate


def refuse_unknown(options: Mapping[str, object], block: Any, method: str) -> None:
    """Raises TypeError, as Python does, for a keyword that the block of ``method`` has not."""
    if not block.__optional_keys__.issuperset(options):
        name = next(name for name in options if name not in block.__optional_keys__)
        raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")


def task_of(
    method: str,
    topic: str,
    body: bytes,
    delay: Duration | None,
    at: datetime | None,
    options: TaskKeywords,
) -> Task:
    """What ``method`` was given, not checked yet. Raises as ``refuse_unknown``, which this need not
    call when all is well: it is done for each task."""
    try:
        return Task(topic, body, delay=delay, at=at, **options)
    except TypeError:
        refuse_unknown(options, TaskKeywords, method)
        raise
