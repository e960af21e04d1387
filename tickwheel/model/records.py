"""Values of tasks and groups that engine, store and wire share, and the table of a task's state
transitions in one group (``TRANSITIONS``).

Pure data. Times are integers in milliseconds of the wall clock (Unix), and their names end in
``_ms``. A ``TaskRow`` does not change: a reschedule or a replacement creates a new one.

``docs/durability.md`` contains the diagram of the table. One test compares the two, and the
engine's model test fails at any transition that is not in the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

from tickwheel.model.policies import Coalescing, Merged, PolicyRef
from tickwheel.model.values import (
    ENCODING_BYTES,
    EXTRAS_BYTES,
    NUMBER_BYTES,
    ORDER_KEY_BYTES,
    PROPERTY_BYTES,
    SHARD_BITS,
    SHARD_BY_BYTES,
    TRACE_BYTES,
    WINDOW_BYTES,
    text_bytes,
)

SEQUENCE_BITS = 12
ID_STEP = 1 << SHARD_BITS
"""Distance between two consecutive ids of one daemon."""
ID_EPOCH_MS = 1_735_689_600_000
"""2025-01-01T00:00:00Z. Ids count milliseconds from here, so that 41 bits last until 2094."""
ID_MAX = 2**63 - 1
MOMENT_MS_MAX = ID_EPOCH_MS + (1 << (63 - SHARD_BITS - SEQUENCE_BITS)) - 1
"""2094-09-07, the last moment that fits into an id. It is also the last allowed moment of a
schedule and of a group's start."""
DEFAULT_GROUP = "default"
TOPIC_ITSELF = ""
BY_DUE_ALONE = ID_MAX
"""``GroupRow.since_id`` of a group that starts at a due time in the future."""

ATTEMPT_MAX = 2**31 - 1
"""Maximum deliveries of a task to a group. This number is never reached in practice, and every
store and file can represent it. A receipt with a higher number is invalid."""

PropertyValue = str | int | float | bool


class Replayed(NamedTuple):
    """The original of a task that a reset of a group has created (``engine/groups.py``)."""

    id: int
    """The id of the original."""
    group: str
    """The only group that must receive the new task."""
    key: str | None = None
    """The key of the original. ``TaskOptions.key`` would make it pending for all groups."""


class TaskOptions(NamedTuple):
    """The rare options of a task; ``TaskRow.options`` is None when all of them are absent."""

    key: str | None = None
    tag: str | None = None
    properties: dict[str, PropertyValue] | None = None
    priority: int = 0
    ttl_ms: int | None = None
    retry: PolicyRef | None = None
    """The task's retry policy, which overrides those of its group and topic."""
    order_id: int | None = None
    """The task's position in the order of ids; None means its id. With an ``order_id``, which can
    be the id, receipts from before a restart are valid only for recorded deliveries."""
    within_ms: int | None = None
    """The length of the due window, which begins at ``asked_ms`` and contains the due time."""
    asked_ms: int | None = None
    order_key: str | None = None
    """A group gets the tasks of an order key one at a time, in order."""
    replayed: Replayed | None = None
    trace: str | None = None
    """The W3C traceparent of the producer."""
    encoding: str | None = None
    """The type of the body and how it was encoded; None means plain bytes."""
    shard_by: str | None = None
    """The basis that, instead of the keys, determines the task's shard."""


class Columns(NamedTuple):
    """The options of several tasks, each option as a tuple with one value per task."""

    key: tuple[str | None, ...]
    tag: tuple[str | None, ...]
    properties: tuple[dict[str, PropertyValue] | None, ...]
    priority: tuple[int, ...]
    ttl_ms: tuple[int | None, ...]
    retry: tuple[PolicyRef | None, ...]
    order_id: tuple[int | None, ...]
    within_ms: tuple[int | None, ...]
    asked_ms: tuple[int | None, ...]
    order_key: tuple[str | None, ...]
    replayed: tuple[Replayed | None, ...]
    trace: tuple[str | None, ...]
    encoding: tuple[str | None, ...]
    shard_by: tuple[str | None, ...]


def columns_of(options: Collection[TaskOptions | None]) -> Columns:
    """Transpose the options of at least one task; no task may be without options. Transposing is
    faster than a Python loop over one option, and C code then scans the columns."""
    return Columns._make(zip(*options, strict=True))


def is_absent(column: Sequence[object]) -> bool:
    """Return whether no task has this option."""
    return column[0] is None and column.count(None) == len(column)


_KEY_ALONE = TaskOptions()[1:]


def is_key_alone(options: TaskOptions) -> bool:
    """Return whether the options consist of a key only."""
    return options[0] is not None and options[1:] == _KEY_ALONE


def keys_alone(options: Collection[TaskOptions | None]) -> tuple[str, ...] | None:
    """Return the keys of the tasks if every task has a key and no other option, otherwise None.
    This takes a third of the time of calling ``is_key_alone`` for each task."""
    if not options or not all(options):
        return None
    keys, *others = zip(*options, strict=True)
    count = len(keys)
    for column, default in zip(others, _KEY_ALONE, strict=True):
        if column.count(default) != count:
            return None
    return None if None in keys else keys


NewTask = tuple[str, int, bytes, TaskOptions | None]
"""(topic, due_ms, body, options) of a task without an id; due_ms is not in the past."""


class _NoBody(bytes):
    """The type of ``NO_BODY``, which is compared by identity."""


NO_BODY: Final[bytes] = _NoBody()
"""The body of a row that was read without its body. Writing the row keeps the stored body."""


class TaskRow(NamedTuple):
    """A stored task. It is in the StoreQueue until its last group has finished it."""

    id: int
    due_ms: int
    topic: str
    body: bytes
    options: TaskOptions | None = None

    @property
    def enqueued_ms(self) -> int:
        return id_time_ms(self.id)


REPLAY_BYTES = 48
"""Bytes of the names and numbers of ``Replayed``."""


def size_of(body: bytes, options: TaskOptions | None) -> int:
    """Return the size of a task in bytes, as it counts for all limits. The size in a frame is at
    most this."""
    return len(body) if options is None else len(body) + options_bytes(options)


def task_bytes(row: TaskRow) -> int:
    """Return ``size_of`` the task in a row."""
    return len(row[3]) if row[4] is None else len(row[3]) + options_bytes(row[4])


def order_of(row: TaskRow) -> int:
    """Return the task's position in the order of ids."""
    if row.options is None or row.options.order_id is None:
        return row.id
    return row.options.order_id


def options_bytes(options: TaskOptions) -> int:
    """Return an upper bound of the bytes that options take in a frame."""
    (
        key, tag, properties, _, _, retry, _, within_ms, _, order_key, replayed, trace, encoding,
        shard_by,
    ) = options  # fmt: skip
    size = EXTRAS_BYTES
    if shard_by is not None:
        size += SHARD_BY_BYTES + text_bytes(shard_by)
    if encoding is not None:
        size += ENCODING_BYTES + len(encoding)
    if trace is not None:
        size += TRACE_BYTES
    if replayed is not None:
        size += REPLAY_BYTES + text_bytes(replayed.group) + text_bytes(replayed.key or "")
    if order_key is not None:
        size += ORDER_KEY_BYTES + text_bytes(order_key)
    if within_ms is not None:
        size += WINDOW_BYTES
    if key is not None:
        size += text_bytes(key)
    if tag is not None:
        size += text_bytes(tag)
    if properties:
        for name, value in properties.items():
            size += PROPERTY_BYTES + text_bytes(name)
            size += text_bytes(value) if type(value) is str else NUMBER_BYTES
    if retry is not None and not isinstance(retry, str):
        size += NUMBER_BYTES * (len(retry.delays_ms) + 6)
    return size


def columns_bytes(columns: Columns, options: Sequence[TaskOptions]) -> int:
    """Return the sum of ``options_bytes`` of ``options``, whose transposition is ``columns``."""
    rare = (columns.key, columns.properties, columns.retry, columns.within_ms, columns.replayed)
    if not all(map(is_absent, rare)):
        return sum(map(options_bytes, options))
    size = EXTRAS_BYTES * len(options)
    size += TRACE_BYTES * (len(options) - columns.trace.count(None))
    texts_of = (
        (columns.tag, 0), (columns.order_key, ORDER_KEY_BYTES), (columns.encoding, ENCODING_BYTES),
        (columns.shard_by, SHARD_BY_BYTES),
    )  # fmt: skip
    for column, head_bytes in texts_of:
        if not is_absent(column):
            texts = [text for text in column if text is not None]
            size += head_bytes * len(texts) + text_bytes("".join(texts))
    return size


def keys_bytes(keys: Collection[str]) -> int:
    """Return the sum of ``options_bytes`` of tasks whose only options are these keys. Raise
    UnicodeEncodeError if UTF-8 cannot encode a key, so that counted keys can be stored."""
    joined = "".join(keys)
    count = len(joined) if joined.isascii() else len(joined.encode())
    return EXTRAS_BYTES * len(keys) + count


class ProgressState(IntEnum):
    """The progress of one group with one task. Without a row, no delivery is recorded."""

    IN_FLIGHT = 1
    """Delivered; ``at_ms`` is when the lease ends."""
    WAITING = 2
    """Failed; ``at_ms`` is when the next attempt is due."""
    RELEASED = 3
    """Returned (the lease ended, the connection was lost, or it was released) and ready again."""
    DONE = 4
    """Acked by this group, or deleted from its dead letters (epoch 0), while other groups have not
    finished the task."""
    HELD = 5
    """The order key has been held since ``at_ms``, until an operator acts."""
    EXPIRED = 6
    """Expired in this group, while other groups have not finished the task."""
    REPLACED = 7
    """A newer task with the same key has replaced the task in this group."""

    @property
    def is_over(self) -> bool:
        """Whether the group has finished the task."""
        return self in _FINISHED_STATES


_FINISHED_STATES = (ProgressState.DONE, ProgressState.EXPIRED, ProgressState.REPLACED)


CONSUMER_DIED = "consumer_died"
"""Prefix of the reason of a delivery that ended because its consumer died."""


class Failure(NamedTuple):
    """Why a delivery did not end in an ack."""

    attempt: int
    at_ms: int
    reason: str
    """The first line is the reason. For the failure that turned the task into a dead letter, the
    trace follows."""
    subscriber: str = ""
    """The consumer's name and address; "" if unknown."""

    @property
    def summary(self) -> str:
        return self.reason.partition("\n")[0]

    @property
    def trace(self) -> str:
        return self.reason.partition("\n")[2]

    @property
    def is_death(self) -> bool:
        """Whether the consumer died, which does not count as a failure of the task."""
        return self.reason.startswith(CONSUMER_DIED)

    def brief(self) -> Failure:
        """Return the failure without its trace."""
        return self._replace(reason=self.summary) if "\n" in self.reason else self


class Past(NamedTuple):
    """A summary of the deliveries of a task to a group since its enqueue or requeue."""

    failures: tuple[Failure, ...] = ()
    """The newest failures, oldest first, at most ``FAILURES_MAX``."""
    failed: int = 0
    """Number of failed deliveries."""
    snoozes: int = 0
    """Number of times that the group's consumers have postponed the task."""
    deaths: int = 0
    """Number of consumers that have died while they processed the task."""
    replaced_by: int = 0
    """Id of the newer task that replaces this task if its delivery ends without an ack, or 0."""

    def with_failure(self, failure: Failure) -> Past:
        """Add a failure or a death of a consumer."""
        failures = (*self.failures, failure)[-FAILURES_MAX:]
        if failure.is_death:
            return self._replace(failures=failures, deaths=self.deaths + 1)
        return self._replace(failures=failures, failed=self.failed + 1)


NO_PAST = Past()


class ProgressRow(NamedTuple):
    """An entry of the PrepareQueue: the progress of one group with one task."""

    id: int
    group: str
    state: ProgressState
    attempt: int
    """The number of deliveries so far, including deliveries that are not counted as attempts."""
    at_ms: int
    epoch: int = 0
    """The epoch of the newest delivery, which is part of its receipt like ``attempt``."""
    failures: tuple[Failure, ...] = ()
    """The newest failures. This and the following fields are those of ``Past``."""
    failed: int = 0
    snoozes: int = 0
    deaths: int = 0
    replaced_by: int = 0

    @property
    def is_acked(self) -> bool:
        """Whether the group has acked the task, which other groups have not finished."""
        return self.state is ProgressState.DONE and self.epoch > 0

    @property
    def outcome(self) -> Outcome:
        """How the task ended in this group; valid only for a final state."""
        if self.state is ProgressState.EXPIRED:
            return Outcome.EXPIRED
        if self.state is ProgressState.REPLACED:
            return Outcome.CANCELLED
        return Outcome.ACKED if self.is_acked else Outcome.DELETED

    @property
    def past(self) -> Past:
        return Past(self.failures, self.failed, self.snoozes, self.deaths, self.replaced_by)


FAILURES_MAX = 16
REASON_LENGTH_MAX = 200
"""Maximum characters of the first line of a failure's reason."""
TRACE_LENGTH_MAX = 4_000
"""Default of ``failure_trace_length_max``: how many characters of a trace's end are stored."""
TRACES_LENGTH_MAX = 16 * 1024 * 1024
"""Maximum characters of all traces that wait for the store. Further failures are stored without
their traces."""
SUBSCRIBER_LENGTH_MAX = 100


class DeadRow(NamedTuple):
    """A dead letter: a task that one group has given up on. Its body stays in its ``TaskRow``."""

    id: int
    group: str
    topic: str
    died_ms: int
    attempt: int
    reason: str
    failures: tuple[Failure, ...] = ()
    failed: int = 0
    """Number of failed deliveries, as in ``Past``."""
    newest_id: int = 0
    """The newest id when the task died. It orders dead letters even if the clock is set back."""
    deaths: int = 0
    """Number of consumers that have died while they processed the task, as in ``Past``."""


class FormerFilter(NamedTuple):
    """A group's filter from before a change, for tasks that had come due before the change."""

    tags: str | None
    where: str | None
    due_ms: int
    """Latest due time of the tasks to which the filter applies."""
    id: int
    """Highest position, in the order of ids, of the tasks to which the filter applies."""


FORMER_FILTERS_MAX = 16
"""Maximum number of a group's former filters: of filter changes while older tasks wait."""
FILTERS_LENGTH_MAX = 4 * 1024 * 1024
"""Maximum characters of all filters of all groups, including former filters. A parsed filter takes
about 60 bytes per character."""


ORDER_RETRY_MS = 1_000
ORDER_ATTEMPTS = 16
"""Default number of failed attempts of a task with an order key."""
ORDER_DEAD = "dead"
"""The task becomes a dead letter, and the key's next task can be delivered."""
ORDER_HOLD = "hold"
"""The key is held until an operator acts."""
ORDER_RETRY = "retry"
"""The task is tried again until it succeeds."""
ORDER_FAILURES = (ORDER_DEAD, ORDER_HOLD, ORDER_RETRY)
FAIR_BY_KEY = "key"
FAIR_BY_TAG = "tag"


class OrderSettings(NamedTuple):
    """A group's settings for failed tasks with an order key. ``OrderRules`` has the defaults."""

    retry_ms: int | None = None
    """Delay between a failure and the next attempt, in milliseconds."""
    attempts: int | None = None
    """Number of failed attempts until ``failure`` applies."""
    failure: str | None = None
    """One of ``ORDER_FAILURES``."""


class ShareSettings(NamedTuple):
    """Settings for sharing a group's deliveries fairly among the values of a field."""

    fair_by: str | None = None
    """``FAIR_BY_KEY``, ``FAIR_BY_TAG``, or the name of a property; None: there are no shares."""
    limit_each: int | None = None
    """Maximum number of deliveries in flight per value."""
    rate_each: float | None = None
    """Maximum number of deliveries per second and value."""


class GroupSettings(NamedTuple):
    """The settings of a group, or of a whole topic."""

    paused: bool = False
    rate: float | None = None
    """Maximum deliveries per second; None means unlimited."""
    burst: int | None = None
    """Maximum number of deliveries in a burst; by default those of a second, at least 1."""
    retry: PolicyRef | None = None
    closed_ms: int | None = None
    """Latest due time of the group's tasks, set while the group is being deleted."""
    closed_id: int = 0
    """Highest id of the group's tasks, set while the group is being deleted."""
    if_pending: Coalescing | None = None
    """Topics only: the rule for tasks that have a key but no rule."""
    broadcast_only: bool = False
    """Topics only: the topic has no groups, and due tasks are broadcast and end."""
    tags: str | None = None
    """Groups only: the tags of the filter (``model/filters.py``)."""
    where: str | None = None
    """Groups only: the condition of the filter."""
    former: tuple[FormerFilter, ...] = ()
    """Former filters for tasks that came due before the filter changed, oldest first."""
    order: OrderSettings = OrderSettings()
    """Groups only."""
    shares: ShareSettings = ShareSettings()
    """Groups only."""
    paused_ms: int | None = None
    """The time at which the group or topic was paused, or None if it is not paused."""

    def flat(self) -> dict[str, Any]:
        """Return all settings, including those of ``order`` and ``shares``, by the names that
        clients use."""
        names = self._asdict()
        order, shares = names.pop("order"), names.pop("shares")
        return names | dict(zip(LINE_SETTINGS, (*order, *shares), strict=True))

    def replaced(self, flat: Mapping[str, Any]) -> GroupSettings:
        """Return a copy with some settings replaced, by the names that clients use."""
        group_settings = {name: value for name, value in flat.items() if name not in LINE_SETTINGS}
        order = {ORDER_SETTINGS[name]: flat[name] for name in ORDER_SETTINGS if name in flat}
        shares = {name: flat[name] for name in ShareSettings._fields if name in flat}
        return self._replace(
            **group_settings,
            order=self.order._replace(**order),
            shares=self.shares._replace(**shares),
        )


ORDER_SETTINGS = {f"order_{name}": name for name in OrderSettings._fields}
"""Name that clients use → field of ``OrderSettings``."""
LINE_SETTINGS = (*ORDER_SETTINGS, *ShareSettings._fields)
"""The settings for order keys and fair shares, by the names that clients use."""


class OrderRules(NamedTuple):
    """The effective rules for failed tasks with an order key: ``OrderSettings`` with defaults."""

    retry_ms: int
    attempts: int | None
    """Number of failed attempts until ``failure`` applies; None means never."""
    failure: str

    @classmethod
    def of(cls, settings: OrderSettings) -> OrderRules:
        """Return the rules of a group. By default the number of attempts is limited."""
        retry_ms, attempts = settings.retry_ms, settings.attempts
        failure = settings.failure or ORDER_HOLD
        if failure == ORDER_RETRY:
            attempts = None
        elif attempts is None:
            attempts = ORDER_ATTEMPTS
        return cls(ORDER_RETRY_MS if retry_ms is None else retry_ms, attempts, failure)


class GroupRow(NamedTuple):
    """A subscriber group of a topic and its start; see ``ownership.py``. A row whose group is
    ``TOPIC_ITSELF`` holds the settings of the topic."""

    topic: str
    group: str
    since_ms: int
    """The group must receive tasks that are due at this time or later."""
    settings: GroupSettings | None = None
    """The settings of the group; None if none was ever set."""
    since_id: int = BY_DUE_ALONE
    """The group must also receive tasks that were enqueued after this id."""
    version: int = 0
    """The number of the last settings change known to this shard, which the topic's home shard has
    assigned; 0 if there is only one shard, or if the home shard has not numbered a change."""

    @property
    def is_closed(self) -> bool:
        """Whether the group, or the topic, is being deleted."""
        return self.settings is not None and self.settings.closed_ms is not None

    @property
    def name(self) -> str:
        return self.group


class SettingsCounter(NamedTuple):
    """The last number that a shard has assigned to a settings change of its home topics: a group
    created, changed or deleted, or settings of a topic. Before the first change there is no row."""

    number: int = 0
    number_at_start: int | None = None
    """The last number known at the start, kept until the shard has read the numbers of all other
    shards. If the shard was restored to an older state, other shards know higher numbers, which
    must not be reused."""


class TaskSnapshot(NamedTuple):
    """All current records of one task."""

    row: TaskRow
    progress: Mapping[str, ProgressRow]
    dead: Mapping[str, DeadRow]


SessionKey = tuple[bytes, int]
"""(session, first request of a row)"""


class OncePart(NamedTuple):
    """The answer of one shard of an earlier layout to a request."""

    shard: int
    first_id: int
    tasks: int
    accepted_ms: int
    merged: Merged = ()
    """The outcome of each task, if the tasks had rules."""
    chosen: tuple[tuple[int, int], ...] = ()
    """(id, due_ms) of each task whose due time the daemon chose in its due window, unless the task
    had ended."""


class Once(NamedTuple):
    """A session's record of a request with an idempotency key, in addition to its answer."""

    key: bytes = b""
    """The idempotency key, which determines the request's home; b"" for a producer's session."""
    shards: int = 0
    """The number of shards when the request was answered, if it has changed since; otherwise 0."""
    parts: tuple[OncePart, ...] = ()
    """The answers of those shards, each to the tasks that belonged to it."""


NOT_ONCE: Final = Once()


class SessionRow(NamedTuple):
    """The answers in one batch to a producer's session, for resends after a lost reply. Together,
    the rows of a session cover its requests at or above its floor."""

    session: bytes
    floor: int
    """The session's floor when the row was written. The highest floor of all rows applies."""
    seen_ms: int
    answers: tuple[tuple[int, int, int, int], ...]
    """(request, first id, number of ids, accepted_ms) of each request, ascending."""
    merged: tuple[tuple[int, Merged], ...] = ()
    """(request, outcome of each task) of each request whose tasks had rules."""
    once: Once = NOT_ONCE

    @property
    def key(self) -> SessionKey:
        return self.session, self.answers[0][0] if self.answers else 0


class Outcome(IntEnum):
    """How a task ended. It is remembered for a bounded number of tasks."""

    ACKED = 1
    CANCELLED = 2
    EXPIRED = 3
    DELETED = 4
    """Deleted from the dead letters, or with its group or topic."""
    FILTERED = 5
    """The filters of all groups excluded the task."""


def id_time_ms(task_id: int) -> int:
    """Return the wall-clock ms in which an id was assigned. In a burst, ids run ahead of it."""
    return (task_id >> (SHARD_BITS + SEQUENCE_BITS)) + ID_EPOCH_MS


def id_floor(now_ms: int, shard: int) -> int:
    """Return the lowest id that ``shard`` can assign at ``now_ms``."""
    return ((now_ms - ID_EPOCH_MS) << (SHARD_BITS + SEQUENCE_BITS)) | shard


class State(StrEnum):
    """The state of a task in a group. LOOKUP returns these values."""

    STAGED = "staged"
    SCHEDULED = "scheduled"
    READY = "ready"
    IN_FLIGHT = "in_flight"
    WAITING = "waiting"
    DEAD = "dead"
    ACKED = "acked"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DELETED = "deleted"
    FILTERED = "filtered"
    REFUSED = "refused"


class Event(StrEnum):
    """The events that change the state of a task in a group."""

    LANDED = "batch durable"
    REFUSED = "batch refused"
    DUE = "due"
    DELIVER = "deliver"
    ACK = "ack"
    NACK = "nack"
    GIVE_UP = "retries used up"
    REJECT = "reject"
    LEASE_OVER = "lease over"
    CONSUMER_DIED = "consumer died"
    RELEASE = "release"
    GIVE_WAY = "replaced"
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    POSTPONE = "reschedule after a failure"
    HOLD = "clock went back"
    EXPIRE = "ttl over"
    REQUEUE = "requeue"
    DELETE = "delete"
    LEAVE_OUT = "left out by a filter"


S, E = State, Event

TRANSITIONS: dict[tuple[State, Event], State] = {
    (S.STAGED, E.LANDED): S.SCHEDULED,
    (S.STAGED, E.REFUSED): S.REFUSED,
    (S.SCHEDULED, E.DUE): S.READY,
    (S.SCHEDULED, E.RESCHEDULE): S.SCHEDULED,
    (S.SCHEDULED, E.CANCEL): S.CANCELLED,
    (S.SCHEDULED, E.ACK): S.ACKED,
    (S.SCHEDULED, E.LEAVE_OUT): S.FILTERED,
    (S.READY, E.DELIVER): S.IN_FLIGHT,
    (S.READY, E.RESCHEDULE): S.SCHEDULED,
    (S.READY, E.CANCEL): S.CANCELLED,
    (S.READY, E.EXPIRE): S.EXPIRED,
    (S.READY, E.ACK): S.ACKED,
    (S.READY, E.HOLD): S.WAITING,
    (S.READY, E.LEAVE_OUT): S.FILTERED,
    (S.IN_FLIGHT, E.ACK): S.ACKED,
    (S.IN_FLIGHT, E.NACK): S.WAITING,
    (S.IN_FLIGHT, E.GIVE_UP): S.DEAD,
    (S.IN_FLIGHT, E.REJECT): S.DEAD,
    (S.IN_FLIGHT, E.LEASE_OVER): S.READY,
    (S.IN_FLIGHT, E.CONSUMER_DIED): S.WAITING,
    (S.IN_FLIGHT, E.RELEASE): S.READY,
    (S.IN_FLIGHT, E.GIVE_WAY): S.CANCELLED,
    (S.WAITING, E.DUE): S.READY,
    (S.READY, E.POSTPONE): S.WAITING,
    (S.WAITING, E.POSTPONE): S.WAITING,
    (S.WAITING, E.RESCHEDULE): S.SCHEDULED,
    (S.WAITING, E.CANCEL): S.CANCELLED,
    (S.WAITING, E.ACK): S.ACKED,
    (S.WAITING, E.EXPIRE): S.EXPIRED,
    (S.DEAD, E.REQUEUE): S.READY,
    (S.DEAD, E.DELETE): S.DELETED,
    (S.DEAD, E.CANCEL): S.CANCELLED,
}
"""(State, event) → next state.

A replaced task in flight is CANCELLED when its delivery ends without an ack. An ack of a READY or
WAITING task carries an earlier, genuine receipt; an ack of a SCHEDULED task carries a receipt from
before a crash that lost the delivery. A plain reschedule of a WAITING task occurs only before its
first attempt, when the task waits because the clock was set back. Cancelling a task for which other
groups still wait also removes its dead letters. A crash returns a task to its last recorded state.
When a topic gets its first group, its filter is applied to each waiting task when its turn comes.
"""


def diagram() -> str:
    """Return the table of transitions as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> staged: enqueue"]
    lines += [f"    {a} --> {b}: {event}" for (a, event), b in TRANSITIONS.items()]
    finals = sorted(set(TRANSITIONS.values()) - {a for a, _ in TRANSITIONS})
    lines += [f"    {state} --> [*]" for state in finals]
    return "\n".join(lines) + "\n"
