"""Tasks that are there: cancelled, moved, looked up, listed; and dead letters: listed, requeued,
deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple, Self

from tickwheel.api.frames import FrameType
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
    Kind,
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
from tickwheel.model.values import INTEGER_MIN

Value = str | int | float | bool
"""What a property may be."""
PAGE: Final = Whole(1, 1_000)
STATES: Final = Choice("TaskState", "scheduled", "ready", "in_flight", "waiting", "dead")
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


# --- blocks --------------------------------------------------------------------------------------


class Option(NamedTuple):
    """What an option of a task is beside a field of a request."""

    help: str
    """What the command line says of it."""
    metavar: str | None = None
    """What stands for its value there."""
    is_delivered: bool = True
    """Whether consumers see it."""
    is_listed: bool = True
    """Whether it is shown with the task."""
    event: str = ""
    """The attribute of a CloudEvent that says it, if one does."""


class ListedOptions:
    """The options of a task that are shown with it, too. Each is a field of the same name of
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
        "0 (which is the default) to 255: among tasks that are due the higher goes first.",
        Option("Among what is due; higher goes first."),
    ] = 0
    ttl_ms: Annotated[
        int | None,
        Span(1, "delay_ms_max"),
        "The task expires when it was not delivered so long after it was due.",
        Option("How long after its due time it is still worth delivering.", is_delivered=False),
    ] = None
    within_ms: Annotated[
        int | None,
        Window(),
        "Any moment from when it would be due to so much later will do; the daemon chooses the"
        " emptiest of them, and the receipt's ``due`` is it.",
        Option(
            "Any moment from then to so much later will do: the emptiest is chosen.",
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
        'What becomes of the task when another one with its ``key`` is pending: "keep", "replace",'
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

    ids: Annotated[Any, IDS, "The tasks,"] = place(default=None)
    topic: Annotated[str | None, NAME, "or a topic"] = None
    key: Annotated[str | None, KEY, "and a key: every unfinished task that has it."] = None

    def check_together(self) -> None:
        check_selection(self.ids, self.topic, self.key)


class LookUp(Selection):
    """The request names tasks to be looked up."""

    newest: Annotated[bool, FLAG, "Of a key only the newest."] = False
    until_ms: Annotated[
        int | None, Moment(), "Of a key only what was enqueued then or earlier."
    ] = called("not_after")


class Moving(Request):
    """A command that moves tasks says where to, and one that gives them a new life how long."""

    def moved(self) -> dict[str, int]:
        """What was said of it, by name, once it is checked together. Raises BadRequest."""
        raise NotImplementedError

    def due_at_ms(self, now_ms: int) -> int | None:
        """The due time that all get, or the first of them; None: it follows from their own."""
        return None


class MoveFields(Moving):
    """A reschedule says by one of these where tasks are moved to."""

    delay_ms: Annotated[int | None, Span(), "From now,"] = None
    due_ms: Annotated[int | None, Moment(INTEGER_MIN), "or at this time,"] = called("at")
    shift_ms: Annotated[
        int | None, Shift(), "or each so much later than it is, which may be negative."
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
        int | None, Moment(), "Its first moment; by default each task's own due time."
    ] = None
    within_ms: Annotated[int | None, Window(1), "Its length,"] = None
    end_ms: Annotated[int | None, Moment(), "or the first moment behind it."] = None

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

    topic: Annotated[str | None, NAME, "Of this topic."] = None
    state: Annotated[str | None, STATES, "In this state."] = None
    key: Annotated[str | None, Text(), "With this key."] = None
    key_prefix: Annotated[str | None, Text(), "Whose key begins so."] = None
    tag: Annotated[str | None, Text(), "With this tag."] = None
    property: Annotated[
        str | None, Text(PROPERTY_LENGTH_MAX), "With this property: NAME=VALUE."
    ] = None
    until_ms: Annotated[int | None, Moment(), "Enqueued then or earlier."] = called("not_after")
    newest: Annotated[bool, FLAG, "In the order of ids, backwards."] = called(
        "newest_first", default=False
    )
    after: Annotated[int | None, ID, "``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "How many at most."] = 100


class PeekPage(Request):
    """The request asks for a page of the tasks that a topic still has to deliver."""

    topic: Annotated[str, NAME, "Of this topic."] = place()
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

    attempt: int
    at_ms: int
    reason: str
    subscriber: str
    trace: str
    """How the consumer came there, of the failure that made a dead letter; or empty."""

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
    """What was done, or what forbids it."""
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

    state: str
    attempt: int
    at_ms: Annotated[
        int, Moment(), "When its lease ends, its retry comes, it died or was acked, by ``state``."
    ]
    failures: tuple[Failure, ...]
    retries_left: Annotated[int | None, "Before it is dead; None: the daemon does not say."] = None
    snoozes: Annotated[int, "How often it was postponed."] = 0
    deaths: Annotated[int, "How many consumers have died while they had it."] = 0


class TaskState(Answer):
    """A task is, or ended, so."""

    id: Annotated[int, ID]
    state: Annotated[
        str,
        '"scheduled", "ready", "in_flight", "waiting", "dead", or how it ended: "acked",'
        ' "cancelled", "expired", "deleted"; "gone": long ago; "unknown": never heard of.',
    ]


class TaskInfo(ListedOptions, TaskState):
    """A task as ``lookup`` finds it. When it is not stored any more, only id and state."""

    topic: Annotated[str | None, NAME] = None
    body: Annotated[bytes | None, BODY] = None
    due_ms: Annotated[int | None, Moment()] = None
    enqueued_ms: Annotated[int | None, Moment()] = None
    properties: Annotated[Mapping[str, Value], PROPERTIES] = {}
    within_ms: Annotated[
        int | None,
        "Any moment from ``asked_ms`` to so much later would do; ``due_ms`` was the emptiest.",
    ] = None
    asked_ms: Annotated[int | None, Moment()] = None
    slot: int | None = None
    cycles: Annotated[int | None, "Rotations of the wheel left."] = None
    groups: Mapping[str, GroupInfo] = {}
    replay_of: Annotated[
        int | None,
        ID,
        "The task that it stands for, by a reset of the group ``replay_to``, whose alone it is.",
    ] = None
    replay_to: Annotated[str | None, NAME] = None

    due = maybe_when("due_ms", "When it is due.")


class Tasks(Answer):
    """A page of tasks."""

    tasks: list[TaskInfo]
    next: Annotated[int | None, ID, "``after`` of the next page."] = None


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
         " replaces its due time. What is not scheduled stays, with its state for an outcome.",
         FrameType.SPREAD, path="POST /v1/spreads", tag=_TAG, errors=("due_too_far",),
         audit=Audit.ALWAYS, changes=True, bulk="spread", methods=(Method("spread"),),
         over=Over.IDS),
    Verb("run_now", Selection, list[TaskOutcome], _CHANGE, "Run tasks now",
         "Make tasks due at once.",
         FrameType.RUN_NOW, path="POST /v1/runs", tag=_TAG, audit=Audit.ALWAYS, changes=True,
         bulk="run_now", methods=(Method("run_now"),), over=Over.IDS),
    Verb("look_up", LookUp, list[TaskInfo], _READ, "Look tasks up", frame=FrameType.LOOKUP,
         over=Over.IDS),
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


class LetterPlace(Kind):
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

    topic: Annotated[str | None, NAME, "Of this topic."] = None
    group: Annotated[str | None, NAME, "Of this group."] = None
    since_ms: Annotated[int | None, Moment(), "That died then or later."] = None
    until_ms: Annotated[int | None, Moment(), "That died before then."] = None
    reason: Annotated[
        str | None, Text(), "Somewhere in the text of the last failure, in whatever case."
    ] = None
    after: Annotated[Any, LetterPlace(), "``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "How many at most."] = 100


class Letters(Request):
    """The request names dead letters."""

    pairs: Annotated[Any, LETTERS, "Each (id, group)."]


class Requeue(RequeueFields, Letters):
    """The request names dead letters to be delivered again."""


class DeadLetter(Answer):
    """A task that a group could not finish, until it is requeued or deleted."""

    id: Annotated[int, ID]
    group: Annotated[str, NAME]
    topic: Annotated[str, NAME]
    died_ms: Annotated[int, Moment()]
    attempt: int
    reason: str
    failures: tuple[Failure, ...]
    failed: Annotated[int, "How many attempts failed."] = 0
    deaths: Annotated[int, "How many consumers have died while they had it."] = 0

    died = when("died_ms", "When it died.")


class DeadLetters(Answer):
    """A page of dead letters."""

    dead: list[DeadLetter]
    next: Annotated[tuple[int, str] | None, LetterPlace(), "``after`` of the next page."]


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
