"""Records as bytes: what stores, backups and history keep.

Every record is one msgpack array whose first element is the version it was written with. Retry
policies and settings stand inside records as plain fields, whose shape belongs to that version.
Knows the values of ``model.records`` and msgpack; must not know stores, keys or the wire.

Version 1 of a kind of record has the fields of its value in their order. Those at the end that few
values have are left out while they have their defaults (``_shortened``). Invariants:

* What any released version wrote decodes for ever; golden files in the tests prove it.
* A version newer than this code's is refused, never guessed at.
* Once released, a version's shape never changes. A new field then means a new version of its kind
  of record, and one more build in its decoder.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from tickwheel.model.bulk import Bulk, BulkRow, BulkState, Selection
from tickwheel.model.coalescing import Coalescing, Merged, Merging
from tickwheel.model.records import (
    NO_PAST,
    DeadRow,
    Failure,
    FormerFilter,
    GroupRow,
    GroupSettings,
    Outcome,
    Past,
    ProgressRow,
    ProgressState,
    Replayed,
    SessionRow,
    TaskOptions,
    TaskRow,
    is_key_alone,
    keys_alone,
)
from tickwheel.model.retry import of_stored_fields, stored_fields
from tickwheel.model.schedules import Run, Schedule, ScheduleRow
from tickwheel.model.transactions import Half, Halves, Reach, TransactionRow, TransactionState
from tickwheel.persistence.contract import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


VERSION = 1
"""The format version of every kind of record."""

Answers = tuple[tuple[int, int, int, int], ...]
AllMerged = tuple[tuple[int, Merged], ...]

_T = TypeVar("_T")
_STATES = {int(state): state for state in ProgressState}
_ENDINGS = {int(outcome): outcome for outcome in Outcome}


class RecordUnreadable(StoreError):
    """Stored bytes are not a record of a version this release knows."""


def pack(*fields: object, version: int = VERSION) -> bytes:
    """A record of these fields."""
    packed: bytes = msgpack.packb((version, *fields))
    return packed


def unpack(what: str, data: bytes, *builds: Callable[..., _T]) -> _T:
    """What the build of the record's version makes of its fields: version 1's comes first. Raises
    RecordUnreadable, which names ``what``."""
    try:
        record = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordUnreadable(f"{what}: not a msgpack value: {error}") from error
    if not isinstance(record, tuple) or not record or type(record[0]) is not int:
        raise RecordUnreadable(f"{what}: not an array that starts with its version")
    version, newest = record[0], len(builds)
    if not 0 < version <= newest:
        known = f"versions 1 to {newest}" if newest > 1 else "version 1"
        raise RecordUnreadable(
            f"{what}: version {version}; this release reads {known}"
            + ("; a newer release wrote it" if version > newest else "")
        )
    try:
        return builds[version - 1](*record[1:])
    except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
        raise RecordUnreadable(f"{what}: wrong fields: {error!r}") from error


def _rare(kind: type[Any], first: str) -> tuple[object, ...]:
    """The defaults of the fields of a named tuple, from ``first`` on."""
    names = kind._fields
    return tuple(kind._field_defaults[name] for name in names[names.index(first) :])


_RARE_OPTIONS = _rare(TaskOptions, "order_id")
_OPTIONS = len(TaskOptions._fields)
_USUAL_OPTIONS = _OPTIONS - len(_RARE_OPTIONS)
assert set(_RARE_OPTIONS) == {None}, "see _options_fields"
_RARE_SETTINGS = _rare(GroupSettings, "if_pending")
_RARE_PROGRESS = _rare(ProgressRow, "failed")
_RARE_PAST = _rare(Past, "failed")
_RARE_DEAD = _rare(DeadRow, "deaths")
_RARE_OF_SESSIONS = _rare(SessionRow, "merged")


def _shortened(fields: tuple[Any, ...], rare: tuple[object, ...]) -> tuple[Any, ...]:
    """The fields without trailing ones that have their defaults; ``rare`` has these defaults."""
    always = len(fields) - len(rare)
    if fields[always:] == rare:
        return fields[:always]
    end = len(fields)
    while fields[end - 1] == rare[end - 1 - always]:
        end -= 1
    return fields[:end]


# --- parts of a row, for stores that keep the other fields in columns ------------------------


def encode_extras(options: TaskOptions | None) -> bytes | None:
    return None if options is None else pack(*_options_fields(options))


def encode_extras_of(many: Collection[TaskOptions | None]) -> Sequence[bytes | str | None]:
    """The options of many tasks as a column: each as ``encode_extras`` gives it, except that a key
    alone stands as text. ``decode_extras_of`` reads either."""
    keys = keys_alone(many)
    if keys is not None:
        return keys
    pack = msgpack.Packer().pack
    return [
        options
        if options is None
        else options[0]
        if is_key_alone(options)
        else pack(extras_record(options))
        for options in many
    ]


def extras_record(options: TaskOptions) -> tuple[object, ...]:
    """The array that ``encode_extras`` packs."""
    return (VERSION, *_options_fields(options))


def decode_extras_of(data: bytes | str | None) -> TaskOptions | None:
    """The options in one element of what ``encode_extras_of`` returns."""
    return TaskOptions(data) if isinstance(data, str) else decode_extras(data)


def decode_extras(data: bytes | None) -> TaskOptions | None:
    return None if not data else unpack("extras", data, _options)


def _options_fields(options: TaskOptions) -> tuple[Any, ...]:
    """``_shortened`` for options, in less time: every rare option is None where it is absent."""
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


def _options(
    key: str | None,
    tag: str | None,
    properties: dict[str, Any] | None,
    priority: int,
    ttl_ms: int | None,
    retry: Any,
    order_id: int | None = None,
    within_ms: int | None = None,
    asked_ms: int | None = None,
    order_key: str | None = None,
    replayed: Iterable[Any] | None = None,
) -> TaskOptions:
    policy = of_stored_fields(retry)
    stands_for = None if replayed is None else Replayed(*replayed)
    return TaskOptions(
        key, tag, properties, priority, ttl_ms, policy, order_id, within_ms, asked_ms, order_key,
        stands_for,
    )  # fmt: skip


def encode_settings(settings: GroupSettings | None) -> bytes | None:
    """The record of a group's settings; None when nothing was ever set, as for most groups."""
    return None if settings is None else pack(*_settings_fields(settings))


def decode_settings(data: bytes | None) -> GroupSettings | None:
    return None if not data else unpack("settings", data, _settings)


def _settings_fields(settings: GroupSettings) -> tuple[Any, ...]:
    fields = _shortened(settings, _RARE_SETTINGS)
    return (*fields[:3], stored_fields(settings.retry), *fields[4:])


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


def encode_past(past: Past) -> bytes | None:
    """The record of a task's past; None when nothing counts, as for most tasks."""
    return None if past == NO_PAST else pack(*_shortened(past, _RARE_PAST))


def decode_past(data: bytes | None) -> Past:
    return NO_PAST if not data else unpack("failures", data, _past)


def _past(items: Iterable[Any], *counts: int) -> Past:
    return Past(_failures(items), *counts)


def _failures(items: Iterable[Any]) -> tuple[Failure, ...]:
    return tuple(Failure(attempt, at_ms, reason, who) for attempt, at_ms, reason, who in items)


def encode_answers(answers: Answers, merged: AllMerged = ()) -> bytes:
    return pack(answers, merged) if merged else pack(answers)


def decode_answers(data: bytes) -> tuple[Answers, AllMerged]:
    return unpack("outcomes", data, _answers)


def _answers(items: Iterable[Any], merged: Iterable[Any] = ()) -> tuple[Answers, AllMerged]:
    answers = tuple((request, first, count, at_ms) for request, first, count, at_ms in items)
    return answers, tuple(
        (request, tuple((int(Merging(what)), i, due_ms) for what, i, due_ms in tasks))
        for request, tasks in merged
    )


def encode_endings(ended: dict[int, Outcome]) -> bytes:
    """One batch of (id, ending): 8-byte little-endian ids, then one byte each."""
    return pack(struct.pack(f"<{len(ended)}q", *ended), bytes(ended.values()))


def decode_endings(data: bytes) -> list[tuple[int, Outcome]]:
    return unpack("endings", data, _endings)


def _endings(ids: bytes, kinds: bytes) -> list[tuple[int, Outcome]]:
    unpacked = struct.unpack(f"<{len(kinds)}q", ids)
    return [(task_id, _ENDINGS[kind]) for task_id, kind in zip(unpacked, kinds, strict=True)]


def progress_state(value: int) -> ProgressState:
    try:
        return _STATES[value]
    except KeyError:
        raise RecordUnreadable(f"progress: unknown state {value!r}") from None


# --- whole rows, for stores without columns --------------------------------------------------


def encode_task(row: TaskRow) -> bytes:
    return encode_tasks((row,))[0]


def encode_tasks(rows: Iterable[TaskRow]) -> list[bytes]:
    """The records of many tasks, as ``encode_task`` makes them, at half the cost of each."""
    pack = msgpack.Packer().pack
    return [
        pack((VERSION, *row))
        if row[4] is None
        else pack((VERSION, *row[:4], _options_fields(row[4])))
        for row in rows
    ]


def decode_task(data: bytes) -> TaskRow:
    return unpack("task", data, _task)


def _task(
    task_id: int, due_ms: int, topic: str, body: bytes, options: Iterable[Any] | None
) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, None if options is None else _options(*options))


def encode_progress(row: ProgressRow) -> bytes:
    return pack(*_shortened(row, _RARE_PROGRESS))


def decode_progress(data: bytes) -> ProgressRow:
    return unpack("progress", data, _progress)


def _progress(
    task_id: int,
    group: str,
    state: int,
    attempt: int,
    at_ms: int,
    epoch: int,
    failures: Iterable[Any],
    *counts: int,
) -> ProgressRow:
    past = Past(_failures(failures), *counts)
    return ProgressRow(task_id, group, _STATES[state], attempt, at_ms, epoch, *past)


def encode_dead(row: DeadRow) -> bytes:
    return pack(*_shortened(row, _RARE_DEAD))


def decode_dead(data: bytes) -> DeadRow:
    return unpack("dead letter", data, _dead)


def _dead(
    task_id: int,
    group: str,
    topic: str,
    died_ms: int,
    attempt: int,
    reason: str,
    failures: Iterable[Any],
    *counts: int,
) -> DeadRow:
    return DeadRow(task_id, group, topic, died_ms, attempt, reason, _failures(failures), *counts)


def encode_group(row: GroupRow) -> bytes:
    settings = None if row.settings is None else _settings_fields(row.settings)
    return pack(*row[:3], settings, row.since_id)


def decode_group(data: bytes) -> GroupRow:
    return unpack("group", data, _group)


def _group(
    topic: str, group: str, since_ms: int, settings: Iterable[Any] | None, since_id: int
) -> GroupRow:
    decoded = None if settings is None else _settings(*settings)
    return GroupRow(topic, group, since_ms, decoded, since_id)


def encode_session(row: SessionRow) -> bytes:
    return pack(*_shortened(row, _RARE_OF_SESSIONS))


def decode_session(data: bytes) -> SessionRow:
    return unpack("session", data, _session)


def _session(
    session: bytes, floor: int, seen_ms: int, answers: Iterable[Any], merged: Iterable[Any] = ()
) -> SessionRow:
    return SessionRow(session, floor, seen_ms, *_answers(answers, merged))


def encode_schedule(row: ScheduleRow) -> bytes:
    schedule = row.schedule
    options = None if schedule.options is None else _options_fields(schedule.options)
    return pack((*schedule[:3], options, *schedule[4:]), *row[1:])


def decode_schedule(data: bytes) -> ScheduleRow:
    return unpack("schedule", data, _schedule)


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
    decoded = Schedule(name, topic, body, None if options is None else _options(*options), *rest)
    noted = tuple(Run(*run) for run in recent)
    return ScheduleRow(decoded, paused, next_ms, runs, last_id, queued_ms, noted)


def encode_transaction(row: TransactionRow | Halves) -> bytes:
    """The record of a transaction or of its half tasks; ``decode_transaction`` tells which."""
    if isinstance(row, TransactionRow):
        return pack(False, *row)
    halves = [
        (*half[:4], None if half.options is None else _options_fields(half.options))
        for half in row.halves
    ]
    return pack(True, *row[:3], halves)


def decode_transaction(data: bytes) -> TransactionRow | Halves:
    return unpack("transaction", data, _transaction)


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
    return Half(topic, due_ms, delay_ms, body, None if options is None else _options(*options))


def encode_bulk(row: BulkRow) -> bytes:
    return pack(row.bulk, *row[1:])


def decode_bulk(data: bytes) -> BulkRow:
    return unpack("bulk", data, _bulk)


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
