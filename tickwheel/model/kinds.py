"""The kinds of records that a store keeps under a key: schedules, transactions and bulk operations
as values, what a store keeps of each kind, declared here once and nowhere else, and what a batch
changes of all this (``Effects``). Pure data: nothing here knows how a store writes, or when.

A schedule makes one task each time that its cron expression or its interval says; that time is the
*planned time* of the occurrence. When planned times are is said by ``engine/timetables.py``, what
becomes of each by ``engine/schedules.py``.

A half task of a transaction is stored and is no task yet: no wheel, no group and no index knows it.
When its transaction is committed it becomes one, with an id of that moment; so a task's id still
says when it came to be, and every rule that rests on the order of ids holds for it as for any
other.

A bulk operation has a *moment*: what was enqueued, or has died, after it was made is none of its
business. What one step changes and how far the bulk operation is then are one commit, so a bulk
operation that is cut off goes on where it was: it never does anything twice. What each kind does is
said in ``engine/tasks.py`` and ``server/shard/bulk.py``; one that needs more than a selection puts
it into ``Bulk.arguments``.

A new kind is one more ``Kind``, listed in ``KINDS``: batches carry its rows, every store writes,
reads, copies and checks them, and no store knows its name. Tasks, progress, dead letters and
outcomes are no such records: they have shapes of their own, for speed. A row is stored as the plain
values of its fields, in their order. Those at the end that few rows have are left out while they
have their defaults (``shortened``). What makes bytes of the values is ``persistence/codec.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from tickwheel.model.policies import Coalescing, Merged, Merging, of_stored_fields, stored_fields
from tickwheel.model.records import (
    LINE_SETTINGS,
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
"""How many runs a schedule remembers."""
NAME_PROPERTY = "tickwheel.schedule"
PLANNED_PROPERTY = "tickwheel.planned_ms"
"""The properties of a schedule's task: its planned time, and the schedule's name."""
OWN_PROPERTIES = 2

FIRED, MISSED, OVERLAPPED, RUN = "fired", "missed", "overlap", "run"
QUEUED, BACKFILLED = "queued", "backfill"
"""Outcomes in events only: a schedule does not remember them as runs."""


class Schedule(NamedTuple):
    """What a schedule was asked to do."""

    name: str
    topic: str
    body: bytes
    options: TaskOptions | None
    """The options of its tasks, without the two properties of each occurrence."""
    cron: str | None
    timezone: str
    """The IANA name of the time zone of ``cron``."""
    every_ms: int | None
    """The interval, instead of ``cron``: planned times are ``anchor_ms`` + n times this."""
    anchor_ms: int
    jitter_ms: int = 0
    """The most that a task is due after its planned time; the same for the same occurrence."""
    start_ms: int | None = None
    """There is no planned time before this,"""
    end_ms: int | None = None
    """nor after this,"""
    runs_max: int | None = None
    """nor after so many runs."""
    gap: str = "after"
    fold: str = "first"
    catch_up: str = "last"
    catch_up_ms: int = 86_400_000
    """Occurrences that were missed longer ago than this are not made up for."""
    overlap: str = "allow"


class Run(NamedTuple):
    """What became of an occurrence, or of several that were missed together."""

    planned_ms: int
    """The planned time of the occurrence, or of the newest of them."""
    at_ms: int
    """When the outcome was decided."""
    outcome: str
    """FIRED, MISSED, OVERLAPPED, or RUN (at an operator's word)."""
    id: int = 0
    """The id of the task; 0: the run has none."""
    occurrences: int = 1


class ScheduleRow(NamedTuple):
    """A schedule, and how far it has come."""

    schedule: Schedule
    paused: bool = False
    next_ms: int | None = None
    """The first planned time without a decision; None: there will be none."""
    runs: int = 0
    """How many occurrences have fired."""
    last_id: int = 0
    """The id of the task of the newest run."""
    queued_ms: int | None = None
    """The planned time of an occurrence that waits for the end of that task."""
    recent: tuple[Run, ...] = ()
    """The newest runs, oldest first, at most ``RECENT_MAX``."""


# --- transactions --------------------------------------------------------------------------------

HEADER_PART = 0
"""The part of a ``TransactionKey`` that stands for the ``TransactionRow``."""
PART_MAX = 2**31 - 1

TransactionKey = tuple[str, int]
"""(transaction, part): part 0 is its ``TransactionRow``, the others its ``Halves``."""


class TransactionState(IntEnum):
    """The state of a transaction. The last two states are final."""

    OPEN = 1
    """The producer decides, or a member of its producer group who is asked."""
    PARKED = 2
    """Nobody is asked any more: an operator decides, or a producer after all."""
    COMMITTED = 3
    ROLLED_BACK = 4

    @property
    def is_decided(self) -> bool:
        return self >= TransactionState.COMMITTED


class Reach(IntEnum):
    """Whom a question about a transaction has reached."""

    NOBODY = 0
    ANOTHER = 1
    """A member of the producer group who may decide, and has not prepared the transaction."""
    OWN = 2
    """The owner: the connection that prepared it, or one with the same name before."""


class Half(NamedTuple):
    """One half task."""

    topic: str
    due_ms: int
    """When the half task is due, if that counts from its own enqueue."""
    delay_ms: int | None
    """How long after the commit the half task is due; None: ``due_ms`` counts."""
    body: bytes
    options: TaskOptions | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.body, self.options)

    def task(self, now_ms: int) -> NewTask:
        """The task that a commit at ``now_ms`` makes of the half task."""
        due_ms = self.due_ms if self.delay_ms is None else now_ms + self.delay_ms
        options = self.options
        if options is not None and options.within_ms is not None:
            options = options._replace(asked_ms=due_ms)
        return self.topic, max(now_ms, due_ms), self.body, options


class Halves(NamedTuple):
    """The half tasks that one request prepared."""

    transaction: str
    part: int
    """The number of the request, from 1 on, that its producer chose; a resend has the same."""
    prepared_ms: int
    halves: tuple[Half, ...]


class TransactionRow(NamedTuple):
    """Where one transaction stands."""

    id: str
    group: str
    """The producer group whose members are asked about it."""
    state: TransactionState
    began_ms: int
    touched_ms: int
    """When the producer was last heard of about the transaction."""
    tasks: int = 0
    size_bytes: int = 0
    """The bytes of the half tasks, which are gone once it is decided."""
    topics: tuple[str, ...] = ()
    checks: int = 0
    """How often the time to ask about the transaction has come."""
    asked: int = 0
    """How many of these checks reached somebody, at once or when somebody came."""
    checked_ms: int = 0
    """When the newest check was."""
    decided_ms: int = 0
    first_id: int = 0
    """The first id of the tasks of a committed transaction; the others follow it."""
    owner: str = ""
    """The principal that began the transaction; "" where there are no tokens."""
    reached: Reach = Reach.NOBODY
    """The nearest member that the last check has reached, or that came since."""

    @property
    def waits_for_members(self) -> bool:
        """Whether the last check missed the owner, so that whoever comes and is nearer is asked."""
        is_missed = self.checks > 0 and self.reached < Reach.OWN
        return is_missed and not self.state.is_decided


def key_of(row: TransactionRow | Halves) -> TransactionKey:
    """The key under which a store has the row."""
    return (row.transaction, row.part) if isinstance(row, Halves) else (row.id, HEADER_PART)


Argument = str | int | float | bool
Place = tuple[int, str]
"""Where a bulk operation is: for tasks (id, ""), for dead letters (id, group), for other kinds what
they want it to be. It only rises."""
START: Place = (0, "")


# --- bulk operations -----------------------------------------------------------------------------

REFUSALS_MAX = 32
"""How many different reasons (words) of a refusal one bulk operation counts."""


class BulkState(IntEnum):
    """The state of a bulk operation. All states but the first are final."""

    RUNNING = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4
    """The bulk operation could not go on; ``BulkRow.note`` says why."""

    @property
    def is_over(self) -> bool:
        return self is not BulkState.RUNNING


class Selection(NamedTuple):
    """The tasks or dead letters of a topic for which all of the given fields hold."""

    tags: str | None = None
    where: str | None = None
    """A condition; ``tags`` and ``where`` are in the language of filters (``model/filters.py``)."""
    key_prefix: str = ""
    due_from_ms: int | None = None
    """Tasks due at this time or later,"""
    due_to_ms: int | None = None
    """and before this time."""
    state: str | None = None
    """The state of a task: scheduled, ready, in_flight, waiting or dead."""
    group: str | None = None
    """The group whose dead letters are selected."""
    reason: str = ""
    """What the reason of a dead letter contains; case does not matter."""


class Bulk(NamedTuple):
    """What a bulk operation was asked to do."""

    id: str
    kind: str
    topic: str
    selection: Selection
    arguments: tuple[tuple[str, Argument], ...]
    """The arguments of the kind of bulk operation, by name."""
    rate: float | None
    """Changes a second at most; None: as many as the other work allows."""
    made_ms: int
    until_id: int
    """Tasks enqueued before the operation have ids up to this; dead letters made before it died
    behind an id below it."""
    by: str = ""
    """Who asked for the bulk operation."""

    def argument(self, name: str) -> Argument | None:
        return next((value for known, value in self.arguments if known == name), None)

    def is_same(self, other: Bulk) -> bool:
        """Whether the other asks for the same, at whatever time and by whomever."""
        return self[:6] == other[:6]


def at_once(kind: str, arguments: Mapping[str, Argument], now_ms: int) -> Bulk:
    """What a command does to the few tasks that it names, as a bulk operation that nobody keeps."""
    return Bulk("", kind, "", Selection(), tuple(arguments.items()), None, now_ms, 0)


class BulkRow(NamedTuple):
    """A bulk operation, and how far it is."""

    bulk: Bulk
    state: BulkState = BulkState.RUNNING
    place: Place = START
    """Every task or dead letter up to this place has been looked at."""
    looked_at: int = 0
    matched: int = 0
    changed: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    """(reason, count) of those that matched and were not changed."""
    ended_ms: int = 0
    note: str = ""


Key = str | tuple[str | bytes | int, ...]
"""What tells the records of one kind apart; all keys of a kind have the same shape."""


# --- claims of names -----------------------------------------------------------------------------

OF_SCHEDULE, OF_TRANSACTION = "schedule", "transaction"


class ClaimRow(NamedTuple):
    """A name that is used in one shard and has its home, shard crc32(name) mod N, in another.

    The home has one that says the shard: whoever claims the name next is sent there. That shard has
    one of its own for a schedule, with the same number, and for each claim that is over: nothing
    may be made under it any more, however late the request comes."""

    of: str
    """What is named: OF_SCHEDULE, OF_TRANSACTION."""
    name: str
    topic: str
    """Of the tasks that it was claimed for."""
    shard: int
    """The shard that has, or may make, what is named."""
    number: int
    """Told to whoever claims the name; no other claim has it."""
    at_ms: int
    """When the name was claimed last."""
    is_over: bool = False


# --- kinds ---------------------------------------------------------------------------------------

R = TypeVar("R")


def _no_half_tasks(row: object) -> Sequence[int]:
    return ()


@dataclass(frozen=True, eq=False, slots=True)
class Kind(Generic[R]):
    """One kind of record: all that anybody has to know to keep its rows."""

    number: int
    """What SQLite stores; never used again for another kind."""
    name: str
    """What Redis stores, and messages say; without a space."""
    key: Callable[[R], Any]
    """The ``Key`` of a row."""
    fields: Callable[[R], Iterable[Any]]
    """The plain values of a row, in the newest version of its format: the last of ``builds``."""
    builds: tuple[Callable[..., R], ...]
    """What makes a row of the values, for each version of the format, version 1 first."""
    half_tasks: Callable[[R], Sequence[int]] = _no_half_tasks
    """The bytes of each half task in a row. A store without room refuses rows that have any."""


def shortened(fields: tuple[Any, ...], rare: tuple[object, ...]) -> tuple[Any, ...]:
    """The fields without trailing ones that have their defaults; ``rare`` has these defaults."""
    always = len(fields) - len(rare)
    if fields[always:] == rare:
        return fields[:always]
    end = len(fields)
    while fields[end - 1] == rare[end - 1 - always]:
        end -= 1
    return fields[:end]


def defaults_from(row_type: type[Any], first: str) -> tuple[object, ...]:
    """The defaults of the fields of a named tuple, from ``first`` on."""
    names = row_type._fields
    return tuple(row_type._field_defaults[name] for name in names[names.index(first) :])


# --- the options of a task, of a half task and of a schedule's tasks --------------------------

_RARE_OPTIONS = defaults_from(TaskOptions, "order_id")
_OPTIONS = len(TaskOptions._fields)
_USUAL_OPTIONS = _OPTIONS - len(_RARE_OPTIONS)
assert set(_RARE_OPTIONS) == {None}, "see options_fields"


def options_fields(options: TaskOptions) -> tuple[Any, ...]:
    """``shortened`` for options, in less time: every rare option is None where it is absent."""
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
    """The options whose ``options_fields`` these are. Raises TypeError when they are no such."""
    if len(fields) < _USUAL_OPTIONS:
        raise TypeError(f"a task's options have {_USUAL_OPTIONS} fields at least")
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
    "tags", "where", "former", *LINE_SETTINGS, "paused_ms",
)  # fmt: skip
"""The settings in the order in which they are stored. New ones come last."""
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
        raise TypeError(f"settings have {_USUAL_SETTINGS} fields at least")
    if len(fields) > len(_SETTINGS):
        raise TypeError(f"settings have {len(_SETTINGS)} fields at most")
    settings = _NOTHING_SET.replaced(dict(zip(_SETTINGS, fields, strict=False)))
    rule: Any = settings.if_pending
    return settings._replace(
        retry=of_stored_fields(settings.retry),
        if_pending=None if rule is None else Coalescing(*rule),
        former=tuple(FormerFilter(*one) for one in settings.former),
    )


GROUP: Kind[GroupRow] = Kind(
    1, "group", key=lambda row: (row.topic, row.group), fields=_group_fields, builds=(_group,)
)
"""A group, or a topic's own settings, by (topic, group)."""


# --- sessions ---------------------------------------------------------------------------------

_RARE_OF_SESSIONS = defaults_from(SessionRow, "merged")


def _session(
    session: bytes,
    floor: int,
    seen_ms: int,
    answers: Iterable[Any],
    merged: Iterable[Any] = (),
    once: Iterable[Any] = NOT_ONCE,
) -> SessionRow:
    key, shards, answered = once
    parts = [(*part[:4], _merged(part[4])) for part in answered]
    return SessionRow(
        session,
        floor,
        seen_ms,
        tuple((request, first, count, at_ms) for request, first, count, at_ms in answers),
        tuple((request, _merged(tasks)) for request, tasks in merged),
        Once(key, shards, tuple(map(OncePart._make, parts))),
    )


def _merged(tasks: Iterable[Any]) -> Merged:
    return tuple((int(Merging(what)), task_id, due_ms) for what, task_id, due_ms in tasks)


SESSION: Kind[SessionRow] = Kind(
    2,
    "session",
    key=lambda row: row.key,
    fields=lambda row: shortened(row, _RARE_OF_SESSIONS),
    builds=(_session,),
)
"""What a producer session was answered in one batch, by (session, first request of the row). To
drop one forgets what an earlier batch had answered."""


# --- schedules --------------------------------------------------------------------------------


def _schedule_fields(row: ScheduleRow) -> Iterable[Any]:
    schedule = row.schedule
    return ((*schedule[:3], _fields_or_none(schedule.options), *schedule[4:]), *row[1:])


def _schedule(schedule: Iterable[Any], *rest: Any) -> ScheduleRow:
    name, topic, body, options, *timing = schedule
    decoded = Schedule(name, topic, body, _options_or_none(options), *timing)
    row = ScheduleRow._make((decoded, *rest))
    return row._replace(recent=tuple(Run(*run) for run in row.recent))


SCHEDULE: Kind[ScheduleRow] = Kind(
    3,
    "schedule",
    key=lambda row: row.schedule.name,
    fields=_schedule_fields,
    builds=(_schedule,),
)
"""A recurring schedule and how far it has come, by name. A run's task is among the new tasks of
the same batch."""


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
    name, group, state, *rest = fields
    row = TransactionRow(name, group, TransactionState(state), *rest)
    return row._replace(reached=Reach(row.reached))


def _half(
    topic: str, due_ms: int, delay_ms: int | None, body: bytes, options: Iterable[Any] | None
) -> Half:
    return Half(topic, due_ms, delay_ms, body, _options_or_none(options))


def _half_tasks(row: TransactionRow | Halves) -> Sequence[int]:
    return [half.size_bytes for half in row.halves] if isinstance(row, Halves) else ()


TRANSACTION: Kind[TransactionRow | Halves] = Kind(
    4,
    "transaction",
    key=key_of,
    fields=_transaction_fields,
    builds=(_transaction,),
    half_tasks=_half_tasks,
)
"""Where a transaction stands, and its half tasks, by (transaction, part): see ``Half``. Of a
committed one the tasks are among the new tasks of the same batch, which drops its half tasks."""


# --- bulk operations --------------------------------------------------------------------------


def _bulk(bulk: Iterable[Any], state: int, *rest: Any) -> BulkRow:
    name, kind, topic, selection, *others = bulk
    decoded = Bulk(name, kind, topic, Selection(*selection), *others)
    return BulkRow._make((decoded, BulkState(state), *rest))


BULK: Kind[BulkRow] = Kind(
    5, "bulk", key=lambda row: row.bulk.id, fields=lambda row: row, builds=(_bulk,)
)
"""A bulk operation and how far it is, by id, in the same batch as what its steps change."""


# --- paused keys ------------------------------------------------------------------------------


class PausedKey(NamedTuple):
    """A key of a group that an operator has paused: its tasks are not handed out."""

    topic: str
    group: str
    fair_by: str | None
    """The property that shares the group by this value; None: it is an order key."""
    value: str | int | float | bool
    since_ms: int
    by: str
    """Who paused it."""


def _paused_key(row: PausedKey) -> Key:
    """Equal numbers are one key; a text, a number and a boolean are not."""
    value = row.value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    fair_by = "" if row.fair_by is None else f"={row.fair_by}"
    return row.topic, row.group, fair_by, f"{type(value).__name__} {value}"


PAUSED_KEY: Kind[PausedKey] = Kind(
    6, "paused_key", key=_paused_key, fields=lambda row: row, builds=(PausedKey,)
)
"""A paused key, by (topic, group, what the value is of, the value)."""

# --- targets ----------------------------------------------------------------------------------


class TargetRow(NamedTuple):
    """Where the tasks of a group are sent instead of to subscribers."""

    topic: str
    group: str
    kind: str
    """"push" (HTTP requests) or "forward" (another broker)."""
    url: str
    secrets: tuple[str, ...]
    """Keys that sign requests, or the one password; no answer shows them."""
    options: tuple[tuple[str, Argument], ...]
    since_ms: int
    by: str
    """Who set it."""
    ended_ms: int | None = None
    """When the other side said that it wants nothing any more; None: it has not."""
    reason: str = ""
    """How it said that."""

    def option(self, name: str) -> Argument | None:
        return next((value for known, value in self.options if known == name), None)


TARGET: Kind[TargetRow] = Kind(
    7, "target", key=lambda row: (row.topic, row.group), fields=lambda row: row, builds=(TargetRow,)
)
"""The target of a group, by (topic, group)."""

# --- the counter of settings ------------------------------------------------------------------


def _counter(number: int, sure: int | None) -> SettingsCounter:
    return SettingsCounter(number, sure)


COUNTER: Kind[SettingsCounter] = Kind(
    8,
    "settings",
    key=lambda row: "counter",
    fields=lambda row: row,
    builds=(_counter,),
)
"""How many changes of settings the shard has numbered; there is one at most."""

# --- claims of names --------------------------------------------------------------------------

CLAIM: Kind[ClaimRow] = Kind(
    9, "claim", key=lambda row: (row.of, row.name), fields=lambda row: row, builds=(ClaimRow,)
)
"""In which shard a name is in use, by (what is named, name): see ``ClaimRow``."""

KINDS: dict[int, Kind[Any]] = {
    kind.number: kind
    for kind in (GROUP, SESSION, SCHEDULE, TRANSACTION, BULK, PAUSED_KEY, TARGET, COUNTER, CLAIM)
}
"""Every kind of record, by its number."""


# --- what a batch changes -------------------------------------------------------------------------

ProgressKey = tuple[int, str]
"""(task id, group)"""
RecordKey = tuple[Kind[Any], Key]
"""What tells all records apart: a kind, and a key of this kind."""


def keyed(kind: Kind[R], rows: Iterable[R]) -> dict[RecordKey, R]:
    """These rows of one kind by their keys."""
    return {(kind, kind.key(row)): row for row in rows}


@dataclass(slots=True)
class Effects:
    """What a batch of commands changes, as absolute and idempotent states: engine to store.

    A store applies one as one transaction. Maps hold the last state of a key within the batch;
    ``None`` is a drop. Order of application does not matter: no key is in two maps."""

    enqueued: dict[int, TaskRow] = field(default_factory=dict)
    """New tasks: refused as a whole when the batch certainly failed."""
    enqueued_bytes: int = 0
    """The bytes of bodies and options of ``enqueued``, at least; 0: they were not counted."""
    updated: dict[int, TaskRow] = field(default_factory=dict)
    """Tasks whose row changed: write the whole row, but for a body that is ``NO_BODY``."""
    moved: dict[int, int] = field(default_factory=dict)
    """Id → due_ms of tasks of which only that is new. Only for a store that ``Moves``."""
    ended: dict[int, Outcome] = field(default_factory=dict)
    """Tasks that left: drop their task, progress and dead rows, remember how they ended."""
    progress: dict[ProgressKey, ProgressRow | None] = field(default_factory=dict)
    """Changed PrepareQueue rows; None drops a row. Never for an id in ``ended``."""
    dead: dict[ProgressKey, DeadRow | None] = field(default_factory=dict)
    """Changed dead letters; None drops one. Never for an id in ``ended``."""
    records: dict[RecordKey, Any] = field(default_factory=dict)
    """Changed records of every kind (``model/kinds.py``): each a row of its kind; None drops it."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Id → key hash (``model/key_hash.py``) of those of ``enqueued`` that have a key, with the seed
    that the store gave when it was opened. A store works out those that are missing."""
    id_mark: int = 0
    """No id above this has been assigned; a store never lowers it."""
    position_ms: int = 0
    """The wheel's position: every task due at or before it has been handed to its groups."""

    def put(self, kind: Kind[R], row: R) -> None:
        """Write a record: its row is this one from now on."""
        self.records[kind, kind.key(row)] = row

    def drop(self, kind: Kind[Any], key: Key) -> None:
        """Drop a record, whether or not there is one."""
        self.records[kind, key] = None

    def change(self, kind: Kind[R], changes: Mapping[Any, R | None]) -> None:
        """Write or drop the records of one kind, by key."""
        for key, row in changes.items():
            self.records[kind, key] = row

    def of_kind(self, kind: Kind[R]) -> dict[Any, R | None]:
        """The changed records of one kind, by key."""
        return {key: row for (other, key), row in self.records.items() if other is kind}

    def forget(self, kind: Kind[R]) -> dict[Any, R | None]:
        """Take all changes of one kind out of the batch; returns them, by key."""
        forgotten = self.of_kind(kind)
        for key in forgotten:
            del self.records[kind, key]
        return forgotten

    def half_tasks(self) -> list[int]:
        """The bytes of each half task in the written records."""
        return [
            size_bytes
            for (kind, _), row in self.records.items()
            if row is not None
            for size_bytes in kind.half_tasks(row)
        ]

    @property
    def makes_tasks(self) -> bool:
        """Whether the batch makes tasks or half tasks, which a store without room refuses."""
        return bool(self.enqueued) or bool(self.half_tasks())

    def is_empty(self) -> bool:
        """True when there is nothing a restart would miss (marks alone are nothing)."""
        return not (
            self.enqueued
            or self.updated
            or self.moved
            or self.ended
            or self.progress
            or self.dead
            or self.records
        )
