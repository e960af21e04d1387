"""Groups and topics: made, set, deleted, reset; their order keys and fair shares."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from tickwheel.api.bulk import RATE_OF_CHANGES, SAME, BulkInfo
from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import (
    FLAG,
    ID,
    IDS,
    KEY,
    NAME,
    OWN_NAME,
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
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Over, Right, Unique, Verb
from tickwheel.model.values import FILTER_LENGTH_MAX

ORDER_ATTEMPTS_MAX: Final = 1_000_000
FAIR_BY_LENGTH_MAX: Final = 255
"""Characters of ``fair_by``: as many as the name of a property may have."""
LIMIT_EACH_MAX: Final = 1_000_000
RATE_MIN: Final = 1e-6
RATE_MAX: Final = 1_000_000_000.0
BURST_MAX: Final = 1_000_000_000
ORDER_RETRY_MS: Final = Span(10, 30_000)
ORDER_ATTEMPTS: Final = Whole(1, ORDER_ATTEMPTS_MAX)
LIMIT_EACH: Final = Whole(1, LIMIT_EACH_MAX)
FAILURES: Final = Choice("OrderFailure", "dead", "hold", "retry")
DELIVERIES: Final = Number("deliveries a second", RATE_MIN, RATE_MAX)
FILTER_TEXT: Final = Text(FILTER_LENGTH_MAX, "FILTER_LENGTH_MAX")
SET_OTHERWISE: Final = " is set otherwise: "
"""Words in the message of a conflict: a consumer names other settings than its group has."""
TO_CHANGE: Final = "; to change it: "
"""Before the command that ends a conflict."""

Topic = Annotated[str, NAME, "The topic."]
Group = Annotated[str, NAME, "The group."]

# --- blocks of settings --------------------------------------------------------------------------


class FilterFields(Request):
    """A filter says which tasks are meant; what both parts say must hold."""

    tags: Annotated[
        str | None, FILTER_TEXT, 'The group wants only tasks with one of these tags: "eu || uk".'
    ] = None
    where: Annotated[
        str | None,
        FILTER_TEXT,
        'The group wants only tasks of which this is true: "amount > 10 AND region IS NOT NULL".',
    ] = None


class GroupFields(FilterFields):
    """Whoever makes a group, or takes from it, may say this of it."""

    order_retry_ms: Annotated[
        int | None,
        ORDER_RETRY_MS,
        "How long to wait before a failed task of an order key is tried again; by default 1 s.",
    ] = None
    order_attempts: Annotated[
        int | None,
        ORDER_ATTEMPTS,
        "How many failed attempts of a task of an order key there are before order_failure"
        " holds; by default 16.",
    ] = None
    order_failure: Annotated[
        str | None,
        FAILURES,
        'The action after these attempts. "hold", the default: the key is held until an'
        ' operator acts. "dead": it goes to the dead letters, and its key goes on.'
        ' "retry": it is tried until it succeeds, so order_attempts does not go with it.',
    ] = None
    fair_by: Annotated[
        str | None,
        Text(FAIR_BY_LENGTH_MAX),
        'The field whose values take turns: "key", "tag", or the name of a property.',
    ] = None
    limit_each: Annotated[
        int | None, LIMIT_EACH, "The most deliveries of each value of fair_by in flight."
    ] = None
    rate_each: Annotated[
        float | None, DELIVERIES, "The most deliveries a second of each value of fair_by."
    ] = None


class NewGroupFields(GroupFields):
    """A group may be made with these settings."""

    retry: Annotated[Any, POLICY, "The policy for its tasks that have none of their own."] = None
    rate: Annotated[
        float | None, DELIVERIES, "The most deliveries a second; without it there is no limit."
    ] = None
    burst: Annotated[
        int | None,
        Whole(1, BURST_MAX),
        "The most deliveries at once after a pause; it needs a rate.",
    ] = None
    paused: Annotated[
        bool | None, FLAG, "Whether nothing is delivered until somebody resumes it; enqueues go on."
    ] = None


class SettingsFields(NewGroupFields):
    """The settings of a group or a topic that can be changed. Others stay; None removes one."""

    if_pending: Annotated[
        Any,
        RULE,
        "For a topic: the rule for a task whose key is pending, unless the task has its own.",
    ] = None
    broadcast_only: Annotated[
        bool | None,
        FLAG,
        "For a topic without groups: a due task goes to the broadcast subscriptions connected at"
        " that moment, and ends; it is owed to nobody.",
    ] = None


# --- requests ------------------------------------------------------------------------------------


class OfTopic(Request):
    """The request names a topic."""

    topic: Topic


class OfGroup(OfTopic):
    """The request names a group of a topic."""

    group: Group


class OfGroupOrDefault(OfTopic):
    """The request names a group of a topic, or means the default group."""

    group: Annotated[str | None, NAME, "The group; none: the default group."]


class NewGroup(OfGroup, NewGroupFields):
    """The request makes a group."""

    since: Annotated[
        str | int,
        Since("now", "first"),
        'It is owed what comes due from "now" on, from the "first" task that is still there, or'
        " from a moment.",
    ] = called("start", default="now")


class Settings(OfTopic, SettingsFields):
    """The request changes settings of a group, or of a topic."""

    none_is_said = True
    group: Annotated[str | None, NAME, "The group; none: the topic itself."] = place(default=None)


class Deletion(OfTopic):
    """The request deletes a topic."""

    force: Annotated[
        bool, FLAG, "Whether to delete it although it holds tasks or has subscribers."
    ] = place(default=False)


class GroupDeletion(OfGroup):
    """The request deletes a group."""

    force: Annotated[
        bool, FLAG, "Whether to delete it although it holds tasks or has subscribers."
    ] = place(default=False)


class ResetTrial(OfGroup):
    """The request asks what a reset would give; nothing is given."""

    to: Annotated[str | int, Since("first"), 'A moment, or "first": all that is known.'] = called(
        "to", default=REQUIRED
    )


class Reset(ResetTrial):
    """The request gives a group again what came due since a moment."""

    rate: Annotated[
        float | None, RATE_OF_CHANGES, "The most tasks a second; without it there is no limit."
    ] = None
    id: Annotated[str | None, OWN_NAME, SAME] = None


class KeysPage(OfGroupOrDefault):
    """The request asks for keys of a group, up to ``limit``."""

    limit: Annotated[int, Whole(1, 1_000), "The most items of the answer."] = 100


class HeldTasks(OfGroupOrDefault):
    """The request names held tasks by their ids, or the one of an order key."""

    one_of = ("ids", "key")
    ids: Annotated[Any, IDS, "The ids of the held tasks."] = place(default=None)
    key: Annotated[str | None, KEY, "The order key whose task is held."] = place(default=None)


class OneKey(OfGroupOrDefault):
    """The request names one key of a group: an order key, or a value that shares the group."""

    one_of = ("key", "value")
    key: Annotated[str | None, KEY, "The order key."] = place(default=None)
    value: Annotated[Value | None, PROPERTY, "The value of ``fair_by``."] = place(default=None)


# --- answers -------------------------------------------------------------------------------------


class GroupSettings(Answer):
    """These settings hold for a group, or for a topic (then ``group`` is None)."""

    topic: Annotated[str, NAME, "The topic."]
    group: Annotated[
        str | None, NAME, "The group; None: these are the settings of the topic itself."
    ]
    paused: Annotated[
        bool, "Whether nothing is delivered until somebody resumes it; enqueues go on."
    ]
    rate: Annotated[float | None, "The most deliveries a second; None: there is no limit."]
    burst: Annotated[
        int | None, "The most deliveries at once after a pause; None: there is no rate."
    ]
    retry: Annotated[
        Retry | None, POLICY, "The retry policy that was set; None: the one above it holds."
    ]
    created: Annotated[bool, "Whether this very call made the group."] = False
    paused_ms: Annotated[int | None, Moment(), "Since when it is paused; None: it is not."] = None
    if_pending: Annotated[
        IfPending | None,
        RULE,
        "For a topic: the rule for a task whose key is pending, unless the task has its own.",
    ] = None
    broadcast_only: Annotated[
        bool, "For a topic: it has no groups; a due task is broadcast and ends."
    ] = False
    tags: Annotated[str | None, "For a group: the tags of its filter; None: any tag."] = None
    where: Annotated[
        str | None, "For a group: the condition of its filter; None: there is none."
    ] = None
    order_retry_ms: Annotated[
        int | None,
        ORDER_RETRY_MS,
        "For a group, set or by default: the time until a failed task of an order key is tried"
        " again, in milliseconds.",
    ] = None
    order_attempts: Annotated[
        int | None,
        "How many failed attempts of a task of an order key there are before order_failure holds.",
    ] = None
    order_failure: Annotated[
        str | None,
        '"hold": its key is held until an operator acts; "dead": it goes to the dead letters, and'
        ' its key goes on; "retry": it is tried until it succeeds.',
    ] = None
    fair_by: Annotated[
        str | None, 'The field whose values take turns: "key", "tag", or the name of a property.'
    ] = None
    limit_each: Annotated[int | None, "The most deliveries of each value of fair_by in flight."] = (
        None
    )
    rate_each: Annotated[float | None, "The most deliveries a second of each value of fair_by."] = (
        None
    )

    paused_since = maybe_when("paused_ms", "Since when it is paused.")

    @property
    def order_retry(self) -> float | None:
        """``order_retry_ms`` in seconds."""
        return None if self.order_retry_ms is None else self.order_retry_ms / 1000


class MadeGroup(Answer):
    """A subscription or a pull has made the group."""

    adopted: Annotated[int, "Tasks that were due before the topic had any group: its own now."]
    idle: Annotated[
        Mapping[str, int],
        "Other groups of the topic that have no subscriber and have finished no task since the"
        " daemon started → how many tasks each holds.",
    ]

    @classmethod
    def joined(cls, parts: Iterable[MadeGroup | None]) -> MadeGroup | None:
        """What several shards say of the group as one; None: it was there in all."""
        made = [part for part in parts if part is not None]
        idle = sum((Counter(part.idle) for part in made), Counter[str]())
        adopted = sum(part.adopted for part in made)
        return cls.of({"adopted": adopted, "idle": dict(idle)}) if made else None

    @property
    def is_odd(self) -> bool:
        """Whether somebody should look: tasks waited before, or wait for nobody."""
        return bool(self.adopted or self.idle)

    def told(self, topic: str, group: str) -> str:
        """Return a sentence for people about the new group, with the commands that mend it."""
        names = f"{shlex.quote(topic)} {shlex.quote(group)}"
        parts = [
            f"makes the group {group} of topic {topic}: it keeps what is due until somebody acks"
            f" it, also when this has ended; `tickwheel groups delete {names}` ends it"
        ]
        if self.adopted:
            parts.append(
                f"it takes over {_tasks(self.adopted)} that were due before the topic had a group;"
                f" `tickwheel groups create {shlex.quote(topic)} OTHER --start first` gives them to"
                " another group as well"
            )
        for name, held in self.idle.items():
            other = f"{shlex.quote(topic)} {shlex.quote(name)}"
            parts.append(
                f"the group {name} of this topic holds {_tasks(held)}, has no subscriber and has"
                f" finished none since the daemon started; `tickwheel groups reset {names} --to"
                f" first --wait` gives them to {group}, then `tickwheel groups delete {other}"
                " --force` ends that group and what it holds"
            )
        return "; ".join(parts)


def _tasks(count: int) -> str:
    return f"{count} task{'s' * (count != 1)}"


class GroupHeld(Answer):
    """The tasks that the deleted group held."""

    ready: Annotated[int, "How many tasks were due and not delivered."]
    in_flight: Annotated[int, "How many tasks were delivered and not settled."]
    waiting: Annotated[int, "How many tasks waited for a retry."]
    dead: Annotated[int, "How many dead letters it had."]


class TopicHeld(Answer):
    """The tasks that the deleted topic held."""

    scheduled: Annotated[int, "How many tasks were scheduled."]
    ready: Annotated[int, "How many (task, group) pairs were due and not delivered."]
    in_flight: Annotated[int, "How many (task, group) pairs were delivered and not settled."]
    waiting: Annotated[int, "How many (task, group) pairs waited for a retry."]
    dead: Annotated[int, "How many dead letters its groups had."]
    groups: Annotated[int, "How many groups it had."]


class HeldKey(Answer):
    """An order key that a group holds until an operator acts."""

    id: Annotated[int, ID, "The task that failed."]
    key: Annotated[str | None, "The order key."]
    since_ms: Annotated[int, Moment(), "When it was held."]
    attempt: Annotated[int, "How often the task was delivered."]
    waiting: Annotated[int, "How many tasks of the key wait behind it."]
    reason: Annotated[str, "Why the last attempt failed."]
    subscriber: Annotated[str, "The consumer that had the task."]

    since = when("since_ms", "When it was held.")


class PausedKey(Answer):
    """A key of a group that an operator has paused: none of its tasks is handed out."""

    kind: Annotated[str, Choice("str", "order", "fair"), '"order" or "fair".']
    value: Annotated[Value, "The order key, or the value that shares the group."]
    since_ms: Annotated[int, Moment(), "When it was paused."]
    by: Annotated[str, "Who paused it."]
    waiting: Annotated[int, "Due tasks of it that wait."]

    since = when("since_ms", "When it was paused.")


class HeldKeys(Answer):
    """The held keys of a group, and its paused keys, the oldest first."""

    keys: Annotated[list[HeldKey], "The oldest of those whose tasks have failed for good."]
    held: Annotated[int, "How many order keys are held in all."]
    paused: Annotated[list[PausedKey], "The oldest of those that operators have paused."]


class KeyPause(Answer):
    """Whether a key of a group is paused now."""

    paused: Annotated[bool, "None of its tasks is handed out until it is resumed."]
    changed: Annotated[bool, "Whether it was otherwise before this call."]
    since_ms: Annotated[
        int | None, Moment(), "Since when it is paused, or was; None: it was not."
    ] = None
    by: Annotated[str | None, "Who paused it."] = None

    since = maybe_when("since_ms", "Since when it is paused, or was.")


class KeyLine(Answer):
    """Tasks that wait for their turn: of an order key, or of a value that shares a group."""

    id: Annotated[int, ID, "One of its tasks."]
    kind: Annotated[str, Choice("str", "order", "fair"), '"order" or "fair".']
    value: Annotated[Value | None, "The order key, or the value; None: of tasks that have none."]
    state: Annotated[
        str,
        'The state of the task whose turn it is: "ready", "in_flight", "retrying", "held"; or the'
        ' reason that holds the value back: "limited" (limit_each), "throttled" (rate_each).'
        ' Either may be "paused".',
    ]
    in_flight: Annotated[int, "How many of its tasks are delivered and not settled."]
    waiting: Annotated[int, "How many of its tasks wait for their turn."]


class KeyLines(Answer):
    """The keys of a group for whose turn most tasks wait."""

    lines: Annotated[list[KeyLine], "The keys, the one for which most tasks wait first."]
    waiting: Annotated[int, "How many tasks wait for their turn in all keys of the group."]


class ResetPreview(Answer):
    """A reset of a group would give it this."""

    tasks: Annotated[int, "How many tasks the group would get."]
    first_ms: Annotated[int | None, Moment(), "When the first of them was due."]
    last_ms: Annotated[int | None, Moment(), "When the last of them was due."]
    lost: Annotated[int, "How many more tasks there were whose bodies are gone."]
    incomplete: Annotated[
        int,
        "Gaps that the history has in that time: more may be left out, and nobody can count it.",
    ]
    from_ms: Annotated[int, Moment(), "The beginning of the time that was looked at."]
    until_ms: Annotated[int, Moment(), "The end of the time that was looked at."]

    first = maybe_when("first_ms", "When the first of them was due.")
    last = maybe_when("last_ms", "When the last of them was due.")


class Replay(Answer):
    """The tasks from before a group have been looked at so far."""

    looked_at: Annotated[int, "How many tasks have been looked at."]
    given: Annotated[int, "How many of these the group was given."]
    share: Annotated[
        float | None, "The share that has been looked at, 0 to 1; None: it is not known."
    ]


_GROUP = "/v1/topics/{topic}/groups/{group}"
_READ, _OPERATE = Need(Right.READ, Of.NAMED), Need(Right.OPERATE, Of.NAMED)
_TOPICS, _ORDER = "topics", "order and shares"
_HELD = "Raises NotFound for a group."

VERBS: Final = (
    Verb(
        "create_group", NewGroup, GroupSettings, _OPERATE, "Create a group",
        "Make a group before its first subscriber comes; one that exists stays as it is"
        " (``created`` of the answer says which).",
        FrameType.GROUP_CREATE, path=f"PUT {_GROUP}", tag=_TOPICS, status=201,
        errors=("conflict",), audit=Audit.ALWAYS, changes=True,
        methods=(Method("create_group"),),
        over=Over.HOME, unique=Unique("group", Home.TOPIC),
    ),
    Verb(
        "configure", Settings, GroupSettings, _OPERATE,
        "Set a group's pause, rate or retry policy",
        "Change settings of a group, or of the topic itself. Others stay; None removes a setting."
        " A filter applies to tasks that come due from now on. Durable when it returns."
        " Raises NotFound for a group, Conflict for ``broadcast_only`` of a topic with groups.",
        FrameType.CONFIGURE, path=f"PATCH {_GROUP}", tag=_TOPICS, errors=("not_found", "conflict"),
        audit=Audit.ALWAYS, changes=True, methods=(Method("configure"),),
        over=Over.HOME,
    ),
    Verb(
        "delete_group", GroupDeletion, GroupHeld, _OPERATE, "Delete a group",
        "Delete a group; what it held. Raises Conflict when it holds anything, unless ``force``:"
        " then that is gone for it.",
        FrameType.GROUP_DELETE, path=f"DELETE {_GROUP}", tag=_TOPICS,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True, repeat=False,
        methods=(Method("delete_group"),),
        over=Over.HOME_LAST,
    ),
    Verb(
        "delete_topic", Deletion, TopicHeld, _OPERATE, "Delete a topic with all that it holds",
        "Delete a topic with its groups, settings and dead letters; what it held. Durable when it"
        " returns; its tasks end as deleted in the background, and until then the topic takes no"
        " new ones (Refused). Raises Conflict when it holds tasks or has subscribers, unless"
        " ``force``, and always when a schedule enqueues to it; NotFound.",
        FrameType.TOPIC_DELETE, path="DELETE /v1/topics/{topic}", tag=_TOPICS,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True, repeat=False,
        methods=(Method("delete_topic"),),
        over=Over.HOME_LAST,
    ),
    Verb(
        "reset_group", Reset, BulkInfo, _OPERATE,
        "Give a group again what came due since a moment",
        "Give the group again what came due since ``to`` and that it has finished, or was never"
        " owed. A bulk operation: durable when it returns, done in the background (``wait_bulk``)."
        " Each task comes as one of its own, of which ``Delivery.replay_of`` is the former's id."
        " Other groups notice nothing. Raises NotFound, Conflict when the group is being reset"
        " already, Overloaded.",
        FrameType.GROUP_RESET, path=f"POST {_GROUP}/reset", tag=_TOPICS, status=201,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True,
        methods=(Method("reset_group"),),
        over=Over.TURN, unique=Unique("id", Home.FIRST),
    ),
    Verb(
        "preview_reset", ResetTrial, ResetPreview, _READ,
        "What a reset would give; gives nothing",
        "What a reset to that moment would give now; nothing is given. The whole history is looked"
        " through. Raises NotFound, Overloaded.",
        FrameType.GROUP_RESET_PREVIEW, path=f"POST {_GROUP}/reset-preview", tag=_TOPICS,
        errors=("not_found",), prompt=False, methods=(Method("preview_reset"),),
        over=Over.ALL,
    ),
    Verb(
        "held_keys", KeysPage, HeldKeys, _READ, "Keys that wait for an operator",
        "Order keys that are held until an operator acts, the oldest first. Raises NotFound.",
        FrameType.HELD_KEYS, path=f"GET {_GROUP}/held-keys", tag=_ORDER, errors=("not_found",),
        methods=(
            Method("held_keys", gives="keys"),
            Method(
                "paused_keys", gives="paused",
                text="Keys that operators have paused, order keys and values of ``fair_by``, the"
                " oldest first. Raises NotFound.",
            ),
        ),
        over=Over.ALL,
    ),
    Verb(
        "key_lines", KeysPage, KeyLines, _READ, "Who waits for whom",
        "Order keys, and values that share the group, for whose turn most tasks wait. Raises"
        " NotFound.",
        FrameType.KEY_LINES, path=f"GET {_GROUP}/lines", tag=_ORDER, errors=("not_found",),
        methods=(Method("key_lines", gives="lines"),),
        over=Over.ALL,
    ),
    Verb(
        "release_key", HeldTasks, list[TaskOutcome], _OPERATE, "Try the task of a held key again",
        "The task of a held key, by its id or the key, is tried again at once, its failures counted"
        ' anew: "released", or "not_held". Raises NotFound for a group.',
        FrameType.RELEASE_KEY, path=f"POST {_GROUP}/held-keys/release", tag=_ORDER,
        errors=("not_found",), audit=Audit.ALWAYS, changes=True,
        methods=(Method("release_key", word="ReleaseKeyWord"),),
        over=Over.IDS,
    ),
    Verb(
        "skip_key", HeldTasks, list[TaskOutcome], _OPERATE,
        "Give the task of a held key up: its key goes on",
        'The task of a held key goes to the dead letters, and its key goes on: "skipped", or'
        ' "not_held". Raises NotFound for a group.',
        FrameType.SKIP_KEY, path=f"POST {_GROUP}/held-keys/skip", tag=_ORDER,
        errors=("not_found",), audit=Audit.ALWAYS, changes=True,
        methods=(Method("skip_key", word="SkipKeyWord"),),
        over=Over.IDS,
    ),
    Verb(
        "pause_key", OneKey, KeyPause, _OPERATE, "Hand out no task of one key until it is resumed",
        "Hand out no task of one key of the group, an order key or a value of ``fair_by``, until it"
        " is resumed. Its tasks become due and wait, other keys go on, what is in flight can be"
        " acked. Durable when it returns. One that is paused stays as it is. Raises NotFound for a"
        " group, Conflict for a value of a group without ``fair_by``, LimitExceeded.",
        FrameType.PAUSE_KEY, path=f"POST {_GROUP}/held-keys/pause", tag=_ORDER,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True,
        methods=(Method("pause_key"),), command="groups pause-key TOPIC GROUP",
        over=Over.TURN,
    ),
    Verb(
        "resume_key", OneKey, KeyPause, _OPERATE, "Hand out the tasks of a paused key again",
        "Hand out the tasks of a paused key again. ``changed`` is false if it was not paused."
        " Raises as ``pause_key``.",
        FrameType.RESUME_KEY, path=f"POST {_GROUP}/held-keys/resume", tag=_ORDER,
        errors=("not_found", "conflict"), audit=Audit.ALWAYS, changes=True,
        methods=(Method("resume_key"),), command="groups resume-key TOPIC GROUP",
        over=Over.TURN,
    ),
)  # fmt: skip
