"""Tasks that are there: cancelled, moved, looked up, listed; and dead letters: listed, requeued,
deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, Any, Final, NamedTuple, Self

from tickwheel.api.frames import SESSION_BYTES, FrameType
from tickwheel.api.kinds import (
    BODY,
    ENCODING,
    FLAG,
    ID,
    IDS,
    KEY,
    LETTERS,
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
from tickwheel.api.verb import Audit, Method, Need, Of, Over, Right, Verb
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits
from tickwheel.model.values import INTEGER_MIN, shard_of

Value = str | int | float | bool
"""What a property may be."""
PAGE: Final = Whole(1, 1_000)
STATES: Final = Choice("TaskState", "scheduled", "ready", "in_flight", "waiting", "dead")
EXPLAINED: Final[Mapping[str, str]] = {
    "topic_paused": "Its topic is paused.",
    "group_paused": "Its group is paused.",
    "key_paused": "Its order key, or the value that shares its group, is paused.",
    "key_held": "Its order key is held by a task that has failed for good: itself, or `behind`.",
    "clock_held": "The wall clock shows its time, and is too far ahead to be believed.",
    "shard_away": "The shard that has it, or may have it, cannot be reached.",
    "similar_topic": "Nobody consumes its topic, but a similarly named one is consumed.",
    "no_group": "Its topic has no group yet.",
    "no_subscriber": "Nobody subscribes to its group.",
    "endpoint": "Its group is pushed or forwarded, and the other system is slow or away.",
    "slow_consumers": "The consumers of its group have as many deliveries as they take.",
    "dead": "It is a dead letter: the last failure says why.",
    "rate": "A rate holds it back: of its topic, its group, or its value.",
    "share_limit": "As many tasks of its value are in flight as `limit_each` allows.",
    "key_busy": "An earlier task of its order key is not done.",
    "alone": "Consumers have died with it: it waits for a connection that it has alone.",
    "deleting": "Its group, or the last group of its topic, is being deleted.",
    "retry_wait": "It waits for its next attempt, or was postponed.",
    "queued": "It is ready, and next to be handed out.",
    "leased": "A consumer has it.",
    "scheduled": "It is not due yet.",
    "transaction": "A transaction keeps it, and is not decided.",
    "acked": "It is done.",
    "filtered": "A filter left it out.",
    "expired": "Its time to live was over.",
    "cancelled": "It was cancelled, or replaced by a newer one with its key.",
    "deleted": "It was deleted: from the dead letters, or with its group or topic.",
    "gone": "It has ended, and nobody remembers how.",
    "not_found": "No such task is known.",
}
"""Every cause that an explanation can name, and what it means. What a person has to mend stands
before what goes on by itself, and that before what is over: of a task in several groups the first
counts."""
LEVEL_MAX: Final = 2**31 - 1
"""The highest number of a delay level."""
PROPERTY_LENGTH_MAX: Final = 512
"""Characters of the NAME=VALUE that a listing looks for."""

# --- where tasks are, when there are several shards ----------------------------------------------


def basis_of(shard_by: str | None, order_key: str | None, key: str | None) -> str | None:
    """The basis of a task with these options, which names its shard; None: it may be in any."""
    if shard_by is not None:
        return shard_by
    return order_key if order_key is not None else key


def once_parts(tasks: Sequence[Any], key: bytes, shards: int) -> dict[int, list[int]]:
    """Which tasks each shard gets, by their places, of a request with an idempotency key. A task
    that may be in any goes to the home of the key, so that it is in the same one next time."""
    home, parts = shard_of(key.hex(), shards), dict[int, list[int]]()
    for index, task in enumerate(tasks):
        options = task[3] if len(task) == 4 else {}
        basis = basis_of(*(options.get(name) for name in ("shard_by", "order_key", "key")))
        shard = home if basis is None else shard_of(basis, shards)
        parts.setdefault(shard, []).append(index)
    return parts


def rest_key(key: bytes) -> bytes:
    """The key under which the tasks of a request come that the shards of an earlier number have
    not taken: it follows from the request's own."""
    return blake2b(key, digest_size=SESSION_BYTES, person=b"tw-once-rest").digest()


# --- blocks --------------------------------------------------------------------------------------


class Option(NamedTuple):
    """What an option of a task is beside a field of a request."""

    help: str
    """What the command line says of it."""
    metavar: str | None = None
    """The word that stands for its value there."""
    is_delivered: bool = True
    """Whether consumers see it."""
    is_listed: bool = True
    """Whether it is shown with the task."""
    event: str = ""
    """The attribute of a CloudEvent that says it, if one does."""


class ListedOptions:
    """The options that are also shown with a task. Each is a field of the same name of
    ``model.records.TaskOptions``."""

    key: Annotated[
        str | None,
        KEY,
        "Your own name for the task, by which it is cancelled, rescheduled and looked up; several"
        " tasks may have the same.",
        Option("A name of yours for it, delivered with it."),
    ] = None
    tag: Annotated[
        str | None,
        TAG,
        "One word for consumers, by which groups filter: not empty or `*`, without `||` and without"
        " blanks around it.",
        Option("A word to select by."),
    ] = None
    properties: Annotated[
        Any,
        PROPERTIES,
        "For consumers, by name: text, numbers (whole ones of 64 bits, finite ones), booleans.",
        Option("A property; may be repeated. NAME:=12 is a number.", "NAME=VALUE"),
    ] = None
    priority: Annotated[
        int,
        Whole(0, 255),
        "Among tasks that are due, the one with the higher priority goes first; by default 0.",
        Option("Among what is due; higher goes first."),
    ] = 0
    ttl_ms: Annotated[
        int | None,
        Span(1, "delay_ms_max"),
        "How long after its due time an undelivered task expires.",
        Option("How long after its due time it is still worth delivering.", is_delivered=False),
    ] = None
    within_ms: Annotated[
        int | None,
        Window(),
        "The task may come due up to this much later; the daemon chooses the emptiest moment, and"
        " the receipt's ``due`` is that moment.",
        Option(
            "It may come due up to this much later: the emptiest moment is chosen.",
            is_delivered=False,
        ),
    ] = None
    order_key: Annotated[
        str | None,
        KEY,
        "Each group gets the tasks of one order key one at a time, by when they are due, then in"
        " the order in which they were enqueued. The group's ``order_retry`` says when one that has"
        " failed is tried again, so ``retry`` does not go with it.",
        Option(
            "Each group gets the tasks of one key one at a time, in their order.",
            "KEY",
            event="partitionkey",
        ),
    ] = None
    trace: Annotated[
        str | None,
        TRACEPARENT,
        "The W3C ``traceparent`` of whoever makes the task; its consumers have it with each"
        " delivery, so that their spans belong to the same trace.",
        Option("Its place in a trace, for consumers.", "TRACEPARENT", event="traceparent"),
    ] = None
    encoding: Annotated[
        str | None,
        ENCODING,
        "What the body is, and what was done to it in that order, such as ``json;v=2,zlib``; None:"
        " plain bytes. The daemon keeps it, and does not look into the body.",
        Option("What the body is, for consumers, like json;v=2,zlib.", "ENCODING"),
    ] = None
    shard_by: Annotated[
        str | None,
        KEY,
        "Where there are several shards: tasks that say the same are in one shard, whatever their"
        " keys are. Beside an ``order_key`` it must be the same.",
        Option("Tasks that say the same are in one shard.", "NAME", is_delivered=False),
    ] = None


class ScheduledTaskFields(ListedOptions, Request):
    """A task may say this, also one that a schedule makes."""

    retry: Annotated[
        Any,
        POLICY,
        "Its own policy, which wins over its group's and its topic's.",
        Option("", is_delivered=False, is_listed=False),
    ] = None


class TaskFields(ScheduledTaskFields):
    """A task that is enqueued may say this."""

    delay_level: Annotated[
        int | None,
        Whole(1, LEVEL_MAX),
        "Instead of ``delay`` or ``at``: a number from 1 on of the daemon's table of delays; over"
        " the highest it is the highest.",
    ] = None
    if_pending: Annotated[
        Any,
        RULE,
        'The rule while another task with its ``key`` is pending: "keep", "replace",'
        ' "reject", "add", or an IfPending; the receipt\'s ``outcome`` says what it was.',
    ] = None


def kept_options(*, delivered: bool = False) -> tuple[tuple[Field, Option], ...]:
    """The options that are kept with a task: all of them, or those that consumers see."""
    return tuple(
        (field, field.mark)
        for field in ScheduledTaskFields.fields()
        if field.mark.is_delivered or not delivered
    )


# --- requests ------------------------------------------------------------------------------------


def words_of_success(command: str) -> tuple[str, ...]:
    """The words that say of one task that the command's will is done."""
    return ("cancelled", "already_cancelled") if command == "cancel" else ("scheduled",)


def check_options(options: Mapping[str, Any], field: str) -> None:
    """Check what the options of a task say of one another. Raises BadRequest."""
    order_key = options.get("order_key")
    if order_key is None:
        return
    if options.get("retry") is not None:
        raise BadRequest(
            f"{field} has order_key and retry; give one of them: the group's order_retry says when"
            " a failed task of an order key is tried again"
        )
    if options.get("shard_by") not in (None, order_key):
        raise BadRequest(
            f"{field} has shard_by and another order_key; they must be the same: the tasks of an"
            " order key are in one shard"
        )


def check_selection(ids: Any, topic: Any, key: Any, matching: Any = None) -> None:
    """Check that tasks are named in one way, and wholly. Raises BadRequest."""
    ways = sum(one is not None for one in (ids, key, matching))
    if ways != 1 or (topic is None) == (ids is None):
        raise BadRequest(
            "tasks are named by ids, or by topic and key, or (by a bulk operation) by topic and"
            " filter: by one of these, and as a whole"
        )


class Selection(Request):
    """The request names tasks: by their ids, or as the unfinished ones of a topic with a key."""

    ids: Annotated[Any, IDS, "The ids of the tasks."] = place(default=None)
    topic: Annotated[str | None, NAME, "The topic of the tasks."] = None
    key: Annotated[
        str | None, KEY, "The key of the tasks: every unfinished task of the topic that has it."
    ] = None

    def check_together(self) -> None:
        check_selection(self.ids, self.topic, self.key)


class LookUp(Selection):
    """The request names tasks to be looked up."""

    newest: Annotated[bool, FLAG, "Whether to answer only the newest task of the key."] = False
    until_ms: Annotated[
        int | None, Moment(), "Only tasks of the key that were enqueued at this moment or earlier."
    ] = called("not_after")


class TaskToExplain(Request):
    """The request names one task: by its id, or as the newest of a topic with a key."""

    id: Annotated[int | None, ID, "The task,"] = place(default=None)
    topic: Annotated[str | None, NAME, "or a topic"] = None
    key: Annotated[str | None, KEY, "and a key: its newest task that has not ended."] = None

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The task that is named by its id."""
        return None if self.id is None else (self.id,)

    def check_together(self) -> None:
        check_selection(self.ids, self.topic, self.key)


class Moving(Request):
    """A command that moves tasks says where to, and one that gives them a new life how long."""

    def moved(self) -> dict[str, int]:
        """Return the given fields by name, checked together. Raises BadRequest."""
        raise NotImplementedError

    def due_at_ms(self, now_ms: int) -> int | None:
        """The due time that all get, or the first of them; None: it follows from their own."""
        return None


class MoveFields(Moving):
    """A reschedule says by one of these where tasks are moved to."""

    delay_ms: Annotated[int | None, Span(), "The new delay, from now on."] = None
    due_ms: Annotated[int | None, Moment(INTEGER_MIN), "The new due time."] = called("at")
    shift_ms: Annotated[
        int | None, Shift(), "How much later each task becomes due; negative: earlier."
    ] = None

    def moved(self) -> dict[str, int]:
        said = {name: ms for name, ms in self.said(MoveFields).items() if ms is not None}
        if len(said) != 1:
            names = ", ".join(field.name for field in MoveFields.fields())
            raise BadRequest(f"reschedule must have one of {names}")
        return said

    def due_at_ms(self, now_ms: int) -> int | None:
        return self.due_ms if self.delay_ms is None else now_ms + self.delay_ms


class SpreadFields(Moving):
    """A spread says the due window in whose emptiest ticks tasks are put."""

    start_ms: Annotated[
        int | None, Moment(), "The first moment of the window; by default each task's own due time."
    ] = None
    within_ms: Annotated[int | None, Window(1), "The length of the window."] = None
    end_ms: Annotated[int | None, Moment(), "The first moment behind the window."] = None

    def moved(self) -> dict[str, int]:
        start_ms, within_ms, end_ms = self.start_ms, self.within_ms, self.end_ms
        if (within_ms is None) == (end_ms is None) or (end_ms is not None and start_ms is None):
            raise BadRequest("spread must have within_ms, or start_ms and end_ms")
        if within_ms is None and start_ms is not None and end_ms is not None:
            within_ms = end_ms - start_ms
        said = {"start_ms": start_ms, "within_ms": within_ms}
        return {name: ms for name, ms in said.items() if ms is not None}

    def due_at_ms(self, now_ms: int) -> int | None:
        return self.start_ms


class RequeueFields(Moving):
    """A requeue may give tasks a new time to live."""

    ttl_ms: Annotated[
        int | None,
        Span(1, "delay_ms_max"),
        "A new time to live, from the requeue on, in place of the task's own. It is the task's in"
        " all of its groups.",
    ] = None

    def moved(self) -> dict[str, int]:
        return {} if self.ttl_ms is None else {"ttl_ms": self.ttl_ms}


MOVES: Final[Mapping[str, type[Moving]]] = {
    "reschedule": MoveFields,
    "spread": SpreadFields,
    "requeue": RequeueFields,
}
"""Command → the block that says where it moves tasks to, or how long they live then."""


class AnyMoveFields(RequeueFields, SpreadFields, MoveFields):
    """A command on tasks says what they get, by the block that it has."""


class Move(MoveFields, Selection):
    """The request names tasks, and says where they are moved to."""


class Spread(SpreadFields, Selection):
    """The request names tasks, and says over which window they are spread."""


class TasksPage(Request):
    """The request asks for a page of tasks."""

    topic: Annotated[str | None, NAME, "Only those of this topic."] = None
    state: Annotated[str | None, STATES, "Only those in this state."] = None
    key: Annotated[str | None, Text(), "Only those with this key."] = None
    key_prefix: Annotated[str | None, Text(), "Only those whose key begins with this."] = None
    tag: Annotated[str | None, Text(), "Only those with this tag."] = None
    property: Annotated[
        str | None, Text(PROPERTY_LENGTH_MAX), "Only those with this property: NAME=VALUE."
    ] = None
    until_ms: Annotated[
        int | None, Moment(), "Only those that were enqueued at this moment or earlier."
    ] = called("not_after")
    newest: Annotated[bool, FLAG, "Whether the newest come first."] = called(
        "newest_first", default=False
    )
    after: Annotated[int | None, ID, "The ``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "The most items of the answer."] = 100


class PeekPage(Request):
    """The request asks for a page of the tasks that a topic still has to deliver."""

    topic: Annotated[str, NAME, "The topic."] = place()
    key: Annotated[str | None, KEY, "With this key."] = None
    due: Annotated[bool, FLAG, "Only tasks that have come due."] = False
    newest: Annotated[bool, FLAG, "In the order of ids, backwards."] = called(
        "newest_first", default=False
    )
    after: Annotated[int | None, ID, "``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "How many at most."] = 100


# --- answers -------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """One attempt did not end in an ack; this says why."""

    attempt: Annotated[int, "The number of the delivery that failed, from 1 on."]
    at_ms: Annotated[int, "When it failed, in milliseconds since 1970."]
    reason: Annotated[str, "Why it failed."]
    subscriber: Annotated[str, "The consumer that had the task."]
    trace: Annotated[
        str, "How the consumer came there, of the failure that made a dead letter; or empty."
    ]

    @classmethod
    def of(cls, raw: Any) -> Self:
        """The failure in an array of the daemon, which may have more elements."""
        attempt, at_ms, reason, subscriber, trace = raw[:5]
        return cls(attempt, at_ms, reason, subscriber, trace)


class TaskOutcome(NamedTuple):
    """A command did this to one task."""

    id: int | None
    """None: no task with this key is known (``status`` "unknown")."""
    status: str
    """The effect, or the state that forbids it."""
    due_ms: int | None = None
    """The new one, when it was moved."""

    @property
    def due(self) -> datetime | None:
        """When it is due now, when it was moved."""
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, raw: Any) -> Self:
        """The outcome in an array of the daemon."""
        task_id, status, due_ms = (*raw, None)[:3]
        return cls(
            None if task_id is None else int(task_id),
            str(status),
            None if due_ms is None else int(due_ms),
        )


class AcceptedIds(NamedTuple):
    """The tasks that a verb has made."""

    accepted_ms: int
    """When the daemon took them, by its clock."""
    ids: tuple[int, ...]

    @classmethod
    def of(cls, raw: Any) -> Self:
        """The ids in an array of the daemon."""
        accepted_ms, ids = raw[:2]
        return cls(int(accepted_ms), tuple(map(int, ids)))


class GroupInfo(Answer):
    """One group stands so with a task."""

    state: Annotated[
        str,
        'The state of the task in this group: "ready", "in_flight", "waiting", "held", "dead",'
        " or how it ended.",
    ]
    attempt: Annotated[int, "How often the task was delivered to this group."]
    at_ms: Annotated[
        int, Moment(), "When its lease ends, its retry comes, it died or was acked, by ``state``."
    ]
    failures: Annotated[
        tuple[Failure, ...], "The attempts of this group that failed, the oldest first."
    ]
    retries_left: Annotated[
        int | None,
        "How many retries are left before the task is dead; None: the daemon does not say.",
    ] = None
    snoozes: Annotated[int, "How often the task was snoozed."] = 0
    deaths: Annotated[int, "How many consumers have died while they had it."] = 0


class TaskState(Answer):
    """A task is, or ended, so."""

    id: Annotated[int, ID, "The id of the task."]
    state: Annotated[
        str,
        '"scheduled", "ready", "in_flight", "waiting", "dead", or how it ended: "acked",'
        ' "cancelled", "expired", "deleted"; "gone": long ago; "unknown": never heard of.',
    ]


class TaskInfo(ListedOptions, TaskState):
    """A task as ``lookup`` finds it. When it is not stored any more, only id and state."""

    topic: Annotated[str | None, NAME, "The topic of the task."] = None
    body: Annotated[bytes | None, BODY, "The body of the task."] = None
    due_ms: Annotated[int | None, Moment(), "When the task is due, in milliseconds since 1970."] = (
        None
    )
    enqueued_ms: Annotated[
        int | None, Moment(), "When the task was enqueued, in milliseconds since 1970."
    ] = None
    properties: Annotated[
        Mapping[str, Value], PROPERTIES, "The properties that its producer gave it, by name."
    ] = {}
    within_ms: Annotated[
        int | None,
        "Its due window: ``due_ms`` is the emptiest moment within this time after ``asked_ms``.",
    ] = None
    asked_ms: Annotated[
        int | None,
        Moment(),
        "The due time that was asked for, where the daemon chose another one within the due"
        " window, in milliseconds since 1970.",
    ] = None
    slot: Annotated[int | None, "The slot of the wheel that has the task."] = None
    cycles: Annotated[
        int | None, "How many rotations of the wheel are left until the task is due."
    ] = None
    groups: Annotated[
        Mapping[str, GroupInfo],
        "The state of the task in each group that is owed it, by the name of the group.",
    ] = {}
    replay_of: Annotated[
        int | None,
        ID,
        "The task that it stands for, by a reset of the group ``replay_to``, whose alone it is.",
    ] = None
    replay_to: Annotated[
        str | None, NAME, "The only group that is owed the task, where it is a replay."
    ] = None

    due = maybe_when("due_ms", "When it is due.")


class Reason(Answer):
    """A cause, a sentence about it, and the command that mends it."""

    cause: Annotated[str, Choice("str", *EXPLAINED), "The first that holds of these words."]
    detail: Annotated[str, "What there is to say of it, in a sentence; times are in UTC."]
    command: Annotated[
        str | None, "The command that mends it, or shows more of it; None: there is none."
    ] = None
    group: Annotated[str | None, NAME, "The group that it is about."] = None
    behind: Annotated[int | None, ID, "The task that it waits for."] = None
    next_ms: Annotated[int | None, Moment(), "When it goes on by itself, where that is known."] = (
        None
    )

    next = maybe_when("next_ms", "When it goes on by itself, where that is known.")


class Explanation(Reason):
    """Why a task is where it is. With several groups: in the one that needs attention first, and
    the ``others``."""

    id: Annotated[int | None, ID, "The task; None: none with the key is known."] = None
    topic: Annotated[str | None, NAME, "Its topic, where it is known."] = None
    others: Annotated[tuple[Reason, ...], "What holds in its other groups."] = ()
    others_left_out: Annotated[int, "Groups for which there was no room."] = 0


class Tasks(Answer):
    """A page of tasks."""

    tasks: Annotated[list[TaskInfo], "The tasks of this page."]
    next: Annotated[
        int | None, ID, "The ``after`` of the next page; None: this is the last one."
    ] = None


_CHANGE, _READ = Need(Right.PRODUCE, Of.SELECTED), Need(Right.READ, Of.SELECTED)
_TAG: Final = "tasks"

VERBS: Final = (
    Verb("cancel", Selection, list[TaskOutcome], _CHANGE, "Cancel tasks",
         'Cancel tasks that are not being worked on: "cancelled", "already_cancelled", or what is'
         ' too late for that: "in_flight", "acked", "expired", "dead", "gone", "unknown", …',
         FrameType.CANCEL, path="POST /v1/cancellations", tag=_TAG, audit=Audit.ALWAYS,
         changes=True, bulk="cancel", methods=(Method("cancel", word="CancelWord"),),
         over=Over.IDS),
    Verb("reschedule", Move, list[TaskOutcome], _CHANGE, "Reschedule tasks",
         "Give tasks another due time, by one of ``delay`` (by the daemon's clock), ``at`` and"
         " ``shift``.",
         FrameType.RESCHEDULE, audit=Audit.ALWAYS, changes=True, bulk="reschedule",
         methods=(Method("reschedule"),), over=Over.IDS),
    Verb("spread", Spread, list[TaskOutcome], _CHANGE, "Spread tasks over a due window",
         "Give scheduled tasks a due window: each is moved to one of its emptiest ticks, which"
         " replaces its due time. A task that is not scheduled stays; its outcome is its state.",
         FrameType.SPREAD, path="POST /v1/spreads", tag=_TAG, errors=("due_too_far",),
         audit=Audit.ALWAYS, changes=True, bulk="spread", methods=(Method("spread"),),
         over=Over.IDS),
    Verb("run_now", Selection, list[TaskOutcome], _CHANGE, "Run tasks now",
         "Make tasks due at once.",
         FrameType.RUN_NOW, path="POST /v1/runs", tag=_TAG, audit=Audit.ALWAYS, changes=True,
         bulk="run_now", methods=(Method("run_now"),), over=Over.IDS),
    Verb("look_up", LookUp, list[TaskInfo], _READ, "Look tasks up", frame=FrameType.LOOKUP,
         over=Over.IDS),
    Verb("explain", TaskToExplain, Explanation, Need(Right.READ, Of.FOUND),
         "Why a task is where it is, and what mends it", frame=FrameType.EXPLAIN, prompt=False,
         over=Over.TASK),
    Verb(
        "list_tasks", TasksPage, Tasks, Need(Right.READ, Of.FOUND),
        "List tasks that have not ended",
        "Stored tasks in the order of their ids (``newest_first``: the other way round). A key"
        " without its topic has no index: the tasks are looked through.",
        FrameType.LIST, path="GET /v1/tasks", tag=_TAG, prompt=False, pages="tasks",
        methods=(Method("list_tasks"),),
        over=Over.PAGES,
    ),
    Verb(
        "peek", PeekPage, Tasks, Need(Right.READ, Of.NAMED),
        "Look at the tasks of a topic",
        "The tasks that the topic still has to deliver, with their bodies: scheduled, ready, in"
        " flight and waiting for a retry, but no dead letters. Looking has no effect: it needs no"
        " group, takes no lease and counts no attempt.",
        FrameType.PEEK, path="GET /v1/topics/{topic}/peek", tag=_TAG, prompt=False, pages="tasks",
        methods=(Method("peek"),),
        over=Over.PAGES,
    ),
)  # fmt: skip


class LetterPlace(FieldKind):
    """A page begins behind this dead letter: [id, group]; ID.GROUP over HTTP."""

    word = "[id, group]"
    json = str

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        if type(value) is not tuple or len(array(value, field, 2)) != 2:
            wrong(field, "[id, group]", value)
        return ID.check(value[0], f"{field}[0]", limits), Text().check(
            value[1], f"{field}[1]", limits
        )


class DeadPage(Request):
    """The request asks for a page of dead letters."""

    topic: Annotated[str | None, NAME, "Only those of this topic."] = None
    group: Annotated[str | None, NAME, "Only those of this group."] = None
    since_ms: Annotated[int | None, Moment(), "Only those that died at this moment or later."] = (
        None
    )
    until_ms: Annotated[int | None, Moment(), "Only those that died before this moment."] = None
    reason: Annotated[
        str | None,
        Text(),
        "Only those whose last reason contains this text, in upper or lower case.",
    ] = None
    after: Annotated[Any, LetterPlace(), "The ``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "The most items of the answer."] = 100


class Letters(Request):
    """The request names dead letters."""

    pairs: Annotated[Any, LETTERS, "Each (id, group)."]


class Requeue(RequeueFields, Letters):
    """The request names dead letters to be delivered again."""


class DeadLetter(Answer):
    """A task that a group could not finish, until it is requeued or deleted."""

    id: Annotated[int, ID, "The id of the task."]
    group: Annotated[str, NAME, "The group that could not finish the task."]
    topic: Annotated[str, NAME, "The topic of the task."]
    died_ms: Annotated[
        int, Moment(), "When the task became a dead letter, in milliseconds since 1970."
    ]
    attempt: Annotated[int, "How often the task was delivered to the group."]
    reason: Annotated[str, "The reason of the last failure."]
    failures: Annotated[tuple[Failure, ...], "The attempts that failed, the oldest first."]
    failed: Annotated[int, "How many attempts failed."] = 0
    deaths: Annotated[int, "How many consumers have died while they had it."] = 0

    died = when("died_ms", "When it died.")


class DeadLetters(Answer):
    """A page of dead letters."""

    dead: Annotated[list[DeadLetter], "The dead letters of this page."]
    next: Annotated[
        tuple[int, str] | None,
        LetterPlace(),
        "The ``after`` of the next page; None: this is the last one.",
    ]


_LETTERS, _OPERATE = "dead letters", Need(Right.OPERATE, Of.FOUND)

LETTER_VERBS: Final = (
    Verb(
        "list_dead", DeadPage, DeadLetters, Need(Right.READ, Of.FOUND), "List dead letters",
        "Dead letters in the order of their ids.",
        FrameType.DEAD_LIST, path="GET /v1/dead-letters", tag=_LETTERS, prompt=False, pages="dead",
        methods=(Method("dead_list"),),
        over=Over.PAGES,
    ),
    Verb("requeue_dead", Requeue, list[str], _OPERATE, "Requeue dead letters",
         'Deliver dead letters again, failures counted anew: "requeued", "unknown", or "ttl_over",'
         " of one that stays because its time to live is over and ``ttl`` gives it no new one.",
         FrameType.DEAD_REQUEUE, audit=Audit.ALWAYS, changes=True, bulk="requeue",
         methods=(Method("dead_requeue", word="RequeueWord"),), over=Over.IDS),
    Verb("delete_dead", Letters, list[str], _OPERATE, "Delete dead letters",
         'Delete dead letters for good: "deleted" or "unknown".',
         FrameType.DEAD_DELETE, audit=Audit.ALWAYS, changes=True, bulk="delete",
         methods=(Method("dead_delete", word="DeleteWord"),), over=Over.IDS),
)  # fmt: skip
