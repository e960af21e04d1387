"""What a task is, as values: the vocabulary that engine, store and wire share.

Pure data. Times are integer milliseconds of the wall clock (Unix) and say so in their names.
A ``TaskRow`` never changes while it is pending except by reschedule, which replaces it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from tickwheel.model.coalescing import Coalescing, Merged
from tickwheel.model.retry import PolicyRef

SHARD_BITS = 10
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
    """What a task stands for that a group is given again, by a reset (``engine/resets.py``)."""

    id: int
    """Of the task that the group had before, or missed."""
    group: str
    """Nobody else is owed it."""
    key: str | None = None
    """The original's. As ``TaskOptions.key`` it would be pending for all groups."""


class TaskOptions(NamedTuple):
    """What most tasks do not have; ``TaskRow.extras`` is None when all of it is absent."""

    key: str | None = None
    tag: str | None = None
    properties: dict[str, PropertyValue] | None = None
    priority: int = 0
    ttl_ms: int | None = None
    retry: PolicyRef | None = None
    """The task's own retry policy; it wins over those of its group and topic."""
    order_id: int | None = None
    """Its place in the order when that is not its own id: see ``ownership.py``."""
    within_ms: int | None = None
    """Any moment from ``asked_ms`` to so much later would do; one was chosen."""
    asked_ms: int | None = None
    order_key: str | None = None
    """A group hands out the tasks of one key one at a time, in their order."""
    replayed: Replayed | None = None


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


def columns_of(options: Collection[TaskOptions | None]) -> Columns:
    """Of tasks of which each has options, at least one. It takes less time than reading one option
    of each, and C looks at a column."""
    return Columns._make(zip(*options, strict=True))


def is_absent(column: Sequence[object]) -> bool:
    """None of the tasks has this option, which is None where it is not given."""
    return column[0] is None and column.count(None) == len(column)


_KEY_ALONE = TaskOptions()[1:]


def is_key_alone(options: TaskOptions) -> bool:
    """It has a key, and no other option."""
    return options[0] is not None and options[1:] == _KEY_ALONE


def keys_alone(many: Collection[TaskOptions | None]) -> tuple[str, ...] | None:
    """The keys of tasks of which each has a key, and none has another option; None: some are not
    so. For all of them it takes a third of the time of ``is_key_alone`` for each."""
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
    """Empty, and told from an empty body by identity."""


NO_BODY: Final[bytes] = _NoBody()
"""Stands in a row for a body that was not read. The store has it, and keeps it."""


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
"""Names and headers of all that ``TaskOptions`` can have, as a frame has them."""
PROPERTY_BYTES = 8
"""Headers of a property's name and of its value."""
WINDOW_BYTES = 40
"""Names and numbers of a window."""
ORDER_KEY_BYTES = 16
"""Its name and headers."""
REPLAY_BYTES = 48
"""Names and numbers of what a task stands for."""
NUMBER_BYTES = 9
"""The longest number of msgpack."""


def size_of(body: bytes, options: TaskOptions | None) -> int:
    """What a task counts wherever bytes are counted: at least what it takes in a frame."""
    return len(body) if options is None else len(body) + options_bytes(options)


def task_bytes(row: TaskRow) -> int:
    """``size_of`` a row."""
    return len(row[3]) if row[4] is None else len(row[3]) + options_bytes(row[4])


def options_bytes(options: TaskOptions) -> int:
    """At least what the extras take in a frame."""
    key, tag, properties, _, _, retry, _, within_ms, _, order_key, replayed = options
    size = EXTRAS_BYTES
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
    """``options_bytes`` of all of them together; ``columns`` are theirs."""
    rare = (columns.key, columns.properties, columns.retry, columns.within_ms, columns.replayed)
    if not all(map(is_absent, rare)):
        return sum(map(options_bytes, options))
    size = EXTRAS_BYTES * len(options)
    for column, head_bytes in ((columns.tag, 0), (columns.order_key, ORDER_KEY_BYTES)):
        if not is_absent(column):
            texts = [one for one in column if one is not None]
            size += head_bytes * len(texts) + text_bytes("".join(texts))
    return size


def keys_bytes(keys: Collection[str]) -> int:
    """``options_bytes`` of tasks that have these keys alone, together. Raises UnicodeEncodeError
    for what UTF-8 cannot say: who has counted keys knows that they can be stored."""
    joined = "".join(keys)
    count = len(joined) if joined.isascii() else len(joined.encode())
    return EXTRAS_BYTES * len(keys) + count


def text_bytes(text: str) -> int:
    """In UTF-8."""
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
    """Acked by this group, or let go by it, while other groups still owe an end."""
    HELD = 5
    """Its order key is held: an operator has to act. ``at_ms`` is since when."""
    EXPIRED = 6
    """Its time to live was over in this group while other groups still owe an end."""

    @property
    def is_over(self) -> bool:
        """The group has nothing more to do with the task."""
        return self in (ProgressState.DONE, ProgressState.EXPIRED)


CONSUMER_DIED = "consumer_died"
"""How the reason of such an end begins."""


class Failure(NamedTuple):
    """Why one delivery did not end in an ack."""

    attempt: int
    at_ms: int
    reason: str
    """Its first line says why. Behind it, of the failure that made a dead letter: its trace, how
    the consumer came there."""
    subscriber: str = ""
    """Who had it, as the consumer calls itself, and its address; empty when not known."""

    @property
    def summary(self) -> str:
        return self.reason.partition("\n")[0]

    @property
    def trace(self) -> str:
        return self.reason.partition("\n")[2]

    @property
    def is_death(self) -> bool:
        """Its consumer died, which is not the task's failure."""
        return self.reason.startswith(CONSUMER_DIED)

    def brief(self) -> Failure:
        """Without its trace."""
        return self._replace(reason=self.summary) if "\n" in self.reason else self


class Past(NamedTuple):
    """What counts of the earlier deliveries of a task to a group, since it was enqueued, or since
    an operator said that it begins anew."""

    failures: tuple[Failure, ...] = ()
    """The newest failures, oldest first, at most ``FAILURES_MAX``."""
    failed: int = 0
    """How many deliveries have failed."""
    snoozes: int = 0
    """How often the group's consumers have postponed it."""
    deaths: int = 0
    """How many consumers have died while they had it."""

    def with_failure(self, failure: Failure) -> Past:
        """And one more has failed, or has had its consumer die."""
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
    """Deliveries so far, 1 at the first: those that failed, and those that did not count."""
    at_ms: int
    epoch: int = 0
    """Epoch of the newest delivery: with ``attempt`` it makes the current receipt."""
    failures: tuple[Failure, ...] = ()
    """From here on as in ``Past``."""
    failed: int = 0
    snoozes: int = 0
    deaths: int = 0

    @property
    def past(self) -> Past:
        return Past(self.failures, self.failed, self.snoozes, self.deaths)


FAILURES_MAX = 16
REASON_LENGTH_MAX = 200
"""Of its first line."""
TRACE_LENGTH_MAX = 4_000
"""Characters of a failure's trace that are kept, its end, unless ``failure_trace_length_max``
says otherwise."""
TRACES_LENGTH_MAX = 16 * 1024 * 1024
"""Of all traces that wait for the store; what fails beyond is kept without."""
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
    """As in ``Past``."""
    behind_id: int = 0
    """It died behind this id, the newest that was taken then: an order that never goes back."""
    deaths: int = 0
    """As in ``Past``."""


class FormerFilter(NamedTuple):
    """A filter that a group had until it was changed: it judges what had come due by then."""

    tags: str | None
    where: str | None
    due_ms: int
    """Those are the tasks that are due by then,"""
    id: int
    """and whose place in the order was not behind this one."""


FORMER_FILTERS_MAX = 16
"""Of one group: as often its filter may be changed while what came due before is not over."""
FILTERS_LENGTH_MAX = 4 * 1024 * 1024
"""Characters of the filters of all groups, former ones among them; read, one is about 60 bytes."""


ORDER_RETRY_MS = 1_000
ORDER_RETRY_MS_MIN = 10
ORDER_RETRY_MS_MAX = 30_000
ORDER_ATTEMPTS = 16
"""Failed ones, of a group that does not say how many."""
ORDER_ATTEMPTS_MAX = 1_000_000
ORDER_DEAD = "dead"
"""It goes to the dead letters, and its key goes on."""
ORDER_HOLD = "hold"
"""Its key is held until an operator acts."""
ORDER_RETRY = "retry"
"""It is tried until it succeeds, however often that is."""
ORDER_FAILURES = (ORDER_DEAD, ORDER_HOLD, ORDER_RETRY)
FAIR_BY_KEY = "key"
FAIR_BY_TAG = "tag"
FAIR_BY_LENGTH_MAX = 255
"""Characters, as many as a property's name may have."""
LIMIT_EACH_MAX = 1_000_000


class GroupSettings(NamedTuple):
    """What an operator or a subscriber has set for a group, or for a whole topic."""

    paused: bool = False
    rate: float | None = None
    """Deliveries a second at most; None: no limit."""
    burst: int | None = None
    """Deliveries at once after a pause; None: as many as in a second, at least 1."""
    retry: PolicyRef | None = None
    closed_ms: int | None = None
    """The group is being deleted: everything that it holds is due by then,"""
    closed_id: int = 0
    """and was enqueued by then."""
    if_pending: Coalescing | None = None
    """Of a topic: the rule of tasks that have a key and none of their own."""
    broadcast_only: bool = False
    """Of a topic: it has no groups, and a task ends when it has come due and was broadcast."""
    tags: str | None = None
    """Of a group, its filter: ``model/filters/``. Both None: it wants every task."""
    where: str | None = None
    former: tuple[FormerFilter, ...] = ()
    """Those that judge what came due before the filter was changed, oldest first."""
    order_retry_ms: int | None = None
    """Of a group, as all that follows: after so long a failed task of an order key is tried again.
    What holds where these three are None says ``OrderRules``."""
    order_attempts: int | None = None
    """After so many failed attempts of such a task comes"""
    order_failure: str | None = None
    """what is one of ``ORDER_FAILURES``."""
    fair_by: str | None = None
    """What its shares are by: ``FAIR_BY_KEY``, ``FAIR_BY_TAG``, or the name of a property."""
    limit_each: int | None = None
    """So many deliveries of one value of it may be in flight."""
    rate_each: float | None = None
    """Deliveries a second of one value of it at most."""


class OrderRules(NamedTuple):
    """What holds for a task with an order key that fails, by the settings of its group."""

    retry_ms: int
    attempts: int | None
    """None: there is no end."""
    failure: str

    @classmethod
    def of(cls, settings: GroupSettings) -> OrderRules:
        """Nobody waits for ever behind a task that always fails, unless the group says so."""
        retry_ms, attempts = settings.order_retry_ms, settings.order_attempts
        failure = settings.order_failure or ORDER_HOLD
        if failure == ORDER_RETRY:
            attempts = None
        elif attempts is None:
            attempts = ORDER_ATTEMPTS
        return cls(ORDER_RETRY_MS if retry_ms is None else retry_ms, attempts, failure)


LINES_FROM = GroupSettings._fields.index("order_retry_ms")
LINE_SETTINGS = GroupSettings._fields[LINES_FROM:]
"""What a group says of order keys and fair shares: the last fields."""
ORDER_SETTINGS = ("order_retry_ms", "order_attempts", "order_failure")
"""Those of them that are about order keys; what holds is an ``OrderRules``."""


class GroupRow(NamedTuple):
    """A subscriber group of a topic, and where it begins: see ``ownership.py``.

    The row whose group is ``TOPIC_ITSELF`` is no group: it holds the settings of the topic.
    """

    topic: str
    group: str
    since_ms: int
    """It is owed what is due at this time or later,"""
    settings: GroupSettings | None = None
    """None when nothing was ever set."""
    since_id: int = BY_DUE_ALONE
    """and what was enqueued after this id."""

    @property
    def name(self) -> str:
        return self.group


class TaskSnapshot(NamedTuple):
    """What is recorded of one task now."""

    row: TaskRow
    progress: Mapping[str, ProgressRow]
    dead: Mapping[str, DeadRow]


class SessionRow(NamedTuple):
    """What one batch has answered a producer session, for resends after a lost reply. A session
    has as many of these as are needed for its requests at or above its floor.

    ``answers`` holds for each request, ascending: (request, first id, number of ids, accepted_ms).
    """

    session: bytes
    floor: int
    """Of the session when the row was written; it never falls, so the highest one counts."""
    seen_ms: int
    answers: tuple[tuple[int, int, int, int], ...]
    merged: tuple[tuple[int, Merged], ...] = ()
    """(request, what became of each task) of those requests among them that had rules."""

    @property
    def key(self) -> tuple[bytes, int]:
        """The session, and the first of the requests."""
        return self.session, self.answers[0][0] if self.answers else 0


class Outcome(IntEnum):
    """How a task left; kept for a bounded number of tasks after they are gone."""

    ACKED = 1
    CANCELLED = 2
    EXPIRED = 3
    DELETED = 4
    """Deleted from the dead letters by an operator."""
    FILTERED = 5
    """Every group's filter left it out."""


def id_time_ms(task_id: int) -> int:
    """The wall-clock millisecond in which an id was assigned (to within a burst)."""
    return (task_id >> (SHARD_BITS + SEQUENCE_BITS)) + ID_EPOCH_MS


def id_floor(now_ms: int, shard: int) -> int:
    """The lowest id that may be assigned at ``now_ms`` by ``shard``."""
    return ((now_ms - ID_EPOCH_MS) << (SHARD_BITS + SEQUENCE_BITS)) | shard
