"""What a task is, as values: the vocabulary that engine, store and wire share; and the life of a
task in one group, as a table (``TRANSITIONS``).

Pure data. Times are integer milliseconds of the wall clock (Unix) and say so in their names.
A ``TaskRow`` never changes while it is pending except by reschedule, which replaces it.

``docs/durability.md`` shows the diagram made from the table; a test regenerates the diagram and
fails on a difference, and the engine's model test fails on a transition that is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

from tickwheel.model.policies import Coalescing, Merged, PolicyRef
from tickwheel.model.values import SHARD_BITS

SEQUENCE_BITS = 12
ID_STEP = 1 << SHARD_BITS
"""Distance between two ids that one daemon assigns in a row."""
ID_EPOCH_MS = 1_735_689_600_000
"""2025-01-01T00:00:00Z: ids count milliseconds from here, so that 41 bits last until 2094."""
ID_MAX = 2**63 - 1
MOMENT_MS_MAX = ID_EPOCH_MS + (1 << (63 - SHARD_BITS - SEQUENCE_BITS)) - 1
"""2094-09-07: the last moment that an id can say, and the last that a schedule, or the start of a
group, may name."""
DEFAULT_GROUP = "default"
TOPIC_ITSELF = ""
BY_DUE_ALONE = ID_MAX
"""``GroupRow.since_id`` of a group whose start, a due time, lies in the future."""

ATTEMPT_MAX = 2**31 - 1
"""Deliveries of one task to one group. Nobody comes near it, and every store and file can hold
it: a receipt above it was never given out."""

PropertyValue = str | int | float | bool


class Replayed(NamedTuple):
    """The former task that a replayed one stands for, after a reset (``engine/groups.py``)."""

    id: int
    """The id of the task that the group had before, or missed."""
    group: str
    """The only group that is owed the replayed task."""
    key: str | None = None
    """The key of the former task. As ``TaskOptions.key`` it would be pending for all groups."""


class TaskOptions(NamedTuple):
    """The rare options of a task; ``TaskRow.extras`` is None when all of them are absent."""

    key: str | None = None
    tag: str | None = None
    properties: dict[str, PropertyValue] | None = None
    priority: int = 0
    ttl_ms: int | None = None
    retry: PolicyRef | None = None
    """The task's own retry policy; it wins over those of its group and topic."""
    order_id: int | None = None
    """The task's place in the order when that is not its id: see ``ownership.py``."""
    within_ms: int | None = None
    """The length of the due window, from ``asked_ms``; a moment in it was chosen."""
    asked_ms: int | None = None
    order_key: str | None = None
    """A group hands out the tasks of one key one at a time, in their order."""
    replayed: Replayed | None = None
    trace: str | None = None
    """The W3C traceparent of whoever made the task."""
    encoding: str | None = None
    """What the body is, and what was done to it; None: plain bytes."""
    shard_by: str | None = None
    """What says in which of several shards the task is, instead of its keys."""


class Columns(NamedTuple):
    """The options of some tasks, each as a tuple with as many values as there are tasks."""

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
    """The options of at least one task as columns; each task must have options. This takes less
    time than reading one option of each, and C looks at a column."""
    return Columns._make(zip(*options, strict=True))


def is_absent(column: Sequence[object]) -> bool:
    """Whether no task has this option."""
    return column[0] is None and column.count(None) == len(column)


_KEY_ALONE = TaskOptions()[1:]


def is_key_alone(options: TaskOptions) -> bool:
    """Whether the options are a key and nothing else."""
    return options[0] is not None and options[1:] == _KEY_ALONE


def keys_alone(many: Collection[TaskOptions | None]) -> tuple[str, ...] | None:
    """The keys of tasks that have a key and no other option; None: some tasks are not so. It takes
    a third of the time of ``is_key_alone`` for each."""
    if not many or not all(many):
        return None
    keys, *others = zip(*many, strict=True)
    count = len(keys)
    for column, default in zip(others, _KEY_ALONE, strict=True):
        if column.count(default) != count:
            return None
    return None if None in keys else keys


NewTask = tuple[str, int, bytes, TaskOptions | None]
"""(topic, due_ms, body, extras) of a task that has no id yet; due_ms is not in the past."""


class _NoBody(bytes):
    """The marker of an absent body: empty, and told from an empty body by identity."""


NO_BODY: Final[bytes] = _NoBody()
"""Stands in a row for a body that was not read; the store has it, and keeps it."""


class TaskRow(NamedTuple):
    """One task as it is stored: in the StoreQueue until its last group is done with it."""

    id: int
    due_ms: int
    topic: str
    body: bytes
    options: TaskOptions | None = None

    @property
    def enqueued_ms(self) -> int:
        return id_time_ms(self.id)


EXTRAS_BYTES = 64
"""Bytes of the names and headers of all options, in a frame."""
PROPERTY_BYTES = 8
"""Bytes of the headers of a property's name and value."""
WINDOW_BYTES = 40
"""Bytes of the names and numbers of a due window."""
ORDER_KEY_BYTES = 16
"""Bytes of the name and headers of an order key."""
TRACE_BYTES = 64
"""Bytes of a traceparent, with its name and headers."""
ENCODING_BYTES = 12
"""Bytes of the name and headers of an encoding."""
SHARD_BY_BYTES = 12
"""Bytes of the name and headers of ``shard_by``."""
REPLAY_BYTES = 48
"""Bytes of the names and numbers of ``Replayed``."""
NUMBER_BYTES = 9
"""Bytes of the longest number of msgpack."""


def size_of(body: bytes, options: TaskOptions | None) -> int:
    """The bytes that a task counts everywhere: at least those that it takes in a frame."""
    return len(body) if options is None else len(body) + options_bytes(options)


def task_bytes(row: TaskRow) -> int:
    """``size_of`` the task in a row."""
    return len(row[3]) if row[4] is None else len(row[3]) + options_bytes(row[4])


def order_of(row: TaskRow) -> int:
    """The task's place in the order of ids."""
    if row.options is None or row.options.order_id is None:
        return row.id
    return row.options.order_id


def options_bytes(options: TaskOptions) -> int:
    """The bytes that options take in a frame, at least."""
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
    """``options_bytes`` of all of ``options`` together; ``columns`` are made of them."""
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
            texts = [one for one in column if one is not None]
            size += head_bytes * len(texts) + text_bytes("".join(texts))
    return size


def keys_bytes(keys: Collection[str]) -> int:
    """``options_bytes``, together, of tasks that have these keys alone. Raises UnicodeEncodeError
    for what UTF-8 cannot say: who has counted keys knows that they can be stored."""
    joined = "".join(keys)
    count = len(joined) if joined.isascii() else len(joined.encode())
    return EXTRAS_BYTES * len(keys) + count


def text_bytes(text: str) -> int:
    """The bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


class ProgressState(IntEnum):
    """Where one group stands with one task; a missing row means: not delivered yet."""

    IN_FLIGHT = 1
    """Delivered; ``at_ms`` is when the lease ends."""
    WAITING = 2
    """Failed; ``at_ms`` is when the next attempt is due."""
    RELEASED = 3
    """Given back (lease over, connection lost, released): ready again."""
    DONE = 4
    """Acked by this group, or deleted from its dead letters (epoch 0), while other groups still owe
    an end."""
    HELD = 5
    """The order key is held since ``at_ms``, until an operator acts."""
    EXPIRED = 6
    """The time to live was over in this group while other groups still owe an end."""
    REPLACED = 7
    """The task gave way, in this group, to a newer one with its key."""

    @property
    def is_over(self) -> bool:
        """Whether the group has nothing more to do with the task."""
        return self in _OVER


_OVER = (ProgressState.DONE, ProgressState.EXPIRED, ProgressState.REPLACED)


CONSUMER_DIED = "consumer_died"
"""How the reason begins when a delivery ended because its consumer died."""


class Failure(NamedTuple):
    """Why one delivery did not end in an ack."""

    attempt: int
    at_ms: int
    reason: str
    """Why, in the first line. Behind it, for the failure that made a dead letter: the trace."""
    subscriber: str = ""
    """The consumer, as it calls itself, and its address; empty: not known."""

    @property
    def summary(self) -> str:
        return self.reason.partition("\n")[0]

    @property
    def trace(self) -> str:
        return self.reason.partition("\n")[2]

    @property
    def is_death(self) -> bool:
        """Whether the consumer died, which is not the task's failure."""
        return self.reason.startswith(CONSUMER_DIED)

    def brief(self) -> Failure:
        """The failure without its trace."""
        return self._replace(reason=self.summary) if "\n" in self.reason else self


class Past(NamedTuple):
    """What counts of the earlier deliveries of a task to a group, since its enqueue or requeue."""

    failures: tuple[Failure, ...] = ()
    """The newest failures, oldest first, at most ``FAILURES_MAX``."""
    failed: int = 0
    """How many deliveries have failed."""
    snoozes: int = 0
    """How often the group's consumers have postponed the task."""
    deaths: int = 0
    """How many consumers have died while they had the task."""
    replaced_by: int = 0
    """The newer task to which this one gives way when its delivery ends without an ack; 0: none."""

    def with_failure(self, failure: Failure) -> Past:
        """The past with one more failure, or one more death of a consumer."""
        failures = (*self.failures, failure)[-FAILURES_MAX:]
        if failure.is_death:
            return self._replace(failures=failures, deaths=self.deaths + 1)
        return self._replace(failures=failures, failed=self.failed + 1)


NO_PAST = Past()


class ProgressRow(NamedTuple):
    """A PrepareQueue entry: one group's progress with one task."""

    id: int
    group: str
    state: ProgressState
    attempt: int
    """The number of deliveries so far, counted ones and others; 1 at the first."""
    at_ms: int
    epoch: int = 0
    """The epoch of the newest delivery: with ``attempt`` it makes the current receipt."""
    failures: tuple[Failure, ...] = ()
    """The newest failures; this and the following fields are those of ``Past``."""
    failed: int = 0
    snoozes: int = 0
    deaths: int = 0
    replaced_by: int = 0

    @property
    def is_acked(self) -> bool:
        """Whether the group has acked the task, while other groups still owe an end."""
        return self.state is ProgressState.DONE and self.epoch > 0

    @property
    def outcome(self) -> Outcome:
        """How the group's share has ended, when its state is over."""
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
"""Characters of the first line of a failure's reason."""
TRACE_LENGTH_MAX = 4_000
"""Characters that are kept of the end of a failure's trace, unless ``failure_trace_length_max``
says otherwise."""
TRACES_LENGTH_MAX = 16 * 1024 * 1024
"""Characters of all traces that wait for the store; beyond, failures are kept without traces."""
SUBSCRIBER_LENGTH_MAX = 100


class DeadRow(NamedTuple):
    """A dead letter: a task that one group gave up on. The body stays in its ``TaskRow``."""

    id: int
    group: str
    topic: str
    died_ms: int
    attempt: int
    reason: str
    failures: tuple[Failure, ...] = ()
    failed: int = 0
    """How many deliveries have failed, as in ``Past``."""
    behind_id: int = 0
    """The newest id when the task died: an order that never goes back."""
    deaths: int = 0
    """How many consumers have died with the task, as in ``Past``."""


class FormerFilter(NamedTuple):
    """A filter that a group had before a change: it judges what had come due by then."""

    tags: str | None
    where: str | None
    due_ms: int
    """The filter judges tasks that are due by this time,"""
    id: int
    """and whose place in the order is not behind this id."""


FORMER_FILTERS_MAX = 16
"""Former filters of one group: how often the filter may change while older tasks wait."""
FILTERS_LENGTH_MAX = 4 * 1024 * 1024
"""Characters of all filters of all groups, former ones included; one read takes about 60 bytes."""


ORDER_RETRY_MS = 1_000
ORDER_ATTEMPTS = 16
"""Failed attempts of a task with an order key, where the group does not say how many."""
ORDER_DEAD = "dead"
"""The task becomes a dead letter, and the key goes on."""
ORDER_HOLD = "hold"
"""The key is held until an operator acts."""
ORDER_RETRY = "retry"
"""The task is tried again until it succeeds."""
ORDER_FAILURES = (ORDER_DEAD, ORDER_HOLD, ORDER_RETRY)
FAIR_BY_KEY = "key"
FAIR_BY_TAG = "tag"


class OrderSettings(NamedTuple):
    """What a group does with a failed task that has an order key; None: see ``OrderRules``."""

    retry_ms: int | None = None
    """Wait this long after a failure before the next attempt."""
    attempts: int | None = None
    """Attempts that may fail before ``failure`` applies."""
    failure: str | None = None
    """One of ``ORDER_FAILURES``."""


class ShareSettings(NamedTuple):
    """How the values of a field share a group's deliveries."""

    fair_by: str | None = None
    """``FAIR_BY_KEY``, ``FAIR_BY_TAG``, or the name of a property; None: nothing is shared."""
    limit_each: int | None = None
    """Maximum deliveries in flight per value."""
    rate_each: float | None = None
    """Maximum deliveries a second per value."""


class GroupSettings(NamedTuple):
    """The settings of a group, or of a whole topic."""

    paused: bool = False
    rate: float | None = None
    """Deliveries a second at most; None: no limit."""
    burst: int | None = None
    """Deliveries at once after a pause; None: as many as in a second, at least 1."""
    retry: PolicyRef | None = None
    closed_ms: int | None = None
    """Set while the group is being deleted: all that it holds is due by then,"""
    closed_id: int = 0
    """and has an id up to this."""
    if_pending: Coalescing | None = None
    """Of a topic: the rule for tasks that have a key and no rule of their own."""
    broadcast_only: bool = False
    """Of a topic: it has no groups, and a task ends when it has come due and was broadcast."""
    tags: str | None = None
    """Of a group, its filter: ``model/filters.py``. Both None: it wants every task."""
    where: str | None = None
    former: tuple[FormerFilter, ...] = ()
    """The filters that judge what came due before the filter was changed, oldest first."""
    order: OrderSettings = OrderSettings()
    """Of a group."""
    shares: ShareSettings = ShareSettings()
    """Of a group."""
    paused_ms: int | None = None
    """Since when it is paused; None: it is not."""

    def flat(self) -> dict[str, Any]:
        """Return all settings by the names that clients use, those of the blocks included."""
        names = self._asdict()
        order, shares = names.pop("order"), names.pop("shares")
        return names | dict(zip(LINE_SETTINGS, (*order, *shares), strict=True))

    def replaced(self, flat: Mapping[str, Any]) -> GroupSettings:
        """Return a copy with some settings, by the names that clients use."""
        own = {name: value for name, value in flat.items() if name not in LINE_SETTINGS}
        order = {ORDER_SETTINGS[name]: flat[name] for name in ORDER_SETTINGS if name in flat}
        shares = {name: flat[name] for name in ShareSettings._fields if name in flat}
        return self._replace(
            **own, order=self.order._replace(**order), shares=self.shares._replace(**shares)
        )


ORDER_SETTINGS = {f"order_{name}": name for name in OrderSettings._fields}
"""Name that clients use → field of ``OrderSettings``."""
LINE_SETTINGS = (*ORDER_SETTINGS, *ShareSettings._fields)
"""The settings for order keys and fair shares, by the names that clients use."""


class OrderRules(NamedTuple):
    """What happens to a failed task with an order key: ``OrderSettings`` with its defaults."""

    retry_ms: int
    attempts: int | None
    """How many failed attempts are allowed; None: any number."""
    failure: str

    @classmethod
    def of(cls, settings: OrderSettings) -> OrderRules:
        """Return the rules of a group. By default no task waits for ever behind one that fails."""
        retry_ms, attempts = settings.retry_ms, settings.attempts
        failure = settings.failure or ORDER_HOLD
        if failure == ORDER_RETRY:
            attempts = None
        elif attempts is None:
            attempts = ORDER_ATTEMPTS
        return cls(ORDER_RETRY_MS if retry_ms is None else retry_ms, attempts, failure)


class GroupRow(NamedTuple):
    """A subscriber group of a topic, and where it begins: see ``ownership.py``.

    The row whose group is ``TOPIC_ITSELF`` is no group: it holds the settings of the topic.
    """

    topic: str
    group: str
    since_ms: int
    """The group is owed what is due at this time or later,"""
    settings: GroupSettings | None = None
    """The settings of the group; None: nothing was ever set."""
    since_id: int = BY_DUE_ALONE
    """and what was enqueued after this id."""
    version: int = 0
    """The number of the last change of the settings at their home, as far as it is known here; 0:
    there is only one shard, or their home has not numbered them."""

    @property
    def is_closed(self) -> bool:
        """Whether the group, or the topic, is being deleted."""
        return self.settings is not None and self.settings.closed_ms is not None

    @property
    def name(self) -> str:
        return self.group


class SettingsCounter(NamedTuple):
    """How many changes of settings a shard has numbered, of the topics whose home it is: groups
    made, set and deleted, and settings of topics. Where nothing was numbered there is no row."""

    number: int = 0
    sure: int | None = None
    """Set by a shard that has not read all others since a start: what it had numbered before. If it
    was set back to an older state, others know numbers above that, which are given again now."""


class TaskSnapshot(NamedTuple):
    """Everything that is recorded of one task now."""

    row: TaskRow
    progress: Mapping[str, ProgressRow]
    dead: Mapping[str, DeadRow]


SessionKey = tuple[bytes, int]
"""(session, first request of a row)"""


class OncePart(NamedTuple):
    """What one of the shards that there were has answered to a request."""

    shard: int
    first_id: int
    tasks: int
    accepted_ms: int
    merged: Merged = ()
    """What became of each task, where they had rules."""


class Once(NamedTuple):
    """What a session remembers of a request with an idempotency key, beside its answer."""

    key: bytes = b""
    """What names the home of the request; b"": the session is a producer's."""
    shards: int = 0
    """How many shards there were when it was answered, if there are others now; else 0."""
    parts: tuple[OncePart, ...] = ()
    """Then the answers of all of them, each to the tasks that had their home in it."""


NOT_ONCE: Final = Once()


class SessionRow(NamedTuple):
    """What one batch has answered a producer session, for resends after a lost reply. A session
    has as many of these as are needed for its requests at or above its floor.

    ``answers`` holds for each request, ascending: (request, first id, number of ids, accepted_ms).
    """

    session: bytes
    floor: int
    """The floor of the session when the row was written; the highest one counts."""
    seen_ms: int
    answers: tuple[tuple[int, int, int, int], ...]
    merged: tuple[tuple[int, Merged], ...] = ()
    """(request, what became of each task) of the answered requests that had rules."""
    once: Once = NOT_ONCE

    @property
    def key(self) -> SessionKey:
        return self.session, self.answers[0][0] if self.answers else 0


class Outcome(IntEnum):
    """How a task ended; kept for a bounded number of tasks after they are gone."""

    ACKED = 1
    CANCELLED = 2
    EXPIRED = 3
    DELETED = 4
    """Deleted from the dead letters by an operator."""
    FILTERED = 5
    """No group's filter let the task pass."""


def id_time_ms(task_id: int) -> int:
    """The wall-clock millisecond in which an id was assigned (to within a burst)."""
    return (task_id >> (SHARD_BITS + SEQUENCE_BITS)) + ID_EPOCH_MS


def id_floor(now_ms: int, shard: int) -> int:
    """The lowest id that may be assigned at ``now_ms`` by ``shard``."""
    return ((now_ms - ID_EPOCH_MS) << (SHARD_BITS + SEQUENCE_BITS)) | shard


class State(StrEnum):
    """Where a task stands for a group; the values are what LOOKUP answers."""

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
    """What can happen to a task in a group."""

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
"""A task in flight that a newer one with its key has replaced is CANCELLED when its delivery ends
without an ack. An ack of a task that is READY or WAITING carries an earlier, genuine receipt; of
one that is SCHEDULED, a receipt from before a crash that forgot the delivery. A plain reschedule of
a task that is WAITING finds one without an attempt, which waits because the clock went back. A
cancel takes dead letters with it when another group still waits for the task. A crash goes back to
the last state that is recorded. What waited for the first group of its topic is judged by that
group's filter when its turn has come.
"""


def diagram() -> str:
    """The table of transitions as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> staged: enqueue"]
    lines += [f"    {a} --> {b}: {event}" for (a, event), b in TRANSITIONS.items()]
    finals = sorted(set(TRANSITIONS.values()) - {a for a, _ in TRANSITIONS})
    lines += [f"    {state} --> [*]" for state in finals]
    return "\n".join(lines) + "\n"
