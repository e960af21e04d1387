"""The kinds of records that a store keeps by key: the values of schedules, transactions, bulk
operations and others, the declaration of each kind (``Kind``), and the changes of a batch
(``Effects``). Pure data, independent of how and when a store writes.

A schedule creates a task for each occurrence; the time of the occurrence is its *planned time*.
``engine/timetables.py`` computes planned times, and ``engine/schedules.py`` decides what happens at
each.

A half task of a transaction is stored, but is not yet a task: the wheel, the groups and the indexes
do not know it. The commit of its transaction turns it into a task, whose id is assigned at the
commit. So ids still order tasks by the time of their creation.

A bulk operation has a *moment* and ignores tasks that were enqueued, or died, after it. Each step
commits its changes and its progress together, so that an interrupted bulk operation continues
without repeating a change. ``engine/tasks.py`` and ``server/shard/bulk.py`` define the kinds of
bulk operations; ``Bulk.arguments`` holds their arguments.

To add a kind of record, add a ``Kind`` to ``KINDS``. Batches then carry its rows, and every store
writes, reads, copies and checks them without knowing the kind. Tasks, progress, dead letters and
outcomes are stored separately, for speed. A row is stored as the plain values of its fields, in
order; rare fields at the end are left out while they have their defaults (``shortened``).
``persistence/codec.py`` encodes the values as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from tickwheel.model.policies import Coalescing, Merged, Merging, of_stored_fields, stored_fields
from tickwheel.model.records import (
    NOT_ONCE,
    DeadRow,
    FormerFilter,
    GroupRow,
    GroupSettings,
    NewTask,
    Once,
    OncePart,
    Outcome,
    ProgressRow,
    Replayed,
    SessionRow,
    SettingsCounter,
    TaskOptions,
    TaskRow,
    size_of,
)

RECENT_MAX = 20
"""Maximum runs that a schedule remembers."""
NAME_PROPERTY = "tickwheel.schedule"
"""The property of a schedule's task that contains the schedule's name."""
PLANNED_PROPERTY = "tickwheel.planned_ms"
"""The property of a schedule's task that contains its planned time."""
OWN_PROPERTIES = 2

FIRED, MISSED, OVERLAPPED, RUN = "fired", "missed", "overlap", "run"
QUEUED, BACKFILLED = "queued", "backfill"
"""Outcomes that occur only in events. A schedule does not remember them as runs."""


class Schedule(NamedTuple):
    """The definition of a schedule."""

    name: str
    topic: str
    body: bytes
    options: TaskOptions | None
    """The options of its tasks, without the two properties that each occurrence adds."""
    cron: str | None
    timezone: str
    """The IANA name of the time zone of ``cron``."""
    every_ms: int | None
    """The interval, instead of ``cron``. Planned times are ``anchor_ms + n * every_ms``."""
    anchor_ms: int
    jitter_ms: int = 0
    """Maximum delay of a task after its planned time. The delay of an occurrence is constant."""
    start_ms: int | None = None
    """Earliest planned time."""
    end_ms: int | None = None
    """Latest planned time."""
    runs_max: int | None = None
    """Maximum number of runs."""
    gap: str = "after"
    fold: str = "first"
    catch_up: str = "last"
    catch_up_ms: int = 86_400_000
    """Maximum age at which missed occurrences still run."""
    overlap: str = "allow"


class Run(NamedTuple):
    """The outcome of an occurrence, or of several that were missed together."""

    planned_ms: int
    """The planned time of the occurrence, or of the newest occurrence."""
    at_ms: int
    """The time at which the outcome was decided."""
    outcome: str
    """FIRED, MISSED, OVERLAPPED, or RUN (on demand)."""
    id: int = 0
    """The id of the task, or 0 if the run has no task."""
    occurrences: int = 1


class ScheduleRow(NamedTuple):
    """A schedule and its progress."""

    schedule: Schedule
    paused: bool = False
    next_ms: int | None = None
    """The first planned time that has not been decided; None if there are no more."""
    runs: int = 0
    """Number of occurrences that have fired."""
    last_id: int = 0
    """The id of the task of the newest run."""
    queued_ms: int | None = None
    """The planned time of the occurrence that waits until that task has ended; None if none
    waits."""
    recent: tuple[Run, ...] = ()
    """The newest runs, oldest first, at most ``RECENT_MAX``."""


# --- transactions --------------------------------------------------------------------------------

HEADER_PART = 0
"""The part of the ``TransactionKey`` of a ``TransactionRow``."""
PART_MAX = 2**31 - 1

TransactionKey = tuple[str, int]
"""(transaction, part); part 0 is the ``TransactionRow``, and others are ``Halves``."""


class TransactionState(IntEnum):
    """The state of a transaction. The last two states are final."""

    OPEN = 1
    """The producer decides, or a member of its producer group that is asked."""
    PARKED = 2
    """The producer group is no longer asked; an operator or a producer can still decide."""
    COMMITTED = 3
    ROLLED_BACK = 4

    @property
    def is_decided(self) -> bool:
        return self >= TransactionState.COMMITTED


class Reach(IntEnum):
    """Which member of the producer group a question about a transaction has reached."""

    NOBODY = 0
    ANOTHER = 1
    """A member that may decide but did not prepare the transaction."""
    OWN = 2
    """The owner: the connection that prepared the transaction, or a successor with its name."""


class Half(NamedTuple):
    topic: str
    due_ms: int
    """The due time if ``delay_ms`` is None."""
    delay_ms: int | None
    """The time from the commit to the due time, or None."""
    body: bytes
    options: TaskOptions | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.body, self.options)

    def task(self, now_ms: int) -> NewTask:
        """Return the task that the half task becomes at a commit at ``now_ms``."""
        due_ms = self.due_ms if self.delay_ms is None else now_ms + self.delay_ms
        options = self.options
        if options is not None and options.within_ms is not None:
            options = options._replace(asked_ms=due_ms)
        return self.topic, max(now_ms, due_ms), self.body, options


class Halves(NamedTuple):
    """The half tasks of one request."""

    transaction: str
    part: int
    """The producer's number for the request, counted from 1; a resend has the same number."""
    prepared_ms: int
    halves: tuple[Half, ...]


class TransactionRow(NamedTuple):
    """The state of a transaction."""

    id: str
    group: str
    """The producer group whose members decide about the transaction."""
    state: TransactionState
    began_ms: int
    touched_ms: int
    """The time at which the producer last acted on the transaction."""
    tasks: int = 0
    size_bytes: int = 0
    """The size of the half tasks in bytes. The decision drops them."""
    topics: tuple[str, ...] = ()
    checks: int = 0
    """Number of checks that were due."""
    asked: int = 0
    """Number of checks that reached a member, at once or when it connected."""
    checked_ms: int = 0
    """The time at which the newest check was due."""
    decided_ms: int = 0
    first_id: int = 0
    """The first id of the tasks of a committed transaction. Their other ids follow it."""
    owner: str = ""
    """The principal that began the transaction; "" without tokens."""
    reached: Reach = Reach.NOBODY
    """The highest ``Reach`` of the members that the last check has reached since it was due."""

    @property
    def waits_for_members(self) -> bool:
        """Whether a member with a higher ``Reach`` is asked when it connects, because the last
        check has not reached the owner."""
        is_missed = self.checks > 0 and self.reached < Reach.OWN
        return is_missed and not self.state.is_decided


def key_of(row: TransactionRow | Halves) -> TransactionKey:
    """Return the key of the row in a store."""
    return (row.transaction, row.part) if isinstance(row, Halves) else (row.id, HEADER_PART)


Argument = str | int | float | bool
Place = tuple[int, str]
"""The progress of a bulk operation: (id, "") for tasks, (id, group) for dead letters, and any pair
for other kinds. It never decreases."""
START: Place = (0, "")


# --- bulk operations -----------------------------------------------------------------------------

REFUSALS_MAX = 32
"""Maximum number of different refusal reasons that a bulk operation counts."""


class BulkState(IntEnum):
    """The state of a bulk operation. All states but the first are final."""

    RUNNING = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4
    """The bulk operation could not continue; ``BulkRow.note`` has the reason."""

    @property
    def is_over(self) -> bool:
        return self is not BulkState.RUNNING


class Selection(NamedTuple):
    """A selection of the tasks or dead letters of a topic that satisfy all fields that are set."""

    tags: str | None = None
    where: str | None = None
    """A condition; ``tags`` and ``where`` are in the language of filters (``model/filters.py``)."""
    key_prefix: str = ""
    due_from_ms: int | None = None
    """Earliest due time."""
    due_to_ms: int | None = None
    """End of the due times, exclusive."""
    state: str | None = None
    """The state of a task: scheduled, ready, in_flight, waiting or dead."""
    group: str | None = None
    """The group of the dead letters."""
    reason: str = ""
    """Text that the reason of a dead letter contains, ignoring case."""


class Bulk(NamedTuple):
    """The definition of a bulk operation."""

    id: str
    kind: str
    topic: str
    selection: Selection
    arguments: tuple[tuple[str, Argument], ...]
    """The arguments of the kind of bulk operation, by name."""
    rate: float | None
    """Maximum number of changes per second; None means as many as other work allows."""
    made_ms: int
    until_id: int
    """Highest id of the tasks that were enqueued before the operation. Dead letters from before the
    operation have a lower ``newest_id``."""
    by: str = ""
    """Who created the bulk operation."""

    def argument(self, name: str) -> Argument | None:
        return next((value for key, value in self.arguments if key == name), None)

    def is_same(self, other: Bulk) -> bool:
        """Return whether the other bulk operation is the same, apart from its time and creator."""
        return self[:6] == other[:6]


def at_once(kind: str, arguments: Mapping[str, Argument], now_ms: int) -> Bulk:
    """Return a bulk operation that is not stored, for a command on a few named tasks."""
    return Bulk("", kind, "", Selection(), tuple(arguments.items()), None, now_ms, 0)


class BulkRow(NamedTuple):
    """A bulk operation and its progress."""

    bulk: Bulk
    state: BulkState = BulkState.RUNNING
    place: Place = START
    """Every task or dead letter up to this place has been examined."""
    looked_at: int = 0
    matched: int = 0
    changed: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    """(reason, number of matching tasks or dead letters that were not changed)."""
    ended_ms: int = 0
    note: str = ""


Key = str | tuple[str | bytes | int, ...]
"""The key of a record among the records of its kind; all keys of a kind have the same type."""


# --- claims of names -----------------------------------------------------------------------------

SCHEDULE_NAMES, TRANSACTION_NAMES = "schedule", "transaction"


class ClaimRow(NamedTuple):
    """A name that is used in one shard while its home, shard crc32(name) mod N, is another. The
    home's row names the shard, to which later claims of the name are sent. For a schedule, that
    shard has a row with the same number. It also has a row for each ended claim, so that a late
    request cannot use the claim."""

    of: str
    """The kind of the named object: SCHEDULE_NAMES or TRANSACTION_NAMES."""
    name: str
    topic: str
    """The topic of the tasks for which the name was claimed."""
    shard: int
    """The shard that has, or is allowed to create, the named object."""
    number: int
    """The unique number of the claim."""
    at_ms: int
    """When the name was last claimed."""
    is_over: bool = False


# --- kinds ---------------------------------------------------------------------------------------

R = TypeVar("R")


def _no_half_task_sizes(row: object) -> Sequence[int]:
    return ()


@dataclass(frozen=True, eq=False, slots=True)
class Kind(Generic[R]):
    """A kind of record, with everything that a store needs to keep its rows."""

    number: int
    """The number of the kind in SQLite. It is never reused for another kind."""
    name: str
    """The name of the kind in Redis and in messages, without spaces."""
    key: Callable[[R], Any]
    """Returns the ``Key`` of a row."""
    fields: Callable[[R], Iterable[Any]]
    """Returns the plain values of a row in the newest version of the format, which the last
    function in ``builds`` reads."""
    builds: tuple[Callable[..., R], ...]
    """Functions that build a row from its values, one for each version of the format, from 1 on."""
    half_task_sizes: Callable[[R], Sequence[int]] = _no_half_task_sizes
    """Returns the bytes of each half task in a row. A full store refuses rows with half tasks."""


def shortened(fields: tuple[Any, ...], rare: tuple[object, ...]) -> tuple[Any, ...]:
    """Return the fields without trailing defaults. ``rare``: the defaults of the last fields."""
    always = len(fields) - len(rare)
    if fields[always:] == rare:
        return fields[:always]
    end = len(fields)
    while fields[end - 1] == rare[end - 1 - always]:
        end -= 1
    return fields[:end]


def defaults_from(row_type: type[Any], first: str) -> tuple[object, ...]:
    """Return the defaults of the fields of a named tuple, from ``first`` on."""
    names = row_type._fields
    return tuple(row_type._field_defaults[name] for name in names[names.index(first) :])


# --- the options of a task, of a half task and of a schedule's tasks --------------------------

_RARE_OPTIONS = defaults_from(TaskOptions, "order_id")
_OPTIONS = len(TaskOptions._fields)
_USUAL_OPTIONS = _OPTIONS - len(_RARE_OPTIONS)
assert set(_RARE_OPTIONS) == {None}, "see options_fields"


def options_fields(options: TaskOptions) -> tuple[Any, ...]:
    """Return the ``shortened`` fields of options. This is faster than ``shortened``, because the
    default of every rare option is None."""
    if options[_USUAL_OPTIONS:] == _RARE_OPTIONS:
        fields: tuple[Any, ...] = options[:_USUAL_OPTIONS]
    else:
        end = _OPTIONS
        while options[end - 1] is None:
            end -= 1
        fields = options[:end]
    if options.retry is None:
        return fields
    return (*fields[:5], stored_fields(options.retry), *fields[6:])


def options_of(*fields: Any) -> TaskOptions:
    """Return the options from their ``options_fields``. Raise TypeError if there are too few."""
    if len(fields) < _USUAL_OPTIONS:
        raise TypeError(f"a task's options must have at least {_USUAL_OPTIONS} fields")
    options = TaskOptions(*fields)
    if options.retry is not None:
        options = options._replace(retry=of_stored_fields(options.retry))
    if options.replayed is not None:
        options = options._replace(replayed=Replayed(*options.replayed))
    return options


def _fields_or_none(options: TaskOptions | None) -> tuple[Any, ...] | None:
    return None if options is None else options_fields(options)


def _options_or_none(fields: Iterable[Any] | None) -> TaskOptions | None:
    return None if fields is None else options_of(*fields)


# --- groups -----------------------------------------------------------------------------------

_NOTHING_SET = GroupSettings()
_SETTINGS = (
    "paused", "rate", "burst", "retry", "closed_ms", "closed_id", "if_pending", "broadcast_only",
    "tags", "where", "former", "order_retry_ms", "order_attempts", "order_failure", "fair_by",
    "limit_each", "rate_each", "paused_ms",
)  # fmt: skip
"""The settings in the order in which they are stored. Append new settings at the end."""
_USUAL_SETTINGS = _SETTINGS.index("if_pending")
_RARE_SETTINGS = tuple(_NOTHING_SET.flat()[name] for name in _SETTINGS[_USUAL_SETTINGS:])
assert set(_SETTINGS) == set(_NOTHING_SET.flat()), "each setting is stored"
_RARE_OF_GROUPS = defaults_from(GroupRow, "version")


def _group_fields(row: GroupRow) -> Iterable[Any]:
    settings: tuple[Any, ...] | None = None
    if row.settings is not None:
        named = row.settings.flat() | {"retry": stored_fields(row.settings.retry)}
        settings = shortened(tuple(named[name] for name in _SETTINGS), _RARE_SETTINGS)
    return shortened((*row[:3], settings, *row[4:]), _RARE_OF_GROUPS)


def _group(
    topic: str,
    group: str,
    since_ms: int,
    settings: Iterable[Any] | None,
    since_id: int,
    version: int = 0,
) -> GroupRow:
    decoded = None if settings is None else _settings(*settings)
    return GroupRow(topic, group, since_ms, decoded, since_id, version)


def _settings(*fields: Any) -> GroupSettings:
    if len(fields) < _USUAL_SETTINGS:
        raise TypeError(f"settings must have at least {_USUAL_SETTINGS} fields")
    if len(fields) > len(_SETTINGS):
        raise TypeError(f"settings must have at most {len(_SETTINGS)} fields")
    settings = _NOTHING_SET.replaced(dict(zip(_SETTINGS, fields, strict=False)))
    rule: Any = settings.if_pending
    return settings._replace(
        retry=of_stored_fields(settings.retry),
        if_pending=None if rule is None else Coalescing(*rule),
        former=tuple(FormerFilter(*fields) for fields in settings.former),
    )


GROUP: Kind[GroupRow] = Kind(
    1, "group", key=lambda row: (row.topic, row.group), fields=_group_fields, builds=(_group,)
)
"""A group, or the settings of a topic, by (topic, group)."""


# --- sessions ---------------------------------------------------------------------------------

_RARE_OF_SESSIONS = defaults_from(SessionRow, "merged")
_RARE_OF_PARTS = defaults_from(OncePart, "chosen")


def _session(
    session: bytes,
    floor: int,
    seen_ms: int,
    answers: Iterable[Any],
    merged: Iterable[Any] = (),
    once: Iterable[Any] = NOT_ONCE,
) -> SessionRow:
    key, shards, answered = once
    parts = [
        (*part[:4], _merged(part[4]), tuple(map(tuple, part[5] if len(part) > 5 else ())))
        for part in answered
    ]
    return SessionRow(
        session,
        floor,
        seen_ms,
        tuple((request, first, count, at_ms) for request, first, count, at_ms in answers),
        tuple((request, _merged(tasks)) for request, tasks in merged),
        Once(key, shards, tuple(map(OncePart._make, parts))),
    )


def _session_fields(row: SessionRow) -> Iterable[Any]:
    fields = shortened(row, _RARE_OF_SESSIONS)
    if row.once.parts:
        parts = [shortened(part, _RARE_OF_PARTS) for part in row.once.parts]
        fields = (*fields[:-1], (*row.once[:2], parts))
    return fields


def _merged(tasks: Iterable[Any]) -> Merged:
    return tuple((int(Merging(outcome)), task_id, due_ms) for outcome, task_id, due_ms in tasks)


SESSION: Kind[SessionRow] = Kind(
    2,
    "session",
    key=lambda row: row.key,
    fields=_session_fields,
    builds=(_session,),
)
"""The answers of one batch to a producer's session, by (session, first request of the row)."""


# --- schedules --------------------------------------------------------------------------------


def _schedule_fields(row: ScheduleRow) -> Iterable[Any]:
    schedule = row.schedule
    return ((*schedule[:3], _fields_or_none(schedule.options), *schedule[4:]), *row[1:])


def _schedule(schedule: Iterable[Any], *progress: Any) -> ScheduleRow:
    name, topic, body, options, *timing = schedule
    decoded = Schedule(name, topic, body, _options_or_none(options), *timing)
    row = ScheduleRow._make((decoded, *progress))
    return row._replace(recent=tuple(Run(*run) for run in row.recent))


SCHEDULE: Kind[ScheduleRow] = Kind(
    3,
    "schedule",
    key=lambda row: row.schedule.name,
    fields=_schedule_fields,
    builds=(_schedule,),
)
"""A recurring schedule and its progress, by name. The batch that writes a run also contains its
task."""


# --- transactions -----------------------------------------------------------------------------


def _transaction_fields(row: TransactionRow | Halves) -> Iterable[Any]:
    if isinstance(row, TransactionRow):
        return (False, *row)
    halves = [(*half[:4], _fields_or_none(half.options)) for half in row.halves]
    return (True, *row[:3], halves)


def _transaction(has_halves: bool, *fields: Any) -> TransactionRow | Halves:
    if has_halves:
        transaction, part, prepared_ms, halves = fields
        return Halves(transaction, part, prepared_ms, tuple(_half(*half) for half in halves))
    name, group, state, *further_fields = fields
    row = TransactionRow(name, group, TransactionState(state), *further_fields)
    return row._replace(reached=Reach(row.reached))


def _half(
    topic: str, due_ms: int, delay_ms: int | None, body: bytes, options: Iterable[Any] | None
) -> Half:
    return Half(topic, due_ms, delay_ms, body, _options_or_none(options))


def _half_task_sizes(row: TransactionRow | Halves) -> Sequence[int]:
    return [half.size_bytes for half in row.halves] if isinstance(row, Halves) else ()


TRANSACTION: Kind[TransactionRow | Halves] = Kind(
    4,
    "transaction",
    key=key_of,
    fields=_transaction_fields,
    builds=(_transaction,),
    half_task_sizes=_half_task_sizes,
)
"""The state of a transaction and its half tasks, by (transaction, part). The batch that commits a
transaction also contains its tasks, and drops its half tasks."""


# --- bulk operations --------------------------------------------------------------------------


def _bulk(bulk: Iterable[Any], state: int, *progress: Any) -> BulkRow:
    name, kind, topic, selection, *further_fields = bulk
    decoded = Bulk(name, kind, topic, Selection(*selection), *further_fields)
    return BulkRow._make((decoded, BulkState(state), *progress))


BULK: Kind[BulkRow] = Kind(
    5, "bulk", key=lambda row: row.bulk.id, fields=lambda row: row, builds=(_bulk,)
)
"""A bulk operation and its progress, by id. Each step's batch contains its changes."""


# --- paused keys ------------------------------------------------------------------------------


class PausedKey(NamedTuple):
    """A key of a group that an operator has paused; its tasks are not delivered."""

    topic: str
    group: str
    fair_by: str | None
    """The field that contains the value; None for an order key."""
    value: str | int | float | bool
    since_ms: int
    by: str
    """Who paused the key."""


def _paused_key(row: PausedKey) -> Key:
    """Return a key that is equal for equal numbers and distinguishes types."""
    value = row.value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    fair_by = "" if row.fair_by is None else f"={row.fair_by}"
    return row.topic, row.group, fair_by, f"{type(value).__name__} {value}"


PAUSED_KEY: Kind[PausedKey] = Kind(
    6, "paused_key", key=_paused_key, fields=lambda row: row, builds=(PausedKey,)
)
"""A paused key, by (topic, group, field, value)."""

# --- targets ----------------------------------------------------------------------------------


class TargetRow(NamedTuple):
    """The target that gets the tasks of a group instead of subscribers."""

    topic: str
    group: str
    kind: str
    """"push" (HTTP requests) or "forward" (another broker)."""
    url: str
    secrets: tuple[str, ...]
    """Keys that sign requests, or the password. No answer shows them."""
    options: tuple[tuple[str, Argument], ...]
    since_ms: int
    by: str
    """Who set the target."""
    ended_ms: int | None = None
    """The time at which the endpoint answered 410, or None."""
    reason: str = ""
    """The answer that ended the target."""

    def option(self, name: str) -> Argument | None:
        return next((value for key, value in self.options if key == name), None)


TARGET: Kind[TargetRow] = Kind(
    7, "target", key=lambda row: (row.topic, row.group), fields=lambda row: row, builds=(TargetRow,)
)
"""The target of a group, by (topic, group)."""

# --- the counter of settings ------------------------------------------------------------------


def _counter(number: int, number_at_start: int | None) -> SettingsCounter:
    return SettingsCounter(number, number_at_start)


COUNTER: Kind[SettingsCounter] = Kind(
    8,
    "settings",
    key=lambda row: "counter",
    fields=lambda row: row,
    builds=(_counter,),
)
"""The shard's counter of settings changes. There is at most one row."""

# --- claims of names --------------------------------------------------------------------------

CLAIM: Kind[ClaimRow] = Kind(
    9, "claim", key=lambda row: (row.of, row.name), fields=lambda row: row, builds=(ClaimRow,)
)
"""The shard that uses a name, by (kind of the named object, name)."""

KINDS: dict[int, Kind[Any]] = {
    kind.number: kind
    for kind in (GROUP, SESSION, SCHEDULE, TRANSACTION, BULK, PAUSED_KEY, TARGET, COUNTER, CLAIM)
}
"""Every kind of record, by its number."""
RECORDED: dict[str, Kind[Any]] = {kind.name: kind for kind in (PAUSED_KEY, TARGET, CLAIM)}
"""The kinds, by name, whose changes the history records as ``record_put`` and ``record_dropped``.
Groups, schedules and transactions have events of their own; the history lacks the others."""


# --- the changes of a batch -----------------------------------------------------------------------

ProgressKey = tuple[int, str]
"""(task id, group)"""
RecordKey = tuple[Kind[Any], Key]
"""(kind, key), which is unique among all records."""


def keyed(kind: Kind[R], rows: Iterable[R]) -> dict[RecordKey, R]:
    """Return the rows of one kind by key."""
    return {(kind, kind.key(row)): row for row in rows}


@dataclass(slots=True)
class Effects:
    """The changes of a batch of commands, as absolute and idempotent states, which the engine
    passes to the store. A store applies them in one transaction. Maps contain the last state of a
    key in the batch; ``None`` drops the key. The order of application does not matter, because no
    key is in two maps."""

    enqueued: dict[int, TaskRow] = field(default_factory=dict)
    """New tasks. All of them are refused if the batch has certainly failed."""
    enqueued_bytes: int = 0
    """An upper bound of the bytes of bodies and options in ``enqueued``; 0 if they were not
    counted."""
    updated: dict[int, TaskRow] = field(default_factory=dict)
    """Changed tasks. The store writes the whole row, except for a body that is ``NO_BODY``."""
    moved: dict[int, int] = field(default_factory=dict)
    """Id → due_ms of tasks with only a new due time. Used only for a store that ``Moves``."""
    ended: dict[int, Outcome] = field(default_factory=dict)
    """Ended tasks. The store drops their rows and remembers the outcomes."""
    progress: dict[ProgressKey, ProgressRow | None] = field(default_factory=dict)
    """Changed rows of the PrepareQueue; None drops a row. Never for an id in ``ended``."""
    dead: dict[ProgressKey, DeadRow | None] = field(default_factory=dict)
    """Changed dead letters; None drops a dead letter. Never for an id in ``ended``."""
    records: dict[RecordKey, Any] = field(default_factory=dict)
    """Changed records of every kind; None drops a record."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Id → key hash (``model/key_hash.py``) of tasks in ``enqueued`` that have a key, with the
    store's seed. A store computes missing hashes."""
    id_mark: int = 0
    """An upper bound of all assigned ids. A store never lowers it."""
    position_ms: int = 0
    """The wheel's position. All tasks due at or before it have reached their groups."""

    def put(self, kind: Kind[R], row: R) -> None:
        """Write a record."""
        self.records[kind, kind.key(row)] = row

    def drop(self, kind: Kind[Any], key: Key) -> None:
        """Drop a record. It need not exist."""
        self.records[kind, key] = None

    def change(self, kind: Kind[R], changes: Mapping[Any, R | None]) -> None:
        """Write or drop the records of one kind, by key."""
        for key, row in changes.items():
            self.records[kind, key] = row

    def of_kind(self, kind: Kind[R]) -> dict[Any, R | None]:
        """Return the changed records of one kind, by key."""
        return {key: row for (other, key), row in self.records.items() if other is kind}

    def forget(self, kind: Kind[R]) -> dict[Any, R | None]:
        """Remove all changes of one kind from the batch, and return them by key."""
        forgotten = self.of_kind(kind)
        for key in forgotten:
            del self.records[kind, key]
        return forgotten

    def half_task_sizes(self) -> list[int]:
        """Return the bytes of each half task in the written records."""
        return [
            size_bytes
            for (kind, _), row in self.records.items()
            if row is not None
            for size_bytes in kind.half_task_sizes(row)
        ]

    @property
    def makes_tasks(self) -> bool:
        """Whether the batch has new tasks or half tasks, which a full store refuses."""
        return bool(self.enqueued) or bool(self.half_task_sizes())

    def is_empty(self) -> bool:
        """Return whether a restart does not need the batch, because it contains at most marks."""
        return not (
            self.enqueued
            or self.updated
            or self.moved
            or self.ended
            or self.progress
            or self.dead
            or self.records
        )
