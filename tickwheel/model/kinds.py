"""The kinds of records that a store keeps under a key: each is declared here once, nowhere else.

A new kind is one more ``Kind``, listed in ``KINDS``: batches carry its rows, every store writes,
reads, copies and checks them, and no store knows its name. Tasks, progress, dead letters and
outcomes are no such records: they have shapes of their own, for speed.

A row is stored as the plain values of its fields, in their order. Those at the end that few rows
have are left out while they have their defaults (``shortened``). Pure: what makes bytes of the
values is ``persistence/codec.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tickwheel.model.bulk import Bulk, BulkRow, BulkState, Selection
from tickwheel.model.coalescing import Coalescing, Merging
from tickwheel.model.records import (
    FormerFilter,
    GroupRow,
    GroupSettings,
    Replayed,
    SessionRow,
    TaskOptions,
)
from tickwheel.model.retry import of_stored_fields, stored_fields
from tickwheel.model.schedules import Run, Schedule, ScheduleRow
from tickwheel.model.transactions import (
    Half,
    Halves,
    Reach,
    TransactionRow,
    TransactionState,
    key_of,
)

Key = str | tuple[str | bytes | int, ...]
"""What tells the records of one kind apart; all keys of a kind have the same shape."""
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

_RARE_SETTINGS = defaults_from(GroupSettings, "if_pending")


def _group_fields(row: GroupRow) -> Iterable[Any]:
    settings: tuple[Any, ...] | None = None
    if row.settings is not None:
        fields = shortened(row.settings, _RARE_SETTINGS)
        settings = (*fields[:3], stored_fields(row.settings.retry), *fields[4:])
    return (*row[:3], settings, row.since_id)


def _group(
    topic: str, group: str, since_ms: int, settings: Iterable[Any] | None, since_id: int
) -> GroupRow:
    decoded = None if settings is None else _settings(*settings)
    return GroupRow(topic, group, since_ms, decoded, since_id)


def _settings(
    paused: bool,
    rate: float | None,
    burst: int | None,
    retry: Any,
    closed_ms: int | None,
    closed_id: int,
    if_pending: Iterable[Any] | None = None,
    broadcast_only: bool = False,
    tags: str | None = None,
    where: str | None = None,
    former: Iterable[Any] = (),
    *lines: Any,
) -> GroupSettings:
    policy = of_stored_fields(retry)
    rule = None if if_pending is None else Coalescing(*if_pending)
    filters = tuple(FormerFilter(*fields) for fields in former)
    return GroupSettings(
        paused, rate, burst, policy, closed_ms, closed_id, rule, broadcast_only, tags, where,
        filters, *lines,
    )  # fmt: skip


GROUP: Kind[GroupRow] = Kind(
    1, "group", key=lambda row: (row.topic, row.group), fields=_group_fields, builds=(_group,)
)
"""A group, or a topic's own settings, by (topic, group)."""


# --- sessions ---------------------------------------------------------------------------------

_RARE_OF_SESSIONS = defaults_from(SessionRow, "merged")


def _session(
    session: bytes, floor: int, seen_ms: int, answers: Iterable[Any], merged: Iterable[Any] = ()
) -> SessionRow:
    return SessionRow(
        session,
        floor,
        seen_ms,
        tuple((request, first, count, at_ms) for request, first, count, at_ms in answers),
        tuple(
            (request, tuple((int(Merging(what)), i, due_ms) for what, i, due_ms in tasks))
            for request, tasks in merged
        ),
    )


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


def _schedule(
    schedule: Iterable[Any],
    paused: bool,
    next_ms: int | None,
    runs: int,
    last_id: int,
    queued_ms: int | None,
    recent: Iterable[Any],
) -> ScheduleRow:
    name, topic, body, options, *rest = schedule
    decoded = Schedule(name, topic, body, _options_or_none(options), *rest)
    noted = tuple(Run(*run) for run in recent)
    return ScheduleRow(decoded, paused, next_ms, runs, last_id, queued_ms, noted)


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
"""Where a transaction stands, and its half tasks, by (transaction, part): see
``model/transactions.py``. Of a committed one the tasks are among the new tasks of the same batch,
which drops its half tasks."""


# --- bulk operations --------------------------------------------------------------------------


def _bulk(
    bulk: Iterable[Any],
    state: int,
    place: tuple[int, str],
    looked_at: int,
    matched: int,
    changed: int,
    refused: tuple[tuple[str, int], ...],
    ended_ms: int,
    note: str,
) -> BulkRow:
    name, kind, topic, selection, *rest = bulk
    decoded = Bulk(name, kind, topic, Selection(*selection), *rest)
    counts = (looked_at, matched, changed, refused)
    return BulkRow(decoded, BulkState(state), place, *counts, ended_ms, note)


BULK: Kind[BulkRow] = Kind(
    5, "bulk", key=lambda row: row.bulk.id, fields=lambda row: row, builds=(_bulk,)
)
"""A bulk operation and how far it is, by id, in the same batch as what its steps change."""

KINDS: dict[int, Kind[Any]] = {
    kind.number: kind for kind in (GROUP, SESSION, SCHEDULE, TRANSACTION, BULK)
}
"""Every kind of record, by its number."""
