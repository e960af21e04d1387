"""The blocks of keywords that several calls take, with what each keyword means.

A function takes a block as ``**options: Unpack[TaskKeywords]`` and hands it on as
``**options``: type checkers look at each keyword where it is written. Under
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
    """A task may say this, also one that a schedule makes."""

    key: str | None
    """Your own name for the task, by which it is cancelled, rescheduled and looked up; several
    tasks may have the same."""

    tag: str | None
    """One word for consumers, by which groups filter: not empty or `*`, without `||` and without
    blanks around it."""

    properties: Mapping[str, Value] | None
    """For consumers, by name: text, numbers (whole ones of 64 bits, finite ones), booleans."""

    priority: int
    """Among tasks that are due, the one with the higher priority goes first; by default 0."""

    ttl: Duration | None
    """How long after its due time an undelivered task expires."""

    within: Duration | None
    """The task may come due up to this much later; the daemon chooses the emptiest moment, and the
    receipt's ``due`` is that moment."""

    order_key: str | None
    """Each group gets the tasks of one order key one at a time, by when they are due, then in the
    order in which they were enqueued. The group's ``order_retry`` says when one that has failed is
    tried again, so ``retry`` does not go with it."""

    trace: str | None
    """The W3C ``traceparent`` of whoever makes the task; its consumers have it with each delivery,
    so that their spans belong to the same trace."""

    encoding: str | None
    """What the body is, and what was done to it in that order, such as ``json;v=2,zlib``; None:
    plain bytes. The daemon keeps it, and does not look into the body."""

    shard_by: str | None
    """Where there are several shards: tasks that say the same are in one shard, whatever their keys
    are. Beside an ``order_key`` it must be the same."""

    retry: Retry | None
    """Its own policy, which wins over its group's and its topic's."""


class TaskKeywords(ScheduledTaskKeywords, total=False):
    """A task that is enqueued may say this."""

    delay_level: int | None
    """Instead of ``delay`` or ``at``: a number from 1 on of the daemon's table of delays; over the
    highest it is the highest."""

    if_pending: Action | IfPending | None
    """The rule while another task with its ``key`` is pending: "keep", "replace", "reject", "add",
    or an IfPending; the receipt's ``outcome`` says what it was."""


class FilterKeywords(TypedDict, total=False):
    """A filter says which tasks are meant; what both parts say must hold."""

    tags: str | None
    """The group wants only tasks with one of these tags: "eu || uk"."""

    where: str | None
    """The group wants only tasks of which this is true: "amount > 10 AND region IS NOT NULL"."""


class GroupKeywords(FilterKeywords, total=False):
    """Whoever makes a group, or takes from it, may say this of it."""

    order_retry: Duration | None
    """How long to wait before a failed task of an order key is tried again; by default 1 s."""

    order_attempts: int | None
    """How many failed attempts of a task of an order key there are before order_failure holds; by
    default 16."""

    order_failure: OrderFailure | None
    """The action after these attempts. "hold", the default: the key is held until an operator acts.
    "dead": it goes to the dead letters, and its key goes on. "retry": it is tried until it
    succeeds, so order_attempts does not go with it."""

    fair_by: str | None
    """The field whose values take turns: "key", "tag", or the name of a property."""

    limit_each: int | None
    """The most deliveries of each value of fair_by in flight."""

    rate_each: float | None
    """The most deliveries a second of each value of fair_by."""


class NewGroupKeywords(GroupKeywords, total=False):
    """A group may be made with these settings."""

    retry: Retry | None
    """The policy for its tasks that have none of their own."""

    rate: float | None
    """The most deliveries a second; without it there is no limit."""

    burst: int | None
    """The most deliveries at once after a pause; it needs a rate."""

    paused: bool
    """Whether nothing is delivered until somebody resumes it; enqueues go on."""


class SettingsKeywords(NewGroupKeywords, total=False):
    """The settings of a group or a topic that can be changed. Others stay; None removes one."""

    if_pending: Action | IfPending | None
    """For a topic: the rule for a task whose key is pending, unless the task has its own."""

    broadcast_only: bool
    """For a topic without groups: a due task goes to the broadcast subscriptions connected at that
    moment, and ends; it is owed to nobody."""


class SelectionKeywords(TypedDict, total=False):
    """A selection means everything of a topic of which each part that is named is true."""

    tags: str | None
    """Only those with one of these tags: "eu || uk"."""

    where: str | None
    """Only those of which this is true: "amount > 10 AND region IS NOT NULL"."""

    key_prefix: str | None
    """Only those whose key begins with this."""

    due_from: datetime | None
    """Only those that are due at this moment or later."""

    due_to: datetime | None
    """Only those that are due before this moment."""


class DeadSelectionKeywords(SelectionKeywords, total=False):
    """A selection of dead letters may also name a group and a reason."""

    group: str | None
    """Only dead letters of this group."""

    reason: str | None
    """Only dead letters whose last reason contains this text."""


class TaskSelectionKeywords(SelectionKeywords, total=False):
    """A selection of tasks may also name a state."""

    state: TaskState | None
    """Only tasks in this state."""


class AnySelectionKeywords(TaskSelectionKeywords, DeadSelectionKeywords, total=False):
    """A selection of tasks or of dead letters, as the kind of the bulk operation has it."""


class MovingKeywords(TypedDict, total=False):
    """A command that moves tasks says where to, and one that gives them a new life how long."""


class MoveKeywords(MovingKeywords, total=False):
    """A reschedule says by one of these where tasks are moved to."""

    delay: Duration | None
    """The new delay, from now on."""

    at: datetime | None
    """The new due time."""

    shift: Duration | None
    """How much later each task becomes due; negative: earlier."""


class SpreadKeywords(MovingKeywords, total=False):
    """A spread says the due window in whose emptiest ticks tasks are put."""

    start: datetime | None
    """The first moment of the window; by default each task's own due time."""

    within: Duration | None
    """The length of the window."""

    end: datetime | None
    """The first moment behind the window."""


class RequeueKeywords(MovingKeywords, total=False):
    """A requeue may give tasks a new time to live."""

    ttl: Duration | None
    """A new time to live, from the requeue on, in place of the task's own. It is the task's in all
    of its groups."""


class AnyMoveKeywords(RequeueKeywords, SpreadKeywords, MoveKeywords, total=False):
    """A command on tasks says what they get, by the block that it has."""
