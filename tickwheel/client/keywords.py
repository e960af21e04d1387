"""The blocks of keyword arguments that several calls share.

A function takes a block as ``**options: Unpack[TaskKeywords]`` and hands it on as
``**options``: type checkers check each keyword at the call. Under
``@spelled_out(TaskKeywords)`` its signature also names them.

Written by scripts/generate from the blocks of tickwheel/api: change that, and run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict

from tickwheel.api.frames import Action, OrderFailure, TaskState
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.tasks import Value
from tickwheel.api.times import Duration


class ScheduledTaskKeywords(TypedDict, total=False):
    """Options of a task, including tasks that a schedule creates."""

    key: str | None
    """Your name for the task, which you can use to cancel, reschedule or look it up; several tasks
    can share one key."""

    tag: str | None
    """One word by which groups filter: not empty, not `*`, without `||`, and without leading or
    trailing blanks."""

    properties: Mapping[str, Value] | None
    """Values for consumers, by name: text, 64-bit integers, finite floats, booleans."""

    priority: int
    """Due tasks with a higher priority are delivered first; by default 0."""

    ttl: Duration | None
    """Time to live: how long after its due time an undelivered task expires."""

    within: Duration | None
    """The due window: the daemon chooses the moment with the fewest due tasks within this time
    after the requested due time. The receipt's ``due`` is that moment."""

    order_key: str | None
    """Each group gets the tasks of one order key one at a time, by due time, then in the order in
    which they were enqueued. The group's ``order_retry`` decides when a failed task is tried again,
    so ``retry`` cannot be combined with an order key."""

    trace: str | None
    """The producer's W3C ``traceparent``. It is part of each delivery, so that the consumers' spans
    belong to the same trace."""

    encoding: str | None
    """The body's type and the steps applied to it, in order, such as ``json;v=2,zlib``; None means
    plain bytes. The daemon stores it without reading the body."""

    shard_by: str | None
    """With several shards: tasks with the same ``shard_by`` are in one shard, independent of their
    keys. If there is an ``order_key``, both must be equal."""

    retry: Retry | None
    """The task's retry policy, which overrides its group's and its topic's."""


class TaskKeywords(ScheduledTaskKeywords, total=False):
    """Options of an enqueued task."""

    delay_level: int | None
    """Instead of ``delay`` or ``at``: a level of the daemon's delay table, counted from 1. Levels
    beyond the end of the table mean the last level."""

    if_pending: Action | IfPending | None
    """The rule that applies while another task with the same ``key`` is pending: "keep", "replace",
    "reject", "add", or an IfPending. The receipt has the ``outcome``."""


class FilterKeywords(TypedDict, total=False):
    """A filter selects tasks that satisfy both of its parts."""

    tags: str | None
    """The group gets only tasks with one of these tags: "eu || uk"."""

    where: str | None
    """The group gets only tasks for which this condition is true: "amount > 10 AND region IS NOT
    NULL"."""


class GroupKeywords(FilterKeywords, total=False):
    """Settings of a group that its creator and its consumers can specify."""

    order_retry: Duration | None
    """The delay before a failed task of an order key is tried again; by default 1 s."""

    order_attempts: int | None
    """Failed attempts of a task of an order key until order_failure applies; by default 16."""

    order_failure: OrderFailure | None
    """The action after order_attempts failures. "hold", the default: the key is held until an
    operator acts. "dead": the task becomes a dead letter, and its key continues. "retry": the task
    is tried until it succeeds, and order_attempts must not be given."""

    fair_by: str | None
    """The field whose values take turns: "key", "tag", or the name of a property."""

    limit_each: int | None
    """Maximum deliveries in flight per value of fair_by."""

    rate_each: float | None
    """Maximum deliveries per second per value of fair_by."""


class NewGroupKeywords(GroupKeywords, total=False):
    """Settings of a new group."""

    retry: Retry | None
    """The policy for tasks without a retry policy."""

    rate: float | None
    """Maximum deliveries per second; unlimited by default."""

    burst: int | None
    """Maximum burst of deliveries after an idle time; it needs a rate."""

    paused: bool
    """Whether deliveries are paused until somebody resumes them; tasks can still be enqueued."""


class SettingsKeywords(NewGroupKeywords, total=False):
    """Settings of a group or a topic that can be changed. None removes a setting."""

    if_pending: Action | IfPending | None
    """For a topic: the rule for tasks whose key is pending and that have no rule of their own."""

    broadcast_only: bool
    """For a topic without groups: a due task goes to the broadcast subscriptions connected at that
    moment, and then ends."""


class SelectionKeywords(TypedDict, total=False):
    """A selection means all tasks of a topic that satisfy every named field."""

    tags: str | None
    """Only tasks with one of these tags: "eu || uk"."""

    where: str | None
    """Only tasks for which this condition is true: "amount > 10 AND region IS NOT NULL"."""

    key_prefix: str | None
    """Only tasks whose key begins with this text."""

    due_from: datetime | None
    """Only tasks that are due at this moment or later."""

    due_to: datetime | None
    """Only tasks that are due before this moment."""


class DeadSelectionKeywords(SelectionKeywords, total=False):
    """A selection of dead letters can also name a group and a reason."""

    group: str | None
    """Only dead letters of this group."""

    reason: str | None
    """Only dead letters whose last reason contains this text."""


class TaskSelectionKeywords(SelectionKeywords, total=False):
    """A selection of tasks can also name a state."""

    state: TaskState | None
    """Only tasks in this state."""


class AnySelectionKeywords(TaskSelectionKeywords, DeadSelectionKeywords, total=False):
    """A selection of tasks or of dead letters, depending on the kind of the bulk operation."""


class MovingKeywords(TypedDict, total=False):
    """Base of the blocks that change due times or times to live."""


class MoveKeywords(MovingKeywords, total=False):
    """A reschedule has exactly one of these fields."""

    delay: Duration | None
    """The new delay, counted from now."""

    at: datetime | None
    """The new due time."""

    shift: Duration | None
    """How much later each task becomes due; negative values mean earlier."""


class SpreadKeywords(MovingKeywords, total=False):
    """A spread moves tasks to the emptiest ticks of this due window."""

    start: datetime | None
    """The start of the window; by default each task's own due time."""

    within: Duration | None
    """The length of the window."""

    end: datetime | None
    """The first moment after the window."""


class RequeueKeywords(MovingKeywords, total=False):
    """A requeue can give tasks a new time to live."""

    ttl: Duration | None
    """A new time to live, counted from the requeue. It replaces the task's own in all of its
    groups."""


class AnyMoveKeywords(RequeueKeywords, SpreadKeywords, MoveKeywords, total=False):
    """The fields of all blocks in ``MOVES``."""
