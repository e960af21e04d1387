"""Verbs on stored tasks (cancel, reschedule, look up, list) and on dead letters (list, requeue,
delete)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, Any, Final, NamedTuple, Self

from tickwheel.api.frames import SESSION_BYTES, FrameType
from tickwheel.api.kinds import (
    BODY,
    DEAD_LETTERS,
    ENCODING,
    FLAG,
    ID,
    IDS,
    KEY,
    NAME,
    POLICY,
    PROPERTIES,
    RULE,
    TAG,
    TRACEPARENT,
    Choice,
    FieldKind,
    Moment,
    Shift,
    Span,
    Text,
    Whole,
    Window,
    array,
    wrong,
)
from tickwheel.api.shapes import Answer, Field, Request, called, maybe_when, place, when
from tickwheel.api.times import moment
from tickwheel.api.verb import Audit, Method, Need, Of, Right, Routing, Verb
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits, delay_of_level
from tickwheel.model.values import INTEGER_MIN, shard_of

Value = str | int | float | bool
"""The type of a property's value."""
PAGE: Final = Whole(1, 1_000)
STATES: Final = Choice("TaskState", "scheduled", "ready", "in_flight", "waiting", "dead")
EXPLAINED: Final[Mapping[str, str]] = {
    "topic_paused": "Its topic is paused.",
    "group_paused": "Its group is paused.",
    "key_paused": "Its order key, or the property value by which its group is shared, is paused.",
    "key_held": "Its order key is held by a failed task: this one, or the one in `behind`.",
    "clock_held": "It is due by the wall clock, but that clock is too far ahead to be trusted.",
    "shard_away": "The shard that holds it, or might hold it, cannot be reached.",
    "similar_topic": "Its topic has no consumer, but a topic with a similar name has one.",
    "no_group": "Its topic has no group yet.",
    "no_subscriber": "Nobody subscribes to its group.",
    "endpoint": "Its group is pushed or forwarded, and the other system is slow or unreachable.",
    "slow_consumers": "The consumers of its group have used up their prefetch.",
    "dead": "It is a dead letter; the last failure gives the reason.",
    "rate": "The rate limit of its topic, its group, or its share value delays it.",
    "share_limit": "`limit_each` tasks with the same share value are already in flight.",
    "key_busy": "An earlier task with its order key is not finished.",
    "alone": "Consumers died handling it, so it waits for a connection with no other delivery.",
    "deleting": "Its group, or the last group of its topic, is being deleted.",
    "retry_wait": "It waits for its next attempt, or was postponed.",
    "queued": "It is ready and will be delivered next.",
    "leased": "A consumer is handling it.",
    "scheduled": "It is not yet due.",
    "transaction": "It belongs to an undecided transaction.",
    "acked": "It is finished.",
    "filtered": "A filter excluded it.",
    "expired": "Its time to live has passed.",
    "cancelled": "It was cancelled, or replaced by a newer task with its key.",
    "deleted": "It was deleted from the dead letters, or with its group or topic.",
    "gone": "It has ended, but the daemon no longer knows how.",
    "not_found": "The daemon does not know this task.",
}
"""Every cause that an explanation can name, with its meaning. Causes that need an operator come
first, then causes that resolve themselves, then the ways in which tasks end. If a task has several
groups, the explanation names the first of their causes in this order."""
LEVEL_MAX: Final = 2**31 - 1
"""Highest delay level."""
PROPERTY_LENGTH_MAX: Final = 512
"""Maximum characters of NAME=VALUE in a listing's filter."""

# --- the shard of a task -------------------------------------------------------------------------


def basis_of(shard_by: str | None, order_key: str | None, key: str | None) -> str | None:
    """Return the basis, which determines the task's shard, or None if the task can be in any
    shard."""
    if shard_by is not None:
        return shard_by
    return order_key if order_key is not None else key


def indexes_by_shard(tasks: Sequence[Any], key: bytes, shards: int) -> dict[int, list[int]]:
    """Return the indexes of the tasks that each shard gets from a request with an idempotency key.
    A task without a basis goes to the key's shard, where a resend finds it again."""
    home, parts = shard_of(key.hex(), shards), dict[int, list[int]]()
    for index, task in enumerate(tasks):
        options = task[3] if len(task) == 4 else {}
        basis = basis_of(*(options.get(name) for name in ("shard_by", "order_key", "key")))
        shard = home if basis is None else shard_of(basis, shards)
        parts.setdefault(shard, []).append(index)
    return parts


def due_of(wire: Sequence[Any], accepted_ms: int, levels_ms: Sequence[int]) -> int:
    """Return the due time, in ms, of a task of an ENQUEUE that a daemon with these delay levels
    accepted at ``accepted_ms``; a past time counts as now. A due window is not considered."""
    delay_ms = wire[2]
    if delay_ms is None:
        level = wire[3].get("delay_level")
        if level is not None:
            return accepted_ms + delay_of_level(levels_ms, level)
        due_ms: int = wire[3]["due_ms"]
        return max(accepted_ms, due_ms)
    return accepted_ms + int(delay_ms)


def has_window(wire: Any) -> bool:
    """Return whether the daemon chooses the due time of a task of an ENQUEUE, which may not have
    been checked, in a due window."""
    is_long = type(wire) is tuple and len(wire) == 4
    return is_long and type(wire[3]) is dict and wire[3].get("within_ms") is not None


def rest_key(key: bytes) -> bytes:
    """Derive the idempotency key for the tasks of a request that no shard had accepted before the
    number of shards changed."""
    return blake2b(key, digest_size=SESSION_BYTES, person=b"tw-once-rest").digest()


# --- blocks --------------------------------------------------------------------------------------


class Option(NamedTuple):
    """Further attributes of a request field that is an option of a task."""

    help: str
    """Help text on the command line."""
    metavar: str | None = None
    """Placeholder for the value in the command line's help."""
    is_delivered: bool = True
    """Whether consumers see the option."""
    is_listed: bool = True
    """Whether listings show the option."""
    event: str = ""
    """The CloudEvents attribute that carries the option, or ""."""


class ListedOptions:
    """The options that listings show. Each is a field of ``model.records.TaskOptions`` with the
    same name."""

    key: Annotated[
        str | None,
        KEY,
        "Your name for the task, which you can use to cancel, reschedule or look it up; several"
        " tasks can share one key.",
        Option("Your name for the task, delivered with it."),
    ] = None
    tag: Annotated[
        str | None,
        TAG,
        "A word by which groups filter: not empty, not `*`, without `||`, and without leading or"
        " trailing blanks.",
        Option("A word by which groups filter."),
    ] = None
    properties: Annotated[
        Any,
        PROPERTIES,
        "Values for consumers, by name: strings, 64-bit integers, finite floats, booleans.",
        Option("A property; repeat for several. NAME:=12 is a number.", "NAME=VALUE"),
    ] = None
    priority: Annotated[
        int,
        Whole(0, 255),
        "Due tasks with a higher priority are delivered first; by default 0.",
        Option("Due tasks with a higher priority are delivered first."),
    ] = 0
    ttl_ms: Annotated[
        int | None,
        Span(1, "delay_ms_max"),
        "Time to live: how long after its due time an undelivered task expires.",
        Option("How long after its due time an undelivered task expires.", is_delivered=False),
    ] = None
    within_ms: Annotated[
        int | None,
        Window(),
        "The due window: the daemon chooses the moment with the fewest due tasks within"
        " this time after the requested due time. The receipt's ``due`` is that moment.",
        Option(
            "The due window: the moment with the fewest due tasks within this time.",
            is_delivered=False,
        ),
    ] = None
    order_key: Annotated[
        str | None,
        KEY,
        "Each group gets the tasks of one order key one at a time, by due time, then in the order"
        " in which they were enqueued. The group's ``order_retry`` determines when a failed task"
        " is retried, so ``retry`` cannot be combined with an order key.",
        Option(
            "Each group gets the tasks of one order key one at a time, in order.",
            "KEY",
            event="partitionkey",
        ),
    ] = None
    trace: Annotated[
        str | None,
        TRACEPARENT,
        "The producer's W3C ``traceparent``. It is part of each delivery, so that the consumers'"
        " spans belong to the same trace.",
        Option("The producer's trace context, for consumers.", "TRACEPARENT", event="traceparent"),
    ] = None
    encoding: Annotated[
        str | None,
        ENCODING,
        "The body's type and the steps applied to it, in order, such as ``json;v=2,zlib``; None"
        " means plain bytes. The daemon stores it without reading the body.",
        Option("The body's type and steps, such as json;v=2,zlib.", "ENCODING"),
    ] = None
    shard_by: Annotated[
        str | None,
        KEY,
        "With several shards: tasks with the same ``shard_by`` are in the same shard, whatever"
        " their keys are. If there is an ``order_key``, both must be equal.",
        Option("Tasks with the same value are in one shard.", "NAME", is_delivered=False),
    ] = None


class ScheduledTaskFields(ListedOptions, Request):
    """Options of a task, including tasks that a schedule creates."""

    retry: Annotated[
        Any,
        POLICY,
        "The task's retry policy, which overrides its group's and its topic's.",
        Option("", is_delivered=False, is_listed=False),
    ] = None


class TaskFields(ScheduledTaskFields):
    """Options of an enqueued task."""

    delay_level: Annotated[
        int | None,
        Whole(1, LEVEL_MAX),
        "Instead of ``delay`` or ``at``: a level of the daemon's delay table, counted from 1."
        " A level beyond the end of the table means the last level.",
    ] = None
    if_pending: Annotated[
        Any,
        RULE,
        'The rule that applies while another task with the same ``key`` is pending: "keep",'
        ' "replace", "reject", "add", or an IfPending. The receipt contains the ``outcome``.',
    ] = None


def kept_options(*, delivered: bool = False) -> tuple[tuple[Field, Option], ...]:
    """Return the options that are stored with a task, or only those that consumers see."""
    return tuple(
        (field, field.mark)
        for field in ScheduledTaskFields.fields()
        if field.mark.is_delivered or not delivered
    )


# --- requests ------------------------------------------------------------------------------------


def success_outcomes(command: str) -> tuple[str, ...]:
    """Return the outcomes of one task that count as success of the command."""
    return ("cancelled", "already_cancelled") if command == "cancel" else ("scheduled",)


def check_options(options: Mapping[str, Any], field: str) -> None:
    """Check that the options of a task are compatible. Raise BadRequest if they are not."""
    order_key = options.get("order_key")
    if order_key is None:
        return
    if options.get("retry") is not None:
        raise BadRequest(
            f"{field} has both order_key and retry; the group's order_retry decides when a failed"
            " task of an order key is tried again"
        )
    if options.get("shard_by") not in (None, order_key):
        raise BadRequest(
            f"{field} has different values for shard_by and order_key; all tasks of an order key"
            " must be in one shard"
        )


def check_selection(ids: Any, topic: Any, key: Any, matching: Any = None) -> None:
    """Check that tasks are selected in exactly one way. Raise BadRequest if they are not."""
    ways = sum(selector is not None for selector in (ids, key, matching))
    if ways != 1 or (topic is None) == (ids is None):
        raise BadRequest(
            "select tasks by ids, by topic and key, or (in a bulk operation) by topic and filter"
        )


class Selection(Request):
    """The request selects tasks by their ids, or the unfinished tasks of a topic by their key."""

    ids: Annotated[Any, IDS, "The ids of the tasks."] = place(default=None)
    topic: Annotated[str | None, NAME, "The topic of the tasks."] = None
    key: Annotated[
        str | None, KEY, "The key: selects every unfinished task of the topic that has it."
    ] = None

    def check_together(self) -> None:
        check_selection(self.ids, self.topic, self.key)


class LookUp(Selection):
    """The request selects tasks to look up."""

    newest: Annotated[bool, FLAG, "Return only the newest task with the key."] = False
    until_ms: Annotated[
        int | None,
        Moment(),
        "Only tasks with the key that were enqueued at this moment or earlier.",
    ] = called("not_after")


class TaskToExplain(Request):
    """The request selects one task by its id, or the newest task of a topic by its key."""

    id: Annotated[int | None, ID, "The id of the task."] = place(default=None)
    topic: Annotated[str | None, NAME, "The topic, together with a key."] = None
    key: Annotated[
        str | None,
        KEY,
        "The key: selects the newest unfinished task of the topic that has it.",
    ] = None

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The id as a tuple, or None if it is not set."""
        return None if self.id is None else (self.id,)

    def check_together(self) -> None:
        check_selection(self.ids, self.topic, self.key)


class Moving(Request):
    """Base of the blocks that change due times or times to live."""

    def move_fields(self) -> dict[str, int]:
        """Return the fields that are set, by name. Raise BadRequest if they are not compatible."""
        raise NotImplementedError

    def due_at_ms(self, now_ms: int) -> int | None:
        """Return the earliest new due time, or None if it depends on each task's due time."""
        return None


class MoveFields(Moving):
    """The fields of a reschedule, of which exactly one must be set."""

    delay_ms: Annotated[int | None, Span(), "The new delay, counted from now."] = None
    due_ms: Annotated[int | None, Moment(INTEGER_MIN), "The new due time."] = called("at")
    shift_ms: Annotated[
        int | None, Shift(), "How much later each task becomes due; negative values mean earlier."
    ] = None

    def move_fields(self) -> dict[str, int]:
        values = {name: ms for name, ms in self.values(MoveFields).items() if ms is not None}
        if len(values) != 1:
            names = ", ".join(field.name for field in MoveFields.fields())
            wire = f"(on the wire: {names})"
            raise BadRequest(f"reschedule must have exactly one of delay, at and shift {wire}")
        return values

    def due_at_ms(self, now_ms: int) -> int | None:
        return self.due_ms if self.delay_ms is None else now_ms + self.delay_ms


class SpreadFields(Moving):
    """The fields of a spread, which moves tasks to the emptiest ticks of this due window."""

    start_ms: Annotated[
        int | None, Moment(), "The start of the window; by default each task's own due time."
    ] = None
    within_ms: Annotated[int | None, Window(1), "The length of the window."] = None
    end_ms: Annotated[int | None, Moment(), "The first moment after the window."] = None

    def move_fields(self) -> dict[str, int]:
        start_ms, within_ms, end_ms = self.start_ms, self.within_ms, self.end_ms
        if (within_ms is None) == (end_ms is None) or (end_ms is not None and start_ms is None):
            raise BadRequest("spread must have within_ms, or start_ms and end_ms")
        if within_ms is None and start_ms is not None and end_ms is not None:
            within_ms = end_ms - start_ms
        values = {"start_ms": start_ms, "within_ms": within_ms}
        return {name: ms for name, ms in values.items() if ms is not None}

    def due_at_ms(self, now_ms: int) -> int | None:
        return self.start_ms


class RequeueFields(Moving):
    """The fields of a requeue, which can give tasks a new time to live."""

    ttl_ms: Annotated[
        int | None,
        Span(1, "delay_ms_max"),
        "A new time to live, counted from the requeue. It replaces that of the task in all of its"
        " groups.",
    ] = None

    def move_fields(self) -> dict[str, int]:
        return {} if self.ttl_ms is None else {"ttl_ms": self.ttl_ms}


MOVES: Final[Mapping[str, type[Moving]]] = {
    "reschedule": MoveFields,
    "spread": SpreadFields,
    "requeue": RequeueFields,
}
"""Command → the block with its new due times or time to live."""


class AnyMoveFields(RequeueFields, SpreadFields, MoveFields):
    """The fields of all blocks in ``MOVES``."""


class Move(MoveFields, Selection):
    """The request names tasks and their new due time."""

    @classmethod
    def is_repeatable(cls, frame: tuple[Any, ...]) -> bool:
        return frame[-1].get("shift_ms") is None  # a shift counts from the present due time


class Spread(SpreadFields, Selection):
    """The request names tasks and the window over which to spread them."""

    @classmethod
    def is_repeatable(cls, frame: tuple[Any, ...]) -> bool:
        return frame[-1].get("start_ms") is not None  # else the present due time is the start


class TasksPage(Request):
    """The request asks for a page of tasks."""

    topic: Annotated[str | None, NAME, "Only tasks of this topic."] = None
    state: Annotated[str | None, STATES, "Only tasks in this state."] = None
    key: Annotated[str | None, Text(), "Only tasks with this key."] = None
    key_prefix: Annotated[str | None, Text(), "Only tasks whose key begins with this text."] = None
    tag: Annotated[str | None, Text(), "Only tasks with this tag."] = None
    property: Annotated[
        str | None, Text(PROPERTY_LENGTH_MAX), "Only tasks with this property: NAME=VALUE."
    ] = None
    until_ms: Annotated[
        int | None, Moment(), "Only tasks that were enqueued at this moment or earlier."
    ] = called("not_after")
    newest: Annotated[bool, FLAG, "List the newest tasks first."] = called(
        "newest_first", default=False
    )
    after: Annotated[int | None, ID, "``next`` from the previous page."] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


class PeekPage(Request):
    """The request asks for a page of the tasks that a topic still has to deliver."""

    topic: Annotated[str, NAME, "The topic."] = place()
    key: Annotated[str | None, KEY, "Only tasks with this key."] = None
    due: Annotated[bool, FLAG, "Only tasks that are due."] = False
    newest: Annotated[bool, FLAG, "List tasks in descending order of ids."] = called(
        "newest_first", default=False
    )
    after: Annotated[int | None, ID, "``next`` from the previous page."] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


# --- answers -------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A failed attempt and its reason."""

    attempt: Annotated[int, "The number of the delivery that failed, counted from 1."]
    at_ms: Annotated[int, "When it failed, in milliseconds since 1970."]
    reason: Annotated[str, "Why it failed."]
    subscriber: Annotated[str, "The consumer that handled the task."]
    trace: Annotated[
        str, "The consumer's stack trace if this failure made the task a dead letter, else empty."
    ]

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Read the failure from the daemon's array, which can have further elements."""
        attempt, at_ms, reason, subscriber, trace = raw[:5]
        return cls(attempt, at_ms, reason, subscriber, trace)


class TaskOutcome(NamedTuple):
    """The effect of a command on one task."""

    id: int | None
    """None if no task with this key is known (``status`` is "unknown")."""
    status: str
    """What the command did, or the state that prevents it."""
    due_ms: int | None = None
    """The new due time of a task that was moved, in milliseconds since 1970."""

    @property
    def due(self) -> datetime | None:
        """The new due time of a task that was moved."""
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Read the outcome from the daemon's array."""
        task_id, status, due_ms = (*raw, None)[:3]
        return cls(
            None if task_id is None else int(task_id),
            str(status),
            None if due_ms is None else int(due_ms),
        )


class AcceptedIds(NamedTuple):
    """The tasks that a request created."""

    accepted_ms: int
    """When the daemon accepted the tasks, by its clock, in milliseconds since 1970."""
    ids: tuple[int, ...]

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Read the ids from the daemon's array."""
        accepted_ms, ids = raw[:2]
        return cls(int(accepted_ms), tuple(map(int, ids)))


class GroupInfo(Answer):
    """The state of a task in one group."""

    state: Annotated[
        str,
        'The state of the task in this group: "ready", "in_flight", "waiting", "held", "dead",'
        " or how it ended.",
    ]
    attempt: Annotated[int, "How many times the task was delivered to this group."]
    at_ms: Annotated[
        int,
        Moment(),
        "Depending on ``state``: the end of the lease, the time of the retry, or when the task died"
        " or was acked.",
    ]
    failures: Annotated[tuple[Failure, ...], "The failed attempts of this group, the oldest first."]
    retries_left: Annotated[
        int | None,
        "How many retries are left before the task is dead or its order key held; None without a"
        " limit.",
    ] = None
    snoozes: Annotated[int, "How many times the task was snoozed."] = 0
    deaths: Annotated[int, "How many consumers died while they held the task."] = 0


class TaskState(Answer):
    """The state of a task, or how it ended."""

    id: Annotated[int, ID, "The id of the task."]
    state: Annotated[
        str,
        '"scheduled", "ready", "in_flight", "waiting", "dead", or how it ended: "acked",'
        ' "cancelled", "expired", "deleted"; "gone" if it ended long ago; "unknown" if there was no'
        " such task.",
    ]


class TaskInfo(ListedOptions, TaskState):
    """A task as returned by ``lookup``. Once the task is no longer stored, only id and state are
    set."""

    topic: Annotated[str | None, NAME, "The topic of the task."] = None
    body: Annotated[bytes | None, BODY, "The body of the task."] = None
    due_ms: Annotated[int | None, Moment(), "When the task is due, in milliseconds since 1970."] = (
        None
    )
    enqueued_ms: Annotated[
        int | None, Moment(), "When the task was enqueued, in milliseconds since 1970."
    ] = None
    properties: Annotated[
        Mapping[str, Value], PROPERTIES, "The properties set by the producer, by name."
    ] = {}
    within_ms: Annotated[
        int | None,
        "The due window: ``due_ms`` is the moment with the fewest due tasks within this time after"
        " ``asked_ms``.",
    ] = None
    asked_ms: Annotated[
        int | None,
        Moment(),
        "The requested due time, if the daemon chose another one within the due window, in"
        " milliseconds since 1970.",
    ] = None
    slot: Annotated[int | None, "The slot of the wheel that holds the task."] = None
    cycles: Annotated[
        int | None, "How many rotations of the wheel are left until the task is due."
    ] = None
    groups: Annotated[
        Mapping[str, GroupInfo],
        "The state of the task in each group that must receive it, by the group's name.",
    ] = {}
    replay_of: Annotated[
        int | None,
        ID,
        "The original task, if this one was created by a reset of the group ``replay_to``.",
    ] = None
    replay_to: Annotated[
        str | None, NAME, "The only group that receives the task, if it is a replay."
    ] = None

    due = maybe_when("due_ms", "When it is due.")


class Reason(Answer):
    """A cause, a sentence that explains it, and the command that resolves it."""

    cause: Annotated[str, Choice("str", *EXPLAINED), "The first cause that applies, in this order."]
    detail: Annotated[str, "The cause in a sentence; times are in UTC."]
    command: Annotated[
        str | None, "The command that resolves it or shows details; None if there is none."
    ] = None
    group: Annotated[str | None, NAME, "The group concerned."] = None
    behind: Annotated[int | None, ID, "The task for which this one waits."] = None
    next_ms: Annotated[
        int | None, Moment(), "When the task proceeds by itself, if that is known."
    ] = None

    next = maybe_when("next_ms", "When the task proceeds by itself, if that is known.")


class Explanation(Reason):
    """Why a task is in its state: the reason in the group that most needs attention and, in
    ``others``, the reasons in the other groups."""

    id: Annotated[int | None, ID, "The task; None if no task with the key is known."] = None
    topic: Annotated[str | None, NAME, "The topic of the task, if it is known."] = None
    others: Annotated[tuple[Reason, ...], "The reasons in the task's other groups."] = ()
    others_left_out: Annotated[int, "How many groups did not fit into ``others``."] = 0


class Tasks(Answer):
    """A page of tasks."""

    tasks: Annotated[list[TaskInfo], "The tasks of this page."]
    next: Annotated[int | None, ID, "``after`` for the next page; None on the last page."] = None


_CHANGE, _READ = Need(Right.PRODUCE, Of.SELECTED), Need(Right.READ, Of.SELECTED)
_TAG: Final = "tasks"

VERBS: Final = (
    Verb("cancel", Selection, list[TaskOutcome], _CHANGE, "Cancel tasks",
         'Cancel tasks that no consumer is handling. The status of each is "cancelled",'
         ' "already_cancelled", or the state that prevents it: "in_flight", "acked", "expired",'
         ' "dead", "gone", "unknown", …',
         FrameType.CANCEL, path="POST /v1/cancellations", tag=_TAG, audit=Audit.ALWAYS,
         changes=True, bulk="cancel", methods=(Method("cancel", word="CancelWord"),),
         routing=Routing.IDS),
    Verb("reschedule", Move, list[TaskOutcome], _CHANGE, "Reschedule tasks",
         "Give tasks a new due time by exactly one of ``delay`` (from now, by the daemon's clock),"
         " ``at`` and ``shift``.",
         FrameType.RESCHEDULE, audit=Audit.ALWAYS, changes=True, bulk="reschedule",
         methods=(Method("reschedule"),), routing=Routing.IDS),
    Verb("spread", Spread, list[TaskOutcome], _CHANGE, "Spread tasks over a due window",
         "Give scheduled tasks a due window: each task moves to one of the window's emptiest ticks,"
         " which becomes its due time. A task that is not scheduled does not move, and its state is"
         " the status.",
         FrameType.SPREAD, path="POST /v1/spreads", tag=_TAG, errors=("due_too_far",),
         audit=Audit.ALWAYS, changes=True, bulk="spread", methods=(Method("spread"),),
         routing=Routing.IDS),
    Verb("run_now", Selection, list[TaskOutcome], _CHANGE, "Run tasks now",
         "Make tasks due now.",
         FrameType.RUN_NOW, path="POST /v1/runs", tag=_TAG, audit=Audit.ALWAYS, changes=True,
         bulk="run_now", methods=(Method("run_now"),), routing=Routing.IDS),
    Verb("look_up", LookUp, list[TaskInfo], _READ, "Look tasks up", frame=FrameType.LOOKUP,
         routing=Routing.IDS),
    Verb("explain", TaskToExplain, Explanation, Need(Right.READ, Of.FOUND),
         "Explain why a task is in its state", frame=FrameType.EXPLAIN, prompt=False,
         command="explain ID",
         routing=Routing.TASK),
    Verb(
        "list_tasks", TasksPage, Tasks, Need(Right.READ, Of.FOUND),
        "List tasks that have not ended",
        "Return stored tasks in the order of their ids, descending with ``newest_first``. Filtering"
        " by a key without its topic uses no index and reads all tasks.",
        FrameType.LIST, path="GET /v1/tasks", tag=_TAG, prompt=False, pages="tasks",
        methods=(Method("list_tasks"),), command="list",
        routing=Routing.PAGES,
    ),
    Verb(
        "peek", PeekPage, Tasks, Need(Right.READ, Of.NAMED),
        "Peek at the tasks of a topic",
        "Return the tasks that the topic still has to deliver, with their bodies: scheduled, ready,"
        " in flight and waiting for a retry, but no dead letters. Peeking needs no group, takes no"
        " lease and counts no attempt.",
        FrameType.PEEK, path="GET /v1/topics/{topic}/peek", tag=_TAG, prompt=False, pages="tasks",
        methods=(Method("peek"),),
        routing=Routing.PAGES,
    ),
)  # fmt: skip


class LetterPlace(FieldKind):
    """The dead letter after which a page begins: [id, group]; ID.GROUP over HTTP."""

    word = "[id, group]"
    json = str

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        if type(value) is not tuple or len(array(value, field, 2)) != 2:
            wrong(field, "[id, group]", value)
        task_id, group = value
        ID.check(task_id, f"{field}[0]", limits)
        if group != "":  # which precedes every group of the id
            NAME.check(group, f"{field}[1]", limits)
        return value


class DeadPage(Request):
    """The request asks for a page of dead letters."""

    topic: Annotated[str | None, NAME, "Only dead letters of this topic."] = None
    group: Annotated[str | None, NAME, "Only dead letters of this group."] = None
    since_ms: Annotated[int | None, Moment(), "Only tasks that died at this moment or later."] = (
        None
    )
    until_ms: Annotated[int | None, Moment(), "Only tasks that died before this moment."] = None
    reason: Annotated[
        str | None,
        Text(),
        "Only dead letters whose last reason contains this text, ignoring case.",
    ] = None
    after: Annotated[Any, LetterPlace(), "``next`` from the previous page."] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


class Letters(Request):
    """The request names dead letters."""

    pairs: Annotated[Any, DEAD_LETTERS, "Dead letters, each as (id, group)."]


class Requeue(RequeueFields, Letters):
    """The request names dead letters to requeue."""


class DeadLetter(Answer):
    """A task that a group could not finish, until it is requeued or deleted."""

    id: Annotated[int, ID, "The id of the task."]
    group: Annotated[str, NAME, "The group that could not finish the task."]
    topic: Annotated[str, NAME, "The topic of the task."]
    died_ms: Annotated[
        int, Moment(), "When the task became a dead letter, in milliseconds since 1970."
    ]
    attempt: Annotated[int, "How many times the task was delivered to the group."]
    reason: Annotated[str, "The reason for the last failure."]
    failures: Annotated[tuple[Failure, ...], "The failed attempts, the oldest first."]
    failed: Annotated[int, "How many attempts failed."] = 0
    deaths: Annotated[int, "How many consumers died while they held the task."] = 0

    died = when("died_ms", "When it died.")


class DeadLetters(Answer):
    """A page of dead letters."""

    dead: Annotated[list[DeadLetter], "The dead letters of this page."]
    next: Annotated[
        tuple[int, str] | None,
        LetterPlace(),
        "``after`` for the next page; None on the last page.",
    ]


_LETTERS, _OPERATE = "dead letters", Need(Right.OPERATE, Of.FOUND)

LETTER_VERBS: Final = (
    Verb(
        "list_dead", DeadPage, DeadLetters, Need(Right.READ, Of.FOUND), "List dead letters",
        "Return dead letters in the order of their ids.",
        FrameType.DEAD_LIST, path="GET /v1/dead-letters", tag=_LETTERS, prompt=False, pages="dead",
        methods=(Method("dead_list"),), command="dead list",
        routing=Routing.PAGES,
    ),
    Verb("requeue_dead", Requeue, list[str], _OPERATE, "Requeue dead letters",
         'Deliver dead letters again and reset their failures. Return for each "requeued",'
         ' "unknown", or "ttl_over" if its time to live has passed and ``ttl`` is not given.',
         FrameType.DEAD_REQUEUE, audit=Audit.ALWAYS, changes=True, repeat=False, bulk="requeue",
         methods=(Method("dead_requeue", word="RequeueWord"),), routing=Routing.IDS),
    Verb("delete_dead", Letters, list[str], _OPERATE, "Delete dead letters",
         'Delete dead letters permanently. Return "deleted" or "unknown" for each.',
         FrameType.DEAD_DELETE, audit=Audit.ALWAYS, changes=True, repeat=False, bulk="delete",
         methods=(Method("dead_delete", word="DeleteWord"),), routing=Routing.IDS),
)  # fmt: skip
