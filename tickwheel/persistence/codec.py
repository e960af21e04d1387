"""Records as bytes: what stores, backups and history keep, version by version.

Every record is one msgpack array whose first element is the version it was written with. Retry
policies and settings stand inside records as plain fields, whose shape belongs to that version.
Knows the values of ``model.records`` and msgpack; must not know stores, keys or the wire.

Invariants:

* What any released version wrote decodes for ever; golden files in the tests prove it.
* A version newer than this code's is refused, never guessed at.
* A new field means a new version of its kind of record and one more decoder; a version's shape
  never changes.

Version 2: a task's own retry policy (extras, task), the settings of a group (group), who had the
task when an attempt failed (failures, progress, dead letter). Version 3: a task's place in the
order (extras, task), written for those few that have one; a group's place (group); how often a task
was snoozed (failures, progress), written for those that were; a topic's rule for tasks with a key
(settings; in a group it is version 4), written where there is one. Version 2 of sessions and their
answers: what became of tasks that had such a rule, written where there are some. Version 4: a
task's due window (extras, task), and version 2 of a schedule whose tasks have one, written for
those alone. A topic that is for broadcasts only: version 4 (settings), 5 (group), written where it
is. A group that has, or had, a filter: version 5 (settings), 6 (group), written where there is one.
Version 2 of endings: of those by filters. A task with an order key: version 5 (extras, task), and
version 3 of a schedule whose tasks have one. A group that says something of order keys or of fair
shares: version 6 (settings), 7 (group), written where it does. The state of a task whose order key
is held came with them (progress). What a task stands for that a group is given again: version 6
(extras, task).
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from tickwheel.model.coalescing import Coalescing, Merged, Merging
from tickwheel.model.jobs import Job, JobRow, JobState, Selection
from tickwheel.model.records import (
    LINES_FROM,
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
from tickwheel.model.transactions import Half, Halves, TransactionRow, TransactionState
from tickwheel.persistence.contract import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


def settings_fields(settings: GroupSettings) -> tuple[object, ...]:
    paused, rate, burst, retry, closed_ms, closed_id, if_pending, broadcast_only = settings[:8]
    fields = paused, rate, burst, stored_fields(retry), closed_ms, closed_id
    rule = None if if_pending is None else tuple(if_pending)
    if is_filtered(settings) or is_lined(settings):
        former = tuple(map(tuple, settings.former))
        filters = settings.tags, settings.where, former
        lines = settings[LINES_FROM:] if is_lined(settings) else ()
        return (*fields, rule, broadcast_only, *filters, *lines)
    if broadcast_only:
        return (*fields, rule, True)
    return fields if rule is None else (*fields, rule)


def is_filtered(settings: GroupSettings) -> bool:
    """It has a filter, or had one."""
    return (settings.tags, settings.where, settings.former) != (None, None, ())


_NO_LINES = GroupSettings()[LINES_FROM:]


def is_lined(settings: GroupSettings) -> bool:
    """It says something of order keys or of fair shares."""
    return settings[LINES_FROM:] != _NO_LINES


def settings_of(
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
    order_retry_ms: int | None = None,
    order_attempts: int | None = None,
    order_failure: str | None = None,
    fair_by: str | None = None,
    limit_each: int | None = None,
    rate_each: float | None = None,
) -> GroupSettings:
    policy = of_stored_fields(retry)
    rule = None if if_pending is None else Coalescing(*if_pending)
    filters = tuple(FormerFilter(*fields) for fields in former)
    return GroupSettings(
        paused, rate, burst, policy, closed_ms, closed_id, rule, broadcast_only, tags, where,
        filters, order_retry_ms, order_attempts, order_failure, fair_by, limit_each, rate_each,
    )  # fmt: skip


VERSION = 1
"""Of every kind of record that is not named with another one below."""
TASK_VERSION = 2
PLACED_TASK_VERSION = 3
"""Of the few tasks with ``TaskOptions.order_id``."""
WINDOW_TASK_VERSION = 4
"""Of tasks with ``TaskOptions.within_ms``."""
ORDERED_TASK_VERSION = 5
"""Of tasks with ``TaskOptions.order_key``."""
REPLAYED_TASK_VERSION = 6
"""Of tasks with ``TaskOptions.replayed``."""
WINDOW_SCHEDULE_VERSION = 2
ORDERED_SCHEDULE_VERSION = 3
SETTINGS_VERSION = 2
GROUP_VERSION = 3
"""Of the few topics with ``GroupSettings.if_pending`` it is the next one, of those with
``broadcast_only`` the one after that, of groups with a filter the one after both, and the last of
groups that say something of order keys or fair shares."""
FILTERED_VERSION = 2
"""Of endings, where a task was left out by every filter."""
MERGED_VERSION = 2
"""Of sessions, and of their answers, where some request had rules for its tasks."""
FAILURES_VERSION = 2
SNOOZED_VERSION = 3
"""Of the progress of tasks that were snoozed, and of the failures beside it."""

Answers = tuple[tuple[int, int, int, int], ...]
AllMerged = tuple[tuple[int, Merged], ...]

_T = TypeVar("_T")
_STATES = {int(state): state for state in ProgressState}
_ENDINGS = {int(outcome): outcome for outcome in Outcome}


class RecordUnreadable(StoreError):
    """Stored bytes are not a record of a version this release knows."""


def _pack(*fields: object, version: int = VERSION) -> bytes:
    packed: bytes = msgpack.packb((version, *fields))
    return packed


def _unpack(what: str, data: bytes, *builds: Callable[..., _T]) -> _T:
    """The fields after the version, given to that version's build: version 1's comes first."""
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


# --- parts of a row, for stores that keep the other fields in columns ------------------------


def encode_extras(options: TaskOptions | None) -> bytes | None:
    if options is None:
        return None
    return _pack(*_extras_fields(options), version=_version_of(options))


def encode_extras_of(many: Collection[TaskOptions | None]) -> Sequence[bytes | str | None]:
    """For a column of many: as ``encode_extras`` gives each, but a key that is all there is stands
    as text. ``decode_extras_of`` reads either."""
    keys = keys_alone(many)
    if keys is not None:
        return keys
    pack = msgpack.Packer().pack
    return [
        options
        if options is None
        else options[0]
        if is_key_alone(options)
        else pack((_version_of(options), *_extras_fields(options)))
        for options in many
    ]


def decode_extras_of(data: bytes | str | None) -> TaskOptions | None:
    """One element of what ``encode_extras_of`` gives."""
    return TaskOptions(data) if isinstance(data, str) else decode_extras(data)


def decode_extras(data: bytes | None) -> TaskOptions | None:
    return None if not data else _unpack("extras", data, _extras_1, *_EXTRAS)


def _version_of(options: TaskOptions | None) -> int:
    """Newer ones are written only where they say something: older releases read all the rest."""
    if options is None:
        return TASK_VERSION
    if options.replayed is not None:
        return REPLAYED_TASK_VERSION
    if options.order_key is not None:
        return ORDERED_TASK_VERSION
    if options.within_ms is not None:
        return WINDOW_TASK_VERSION
    return TASK_VERSION if options.order_id is None else PLACED_TASK_VERSION


_FIELDS_OF = {
    TASK_VERSION: 6, PLACED_TASK_VERSION: 7, WINDOW_TASK_VERSION: 9, ORDERED_TASK_VERSION: 10,
    REPLAYED_TASK_VERSION: 11,
}  # fmt: skip


def _extras_fields(options: TaskOptions) -> tuple[object, ...]:
    fields = options[: _FIELDS_OF[_version_of(options)]]
    return (
        fields
        if options.retry is None
        else (*fields[:5], stored_fields(options.retry), *fields[6:])
    )


def _extras_1(
    key: str | None,
    tag: str | None,
    properties: dict[str, Any] | None,
    priority: int,
    ttl_ms: int | None,
) -> TaskOptions:
    return TaskOptions(key, tag, properties, priority, ttl_ms)


def _extras(
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
        key,
        tag,
        properties,
        priority,
        ttl_ms,
        policy,
        order_id,
        within_ms,
        asked_ms,
        order_key,
        stands_for,
    )


_EXTRAS = (_extras,) * (REPLAYED_TASK_VERSION - 1)
"""Of all versions but the first: what a later one added is at its end."""


def encode_settings(settings: GroupSettings | None) -> bytes | None:
    """None when nothing was ever set, which most groups have."""
    if settings is None:
        return None
    return _pack(*settings_fields(settings), version=SETTINGS_VERSION + _newer_by(settings))


def _newer_by(settings: GroupSettings | None) -> int:
    """Newer versions are written only where they say something."""
    if settings is None:
        return 0
    if is_lined(settings):
        return 4
    if is_filtered(settings):
        return 3
    return 2 if settings.broadcast_only else int(settings.if_pending is not None)


def decode_settings(data: bytes | None) -> GroupSettings | None:
    builds = (settings_of,) * 5
    return None if not data else _unpack("settings", data, _settings_1, *builds)


def _settings_1() -> GroupSettings:
    """Groups of version 1 had none."""
    raise ValueError("settings have no version 1")


def encode_failures(failures: tuple[Failure, ...]) -> bytes | None:
    """None when there are none, which is what most rows have."""
    return _pack(failures, version=FAILURES_VERSION) if failures else None


def decode_failures(data: bytes | None) -> tuple[Failure, ...]:
    return () if not data else _unpack("failures", data, _failures_1, _failures)


def encode_past(past: Past) -> bytes | None:
    """None when nothing counts, which is what most rows have."""
    return None if past == NO_PAST else _pack(*past, version=SNOOZED_VERSION)


def decode_past(data: bytes | None) -> Past:
    if not data:
        return NO_PAST
    builds = (partial(_attempts, _failures_1), partial(_attempts, _failures))
    return _unpack("failures", data, *builds, partial(_attempts, _failures))


def _attempts(
    failures_of: Callable[[Any], tuple[Failure, ...]], items: Any, snoozes: int = 0, failed: int = 0
) -> Past:
    return Past(failures_of(items), snoozes, failed)


def _failures_1(items: tuple[tuple[int, int, str], ...]) -> tuple[Failure, ...]:
    return tuple(Failure(attempt, at_ms, reason) for attempt, at_ms, reason in items)


def _failures(items: tuple[tuple[int, int, str, str], ...]) -> tuple[Failure, ...]:
    return tuple(Failure(attempt, at_ms, reason, who) for attempt, at_ms, reason, who in items)


def encode_answers(answers: Answers, merged: AllMerged = ()) -> bytes:
    return _pack(answers, merged, version=MERGED_VERSION) if merged else _pack(answers)


def decode_answers(data: bytes) -> tuple[Answers, AllMerged]:
    return _unpack("outcomes", data, _answers_and_merged, _answers_and_merged)


def _answers_and_merged(
    items: tuple[tuple[int, ...], ...], merged: Iterable[Any] = ()
) -> tuple[Answers, AllMerged]:
    return _answers_of(items), _merged_of(merged)


def _answers_of(items: tuple[tuple[int, ...], ...]) -> Answers:
    return tuple((request, first, count, at_ms) for request, first, count, at_ms in items)


def _merged_of(items: Iterable[Any]) -> AllMerged:
    return tuple(
        (request, tuple((int(Merging(what)), i, due_ms) for what, i, due_ms in merged))
        for request, merged in items
    )


def encode_endings(ended: dict[int, Outcome]) -> bytes:
    """One batch of (id, ending): 8-byte little-endian ids, then one byte each."""
    kinds = bytes(ended.values())
    version = FILTERED_VERSION if Outcome.FILTERED in kinds else VERSION
    return _pack(struct.pack(f"<{len(ended)}q", *ended), kinds, version=version)


def decode_endings(data: bytes) -> list[tuple[int, Outcome]]:
    return _unpack("endings", data, _endings, _endings)


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
    """Each as ``encode_task`` gives it; half the cost a row."""
    pack = msgpack.Packer().pack
    return [
        pack((TASK_VERSION, *row))
        if row[4] is None
        else pack((_version_of(row[4]), *row[:4], _extras_fields(row[4])))
        for row in rows
    ]


def decode_task(data: bytes) -> TaskRow:
    return _unpack("task", data, _task_1, *(_task,) * len(_EXTRAS))


def _task_1(
    task_id: int, due_ms: int, topic: str, body: bytes, options: Iterable[Any] | None
) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, None if options is None else _extras_1(*options))


def _task(
    task_id: int, due_ms: int, topic: str, body: bytes, options: Iterable[Any] | None
) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, None if options is None else _extras(*options))


def encode_progress(row: ProgressRow) -> bytes:
    return _pack(*row, version=SNOOZED_VERSION)


def decode_progress(data: bytes) -> ProgressRow:
    builds = (partial(_progress, _failures_1), partial(_progress, _failures))
    return _unpack("progress", data, *builds, partial(_progress, _failures))


def _progress(
    failures_of: Callable[[Any], tuple[Failure, ...]],
    task_id: int,
    group: str,
    state: int,
    attempt: int,
    at_ms: int,
    epoch: int,
    failures: Any,
    snoozes: int = 0,
    failed: int = 0,
) -> ProgressRow:
    decoded = failures_of(failures), snoozes, failed
    return ProgressRow(task_id, group, _STATES[state], attempt, at_ms, epoch, *decoded)


def encode_dead(row: DeadRow) -> bytes:
    return _pack(*row, version=FAILURES_VERSION)


def decode_dead(data: bytes) -> DeadRow:
    return _unpack("dead letter", data, partial(_dead, _failures_1), partial(_dead, _failures))


def _dead(
    failures_of: Callable[[Any], tuple[Failure, ...]],
    task_id: int,
    group: str,
    topic: str,
    died_ms: int,
    attempt: int,
    reason: str,
    failures: Any,
    failed: int = 0,
) -> DeadRow:
    return DeadRow(task_id, group, topic, died_ms, attempt, reason, failures_of(failures), failed)


def encode_group(row: GroupRow) -> bytes:
    settings = None if row.settings is None else settings_fields(row.settings)
    version = GROUP_VERSION + _newer_by(row.settings)
    return _pack(*row[:3], settings, row.since_id, version=version)


def decode_group(data: bytes) -> GroupRow:
    return _unpack("group", data, _group_1, *(_group,) * 6)


def _group_1(topic: str, group: str, since_ms: int) -> GroupRow:
    return GroupRow(topic, group, since_ms)


def _group(
    topic: str,
    group: str,
    since_ms: int,
    settings: Iterable[Any] | None,
    since_id: int | None = None,
) -> GroupRow:
    decoded = None if settings is None else settings_of(*settings)
    return GroupRow(topic, group, since_ms, decoded, since_id)


def encode_session(row: SessionRow) -> bytes:
    return _pack(*row, version=MERGED_VERSION) if row.merged else _pack(*row[:4])


def decode_session(data: bytes) -> SessionRow:
    return _unpack("session", data, _session, _session)


def _session(
    session: bytes, floor: int, seen_ms: int, answers: Any, merged: Iterable[Any] = ()
) -> SessionRow:
    return SessionRow(session, floor, seen_ms, _answers_of(answers), _merged_of(merged))


def encode_schedule(row: ScheduleRow) -> bytes:
    schedule = row.schedule
    options = None if schedule.options is None else _extras_fields(schedule.options)
    version = _SCHEDULE_VERSIONS.get(_version_of(schedule.options), VERSION)
    return _pack((*schedule[:3], options, *schedule[4:]), *row[1:], version=version)


_SCHEDULE_VERSIONS = {
    WINDOW_TASK_VERSION: WINDOW_SCHEDULE_VERSION, ORDERED_TASK_VERSION: ORDERED_SCHEDULE_VERSION,
}  # fmt: skip
"""By the version that its tasks have."""


def decode_schedule(data: bytes) -> ScheduleRow:
    return _unpack("schedule", data, _schedule, _schedule, _schedule)


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
    extras = None if options is None else _extras(*options)
    decoded = Schedule(name, topic, body, extras, *rest)
    noted = tuple(Run(*run) for run in recent)
    return ScheduleRow(decoded, paused, next_ms, runs, last_id, queued_ms, noted)


def encode_transaction(row: TransactionRow | Halves) -> bytes:
    """A row of either kind; ``decode_transaction`` knows which it is."""
    if isinstance(row, TransactionRow):
        return _pack(False, *row)
    halves = [
        (*half[:4], None if half.options is None else encode_extras(half.options))
        for half in row.halves
    ]
    return _pack(True, *row[:3], halves)


def decode_transaction(data: bytes) -> TransactionRow | Halves:
    return _unpack("transaction", data, _transaction)


def _transaction(has_halves: bool, *fields: Any) -> TransactionRow | Halves:
    if has_halves:
        transaction, part, prepared_ms, halves = fields
        return Halves(transaction, part, prepared_ms, tuple(_half(*half) for half in halves))
    name, group, state, *rest = fields
    return TransactionRow(name, group, TransactionState(state), *rest)


def _half(topic: str, due_ms: int, delay_ms: int | None, body: bytes, extras: bytes | None) -> Half:
    return Half(topic, due_ms, delay_ms, body, decode_extras(extras))


def encode_job(row: JobRow) -> bytes:
    return _pack(row.job, *row[1:])


def decode_job(data: bytes) -> JobRow:
    return _unpack("job", data, _job)


def _job(
    job: Iterable[Any],
    state: int,
    place: tuple[int, str],
    looked_at: int,
    matched: int,
    changed: int,
    refused: tuple[tuple[str, int], ...],
    ended_ms: int,
    note: str,
) -> JobRow:
    name, kind, topic, selection, *rest = job
    decoded = Job(name, kind, topic, Selection(*selection), *rest)
    counts = (looked_at, matched, changed, refused)
    return JobRow(decoded, JobState(state), place, *counts, ended_ms, note)
