"""Verbs on groups and topics (create, set, delete, reset), their order keys and fair shares."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from tickwheel.api.bulk import BULK_ID_TEXT, RATE_OF_CHANGES, BulkInfo
from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import (
    FLAG,
    ID,
    IDS,
    KEY,
    NAME,
    POLICY,
    PROPERTY,
    RULE,
    Choice,
    Moment,
    Number,
    Since,
    Span,
    Text,
    Whole,
)
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.shapes import REQUIRED, Answer, Request, called, maybe_when, place, when
from tickwheel.api.tasks import TaskOutcome, Value
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Right, Routing, Unique, Verb
from tickwheel.model.values import FILTER_LENGTH_MAX

ORDER_ATTEMPTS_MAX: Final = 1_000_000
FAIR_BY_LENGTH_MAX: Final = 255
"""Maximum characters of ``fair_by``, and also of a property's name."""
LIMIT_EACH_MAX: Final = 1_000_000
RATE_MIN: Final = 1e-6
RATE_MAX: Final = 1_000_000_000.0
BURST_MAX: Final = 1_000_000_000
KEYS_MAX: Final = 1_000
"""Maximum keys in an answer."""
ORDER_RETRY_MS: Final = Span(10, 30_000)
ORDER_ATTEMPTS: Final = Whole(1, ORDER_ATTEMPTS_MAX)
LIMIT_EACH: Final = Whole(1, LIMIT_EACH_MAX)
FAILURES: Final = Choice("OrderFailure", "dead", "hold", "retry")
DELIVERIES: Final = Number("deliveries a second", RATE_MIN, RATE_MAX)
FILTER_TEXT: Final = Text(FILTER_LENGTH_MAX, "FILTER_LENGTH_MAX")
SET_OTHERWISE: Final = " is set otherwise: "
"""Part of the message if a consumer's settings differ from those of its group."""
TO_CHANGE: Final = "; to change it: "
"""Part of the message that precedes the command that resolves the conflict."""

Topic = Annotated[str, NAME, "The topic."]
Group = Annotated[str, NAME, "The group."]

# --- blocks of settings --------------------------------------------------------------------------


class FilterFields(Request):
    """A filter, which selects tasks that satisfy both of its parts."""

    tags: Annotated[
        str | None, FILTER_TEXT, 'The group gets only tasks with one of these tags: "eu || uk".'
    ] = None
    where: Annotated[
        str | None,
        FILTER_TEXT,
        "The group gets only tasks for which this condition is true:"
        ' "amount > 10 AND region IS NOT NULL".',
    ] = None


class GroupFields(FilterFields):
    """Settings of a group that its creator and its consumers can set."""

    order_retry_ms: Annotated[
        int | None,
        ORDER_RETRY_MS,
        "The delay before a failed task of an order key is retried; by default 1 s.",
    ] = None
    order_attempts: Annotated[
        int | None,
        ORDER_ATTEMPTS,
        "Failed attempts of a task of an order key until order_failure applies; by default 16.",
    ] = None
    order_failure: Annotated[
        str | None,
        FAILURES,
        'The action after order_attempts failures. "hold", the default: the key is held until an'
        ' operator acts. "dead": the task becomes a dead letter, and its key continues. "retry":'
        " the task is retried until it succeeds, and order_attempts must not be given.",
    ] = None
    fair_by: Annotated[
        str | None,
        Text(FAIR_BY_LENGTH_MAX),
        'The field whose values take turns: "key", "tag", or the name of a property.',
    ] = None
    limit_each: Annotated[
        int | None, LIMIT_EACH, "Maximum deliveries in flight per value of fair_by."
    ] = None
    rate_each: Annotated[
        float | None, DELIVERIES, "Maximum deliveries per second per value of fair_by."
    ] = None


class NewGroupFields(GroupFields):
    """Settings of a new group."""

    retry: Annotated[Any, POLICY, "The policy for tasks without a retry policy."] = None
    rate: Annotated[
        float | None, DELIVERIES, "Maximum deliveries per second; unlimited by default."
    ] = None
    burst: Annotated[
        int | None,
        Whole(1, BURST_MAX),
        "Maximum burst of deliveries after an idle time; it needs a rate.",
    ] = None
    paused: Annotated[
        bool | None,
        FLAG,
        "Whether deliveries are paused until somebody resumes them; tasks can still be enqueued.",
    ] = None


class SettingsFields(NewGroupFields):
    """Settings of a group or a topic that can be changed. None removes a setting."""

    if_pending: Annotated[
        Any,
        RULE,
        "For a topic: the rule for tasks whose key is pending and that have no rule of their own.",
    ] = None
    broadcast_only: Annotated[
        bool | None,
        FLAG,
        "For a topic without groups: a due task goes to the broadcast subscriptions connected at"
        " that moment, and then ends.",
    ] = None


# --- requests ------------------------------------------------------------------------------------


class OfTopic(Request):
    """The request names a topic."""

    topic: Topic


class OfGroup(OfTopic):
    """The request names a group of a topic."""

    group: Group


class OfGroupOrDefault(OfTopic):
    """The request names a group of a topic, or the default group if no group is given."""

    group: Annotated[str | None, NAME, "The group; by default the default group."]


class NewGroup(OfGroup, NewGroupFields):
    """The request creates a group."""

    since: Annotated[
        str | int,
        Since("now", "first"),
        'The group gets tasks that come due from "now" on, from the "first" stored task on, or'
        " from a moment on.",
    ] = called("start", default="now")


class Settings(OfTopic, SettingsFields):
    """The request changes settings of a group, or of a topic."""

    none_is_sent = True
    group: Annotated[str | None, NAME, "The group; by default the topic itself."] = place(
        default=None
    )


class Deletion(OfTopic):
    """The request deletes a topic."""

    force: Annotated[bool, FLAG, "Delete it even if it holds tasks or has subscribers."] = place(
        default=False
    )
    dry_run: Annotated[bool, FLAG, "Only check and count; nothing is deleted."] = False


class GroupDeletion(OfGroup):
    """The request deletes a group."""

    force: Annotated[bool, FLAG, "Delete it even if it holds tasks or has subscribers."] = place(
        default=False
    )
    dry_run: Annotated[bool, FLAG, "Only check and count; nothing is deleted."] = False


class ResetTrial(OfGroup):
    """The request asks for a preview of a reset."""

    to: Annotated[
        str | int, Since("first"), 'A moment, or "first" for the beginning of the history.'
    ] = called("to", default=REQUIRED)


class Reset(ResetTrial):
    """The request delivers to a group again the tasks that came due since a moment."""

    rate: Annotated[
        float | None, RATE_OF_CHANGES, "Maximum tasks per second; unlimited by default."
    ] = None
    id: Annotated[str | None, NAME, BULK_ID_TEXT] = None


class KeysPage(OfGroupOrDefault):
    """The request asks for keys of a group, up to ``limit``."""

    limit: Annotated[int, Whole(1, KEYS_MAX), "Maximum number of items in the answer."] = 100


class HeldTasks(OfGroupOrDefault):
    """The request names held tasks by their ids, or the held task of an order key."""

    one_of = ("ids", "key")
    ids: Annotated[Any, IDS, "The ids of the held tasks."] = place(default=None)
    key: Annotated[str | None, KEY, "The order key whose task is held."] = place(default=None)


class OneKey(OfGroupOrDefault):
    """The request names one key of a group: an order key, or a value of ``fair_by``."""

    one_of = ("key", "value")
    key: Annotated[str | None, KEY, "The order key."] = place(default=None)
    value: Annotated[Value | None, PROPERTY, "The value of ``fair_by``."] = place(default=None)


# --- answers -------------------------------------------------------------------------------------


class GroupSettings(Answer):
    """The settings of a group, or of a topic (then ``group`` is None)."""

    topic: Annotated[str, NAME, "The topic."]
    group: Annotated[str | None, NAME, "The group; None for settings of the topic itself."]
    paused: Annotated[
        bool,
        "Whether deliveries are paused until somebody resumes them; tasks can still be enqueued.",
    ]
    rate: Annotated[float | None, "Maximum deliveries per second; None means unlimited."]
    burst: Annotated[
        int | None, "Maximum burst of deliveries after an idle time; None without a rate."
    ]
    retry: Annotated[
        Retry | None,
        POLICY,
        "The retry policy set here; None means that the next higher level decides.",
    ]
    created: Annotated[bool, "Whether this call created the group."] = False
    paused_ms: Annotated[int | None, Moment(), "When it was paused; None if it is not paused."] = (
        None
    )
    if_pending: Annotated[
        IfPending | None,
        RULE,
        "For a topic: the rule for tasks whose key is pending and that have no rule of their own.",
    ] = None
    broadcast_only: Annotated[
        bool, "For a topic: whether it has no groups, and due tasks are broadcast and end."
    ] = False
    tags: Annotated[str | None, "For a group: the tags of its filter; None means any tag."] = None
    where: Annotated[
        str | None, "For a group: the condition of its filter; None without a condition."
    ] = None
    order_retry_ms: Annotated[
        int | None,
        ORDER_RETRY_MS,
        "For a group, set or by default: the delay before a failed task of an order key is"
        " retried, in milliseconds.",
    ] = None
    order_attempts: Annotated[
        int | None,
        "Failed attempts of a task of an order key until order_failure applies.",
    ] = None
    order_failure: Annotated[
        str | None,
        '"hold": the key is held until an operator acts; "dead": the task becomes a dead letter,'
        ' and its key continues; "retry": the task is retried until it succeeds.',
    ] = None
    fair_by: Annotated[
        str | None, 'The field whose values take turns: "key", "tag", or the name of a property.'
    ] = None
    limit_each: Annotated[int | None, "Maximum deliveries in flight per value of fair_by."] = None
    rate_each: Annotated[float | None, "Maximum deliveries per second per value of fair_by."] = None

    paused_since = maybe_when("paused_ms", "When it was paused; None if it is not paused.")

    @property
    def order_retry(self) -> float | None:
        """``order_retry_ms`` in seconds."""
        return None if self.order_retry_ms is None else self.order_retry_ms / 1000


class MadeGroup(Answer):
    """A group that a subscription or a pull has created."""

    adopted: Annotated[
        int, "How many tasks were due before the topic had a group, and now belong to this group."
    ]
    idle: Annotated[
        Mapping[str, int],
        "Other groups of the topic that have no subscriber and have finished no task since the"
        " daemon started, each with the number of tasks that it holds.",
    ]

    @classmethod
    def joined(cls, parts: Iterable[MadeGroup | None]) -> MadeGroup | None:
        """Combine the answers of several shards. Return None if the group existed in all of
        them."""
        created = [part for part in parts if part is not None]
        idle = sum((Counter(part.idle) for part in created), Counter[str]())
        adopted = sum(part.adopted for part in created)
        return cls.of({"adopted": adopted, "idle": dict(idle)}) if created else None

    @property
    def is_odd(self) -> bool:
        """Whether an operator should check the group: tasks waited for it, or an idle group holds
        tasks."""
        return bool(self.adopted or self.idle)

    def describe(self, topic: str, group: str) -> str:
        """Return a sentence for people about the new group, with commands that correct likely
        mistakes."""
        names = f"{shlex.quote(topic)} {shlex.quote(group)}"
        parts = [
            f"creates the group {group} of topic {topic}, which keeps due tasks until they are"
            f" acked, even without a subscriber; `tickwheel groups delete {names}` deletes it"
        ]
        if self.adopted:
            parts.append(
                f"it takes over {_tasks(self.adopted)} that were due before the topic had a group;"
                f" `tickwheel groups create {shlex.quote(topic)} OTHER --start first` gives them to"
                " another group as well"
            )
        for name, tasks_held in self.idle.items():
            idle_group = f"{shlex.quote(topic)} {shlex.quote(name)}"
            parts.append(
                f"the group {name} of this topic holds {_tasks(tasks_held)}, has no subscriber and"
                f" has finished no task since the daemon started; `tickwheel groups reset {names}"
                f" --to first --wait` gives them to {group}, then `tickwheel groups delete"
                f" {idle_group} --force` deletes that group with its tasks"
            )
        return "; ".join(parts)


def _tasks(count: int) -> str:
    return f"{count} task{'s' * (count != 1)}"


class GroupHeld(Answer):
    """The tasks that the deleted group held."""

    ready: Annotated[int, "Number of tasks that were due and not delivered."]
    in_flight: Annotated[int, "Number of tasks that were delivered and not settled."]
    waiting: Annotated[int, "Number of tasks that waited for a retry."]
    dead: Annotated[int, "Number of dead letters that the group had."]


class TopicHeld(Answer):
    """The tasks that the deleted topic held."""

    scheduled: Annotated[int, "Number of scheduled tasks."]
    ready: Annotated[int, "Number of (task, group) pairs that were due and not delivered."]
    in_flight: Annotated[int, "Number of (task, group) pairs that were delivered and not settled."]
    waiting: Annotated[int, "Number of (task, group) pairs that waited for a retry."]
    dead: Annotated[int, "Number of dead letters that its groups had."]
    groups: Annotated[int, "Number of groups that the topic had."]


class HeldKey(Answer):
    """An order key that a group holds until an operator acts."""

    id: Annotated[int, ID, "The failed task."]
    key: Annotated[str | None, "The order key."]
    since_ms: Annotated[int, Moment(), "When the key became held."]
    attempt: Annotated[int, "How many times the task was delivered."]
    waiting: Annotated[int, "How many tasks of the key wait for this task."]
    reason: Annotated[str, "Why the last attempt failed."]
    subscriber: Annotated[str, "The consumer that had the task."]

    since = when("since_ms", "When the key became held.")


class PausedKey(Answer):
    """A key of a group that an operator has paused; its tasks are not delivered."""

    kind: Annotated[str, Choice("str", "order", "fair"), '"order" or "fair".']
    value: Annotated[Value, "The order key, or the value of ``fair_by``."]
    since_ms: Annotated[int, Moment(), "When it was paused."]
    by: Annotated[str, "Who paused it."]
    waiting: Annotated[int, "How many due tasks of the key wait."]

    since = when("since_ms", "When it was paused.")


class HeldKeys(Answer):
    """The held keys and the paused keys of a group, the oldest first."""

    keys: Annotated[list[HeldKey], "The oldest held keys."]
    held: Annotated[int, "Total number of held order keys."]
    paused: Annotated[list[PausedKey], "The oldest paused keys."]


class KeyPause(Answer):
    """Whether a key of a group is paused."""

    paused: Annotated[bool, "Whether the key's tasks are not delivered until it is resumed."]
    changed: Annotated[bool, "Whether this call paused or resumed the key."]
    since_ms: Annotated[
        int | None, Moment(), "When the key was last paused; None if it was not paused."
    ] = None
    by: Annotated[str | None, "Who paused it."] = None

    since = maybe_when("since_ms", "When the key was last paused; None if it was not paused.")


class KeyLine(Answer):
    """Waiting tasks of an order key or of a value of ``fair_by``."""

    id: Annotated[int, ID, "The id of one of the tasks."]
    kind: Annotated[str, Choice("str", "order", "fair"), '"order" or "fair".']
    value: Annotated[Value | None, "The order key or the value; None for tasks that have no value."]
    state: Annotated[
        str,
        'The state of the task whose turn it is: "ready", "in_flight", "retrying", "held"; or the'
        ' reason why the value waits: "limited" (limit_each), "throttled" (rate_each). Both kinds'
        ' can be "paused".',
    ]
    in_flight: Annotated[int, "Number of its tasks that are delivered and not settled."]
    waiting: Annotated[int, "Number of its tasks that wait for their turn."]


class KeyLines(Answer):
    """The keys of a group with the most waiting tasks."""

    lines: Annotated[list[KeyLine], "The keys, the one with the most waiting tasks first."]
    waiting: Annotated[int, "Number of waiting tasks of all keys of the group."]


class ResetPreview(Answer):
    """The effect that a reset of a group would have."""

    tasks: Annotated[int, "How many tasks would be delivered."]
    first_ms: Annotated[int | None, Moment(), "When the first of them was due."]
    last_ms: Annotated[int | None, Moment(), "When the last of them was due."]
    lost: Annotated[int, "How many further tasks there were, whose bodies no longer exist."]
    incomplete: Annotated[
        int,
        "Number of gaps in the history of that time. An unknown number of tasks is missing.",
    ]
    from_ms: Annotated[int, Moment(), "The start of the time that was searched."]
    until_ms: Annotated[int, Moment(), "The end of the time that was searched."]

    first = maybe_when("first_ms", "When the first of them was due.")
    last = maybe_when("last_ms", "When the last of them was due.")


class Replay(Answer):
    """The progress of the search for earlier tasks that a group must receive."""

    looked_at: Annotated[int, "How many tasks have been examined."]
    given: Annotated[int, "How many of them became due tasks of the group."]
    share: Annotated[
        float | None, "The share that has been examined, 0 to 1; None if it is unknown."
    ]


_GROUP = "/v1/topics/{topic}/groups/{group}"
_READ, _OPERATE = Need(Right.READ, Of.NAMED), Need(Right.OPERATE, Of.NAMED)
_TOPICS, _ORDER = "topics", "order and shares"
VERBS: Final = (
    Verb(
        "create_group", NewGroup, GroupSettings, _OPERATE, "Create a group",
        "Create a group before its first subscriber connects. An existing group does not change"
        " (``created`` is false).",
        FrameType.GROUP_CREATE, path=f"PUT {_GROUP}", tag=_TOPICS, status=201,
        errors=("conflict",), audit=Audit.ALWAYS, changes=True,
        methods=(Method("create_group"),), command="groups create TOPIC GROUP",
        routing=Routing.HOME, unique=Unique("group", Home.TOPIC),
    ),
    Verb(
        "configure", Settings, GroupSettings, _OPERATE,
        "Change a group's settings, such as its pause, rate or retry policy",
        "Change settings of a group, or of the topic itself. Settings that are left out do not"
        " change; None removes a setting. A filter applies to tasks that come due from now on. The"
        " change is durable when the call returns. Raise NotFound if there is no such group, and"
        " Conflict for ``broadcast_only`` if the topic has groups.",
        FrameType.CONFIGURE, path=f"PATCH {_GROUP}", tag=_TOPICS, errors=("not_found", "conflict"),
        audit=Audit.ALWAYS, changes=True, methods=(Method("configure"),),
        routing=Routing.HOME,
    ),
    Verb(
        "delete_group", GroupDeletion, GroupHeld, _OPERATE, "Delete a group",
        "Delete a group and return the number of tasks that it held. Raise Conflict if it holds"
        " tasks, unless ``force``, which drops them for this group.",
        FrameType.GROUP_DELETE, path=f"DELETE {_GROUP}", tag=_TOPICS,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True, repeat=False,
        methods=(Method("delete_group"),), command="groups delete TOPIC GROUP",
        routing=Routing.HOME_LAST,
    ),
    Verb(
        "delete_topic", Deletion, TopicHeld, _OPERATE, "Delete a topic with its groups and tasks",
        "Delete a topic with its groups, settings and dead letters, and return the number of tasks"
        " that it held. The deletion is durable when the call returns. Its tasks are deleted in the"
        " background, and until then the topic takes no new tasks (Refused). Raise Conflict if the"
        " topic holds tasks or has subscribers, unless ``force``, and always if a schedule enqueues"
        " to it. Raise NotFound if there is no such topic.",
        FrameType.TOPIC_DELETE, path="DELETE /v1/topics/{topic}", tag=_TOPICS,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True, repeat=False,
        methods=(Method("delete_topic"),), command="topics delete TOPIC",
        routing=Routing.HOME_LAST,
    ),
    Verb(
        "reset_group", Reset, BulkInfo, _OPERATE,
        "Deliver to a group again the tasks that came due since a moment",
        "Deliver to the group the tasks that came due since ``to`` and that it has finished or"
        " missed. Each becomes a new task, whose ``Delivery.replay_of`` is the id of the"
        " original. Other groups are not affected. The reset is a bulk operation: it is durable"
        " when the call returns, and runs in the background (``wait_bulk``). Raise NotFound if"
        " there is no such group, Conflict if the group is already being reset, or Overloaded.",
        FrameType.GROUP_RESET, path=f"POST {_GROUP}/reset", tag=_TOPICS, status=201,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True,
        methods=(Method("reset_group"),),
        routing=Routing.TOGETHER, unique=Unique("id", Home.FIRST),
    ),
    Verb(
        "preview_reset", ResetTrial, ResetPreview, _READ,
        "Preview a reset",
        "Return how many tasks a reset to that moment would deliver. Nothing is reset. The call"
        " reads the whole history. Raise NotFound if there is no such group, or Overloaded.",
        FrameType.GROUP_RESET_PREVIEW, path=f"POST {_GROUP}/reset-preview", tag=_TOPICS,
        errors=("not_found",), prompt=False, methods=(Method("preview_reset"),),
        routing=Routing.ALL,
    ),
    Verb(
        "held_keys", KeysPage, HeldKeys, _READ, "List held and paused keys",
        "Return order keys that are held until an operator acts, the oldest first. Raise NotFound"
        " if there is no such group.",
        FrameType.HELD_KEYS, path=f"GET {_GROUP}/held-keys", tag=_ORDER, errors=("not_found",),
        methods=(
            Method("held_keys", gives="keys"),
            Method(
                "paused_keys", gives="paused",
                text="Return the order keys and values of ``fair_by`` that operators have paused,"
                " the oldest first. Raise NotFound if there is no such group.",
            ),
        ),
        command="groups held TOPIC GROUP",
        routing=Routing.ALL,
    ),
    Verb(
        "key_lines", KeysPage, KeyLines, _READ, "List keys with waiting tasks",
        "Return the order keys and values of ``fair_by`` with the most waiting tasks. Raise"
        " NotFound if there is no such group.",
        FrameType.KEY_LINES, path=f"GET {_GROUP}/lines", tag=_ORDER, errors=("not_found",),
        methods=(Method("key_lines", gives="lines"),), command="groups lines TOPIC GROUP",
        routing=Routing.ALL,
    ),
    Verb(
        "release_key", HeldTasks, list[TaskOutcome], _OPERATE, "Retry the task of a held key",
        "Retry the task of a held key, named by its id or the key, at once, and reset its"
        ' failures. The outcome is "released" or "not_held". Raise NotFound if there is no such'
        " group.",
        FrameType.RELEASE_KEY, path=f"POST {_GROUP}/held-keys/release", tag=_ORDER,
        errors=("not_found",), audit=Audit.ALWAYS, changes=True, repeat=False,
        methods=(Method("release_key", word="ReleaseKeyWord"),),
        command="groups release-key TOPIC GROUP TASK_ID",
        routing=Routing.IDS,
    ),
    Verb(
        "skip_key", HeldTasks, list[TaskOutcome], _OPERATE,
        "Skip the task of a held key",
        "Move the task of a held key to the dead letters, so that the key's next task can be"
        ' delivered. The outcome is "skipped" or "not_held". Raise NotFound if there is no such'
        " group.",
        FrameType.SKIP_KEY, path=f"POST {_GROUP}/held-keys/skip", tag=_ORDER,
        errors=("not_found",), audit=Audit.ALWAYS, changes=True, repeat=False,
        methods=(Method("skip_key", word="SkipKeyWord"),),
        command="groups skip-key TOPIC GROUP TASK_ID",
        routing=Routing.IDS,
    ),
    Verb(
        "pause_key", OneKey, KeyPause, _OPERATE, "Pause the deliveries of one key",
        "Pause one key of the group, an order key or a value of ``fair_by``. Its tasks become due"
        " and wait; tasks in flight can be acked, and other keys are not affected. The pause is"
        " durable when the call returns. Pausing a paused key changes nothing. Raise NotFound if"
        " there is no such group, Conflict for a value if the group has no ``fair_by``, or"
        " LimitExceeded.",
        FrameType.PAUSE_KEY, path=f"POST {_GROUP}/held-keys/pause", tag=_ORDER,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True,
        methods=(Method("pause_key"),), command="groups pause-key TOPIC GROUP",
        routing=Routing.TURN,
    ),
    Verb(
        "resume_key", OneKey, KeyPause, _OPERATE, "Resume the deliveries of a paused key",
        "Resume the deliveries of a paused key. ``changed`` is false if it was not paused. Raise"
        " the same errors as ``pause_key``.",
        FrameType.RESUME_KEY, path=f"POST {_GROUP}/held-keys/resume", tag=_ORDER,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True,
        methods=(Method("resume_key"),), command="groups resume-key TOPIC GROUP",
        routing=Routing.TURN,
    ),
)  # fmt: skip
