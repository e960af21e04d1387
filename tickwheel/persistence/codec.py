"""Records as bytes: what stores, backups and history keep, version by version.

Every record is one msgpack array whose first element is the version it was written with.
Knows the values of ``wheel.records`` and msgpack; must not know stores, keys or the wire.

Invariants:

* What any released version wrote decodes for ever; golden files in the tests prove it.
* A version newer than this code's is refused, never guessed at.
* A new field means a new version and one more decoder; a version's shape never changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgpack

from tickwheel.persistence.store import StoreError
from tickwheel.wheel.records import (
    DeadRow,
    Ending,
    Extras,
    Failure,
    GroupRow,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskRow,
)

VERSION = 1

Outcomes = tuple[tuple[int, int, int, int], ...]

_T = TypeVar("_T")
_STATES = {int(state): state for state in ProgressState}
_ENDINGS = {int(ending): ending for ending in Ending}


class RecordUnreadable(StoreError):
    """Stored bytes are not a record of a version this release knows."""


def _pack(*fields: object) -> bytes:
    packed: bytes = msgpack.packb((VERSION, *fields))
    return packed


def _unpack(what: str, data: bytes, build: Callable[..., _T]) -> _T:
    """``build`` applied to the fields after the version."""
    try:
        record = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordUnreadable(f"{what}: not a msgpack value: {error}") from error
    if not isinstance(record, tuple) or not record or type(record[0]) is not int:
        raise RecordUnreadable(f"{what}: not an array that starts with its version")
    if record[0] != VERSION:
        raise RecordUnreadable(
            f"{what}: version {record[0]}; this release reads version {VERSION}"
            + ("; a newer release wrote it" if record[0] > VERSION else "")
        )
    try:
        return build(*record[1:])
    except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
        raise RecordUnreadable(f"{what}: wrong fields: {error!r}") from error


# --- parts of a row, for stores that keep the other fields in columns ------------------------


def encode_extras(extras: Extras | None) -> bytes | None:
    return None if extras is None else _pack(*extras)


def decode_extras(data: bytes | None) -> Extras | None:
    return None if not data else _unpack("extras", data, _extras)


def _extras(
    key: str | None,
    tag: str | None,
    properties: dict[str, Any] | None,
    priority: int,
    ttl_ms: int | None,
) -> Extras:
    return Extras(key, tag, properties, priority, ttl_ms)


def encode_failures(failures: tuple[Failure, ...]) -> bytes | None:
    """None when there are none, which is what most rows have."""
    return _pack(failures) if failures else None


def decode_failures(data: bytes | None) -> tuple[Failure, ...]:
    return () if not data else _unpack("failures", data, _failures)


def _failures(items: tuple[tuple[int, int, str], ...]) -> tuple[Failure, ...]:
    return tuple(Failure(attempt, at_ms, reason) for attempt, at_ms, reason in items)


def encode_outcomes(outcomes: Outcomes) -> bytes:
    return _pack(outcomes)


def decode_outcomes(data: bytes) -> Outcomes:
    return _unpack("outcomes", data, _outcomes)


def _outcomes(items: tuple[tuple[int, ...], ...]) -> Outcomes:
    return tuple((request, first, count, at_ms) for request, first, count, at_ms in items)


def encode_endings(ended: dict[int, Ending]) -> bytes:
    """One batch of (id, ending): 8-byte little-endian ids, then one byte each."""
    return _pack(struct.pack(f"<{len(ended)}q", *ended), bytes(ended.values()))


def decode_endings(data: bytes) -> list[tuple[int, Ending]]:
    return _unpack("endings", data, _endings)


def _endings(ids: bytes, kinds: bytes) -> list[tuple[int, Ending]]:
    unpacked = struct.unpack(f"<{len(kinds)}q", ids)
    return [(task_id, _ENDINGS[kind]) for task_id, kind in zip(unpacked, kinds, strict=True)]


def progress_state(value: int) -> ProgressState:
    try:
        return _STATES[value]
    except KeyError:
        raise RecordUnreadable(f"progress: unknown state {value!r}") from None


# --- whole rows, for stores without columns --------------------------------------------------


def encode_task(row: TaskRow) -> bytes:
    return _pack(*row)


def encode_tasks(rows: Iterable[TaskRow]) -> list[bytes]:
    """Each as ``encode_task`` gives it; half the cost a row."""
    pack = msgpack.Packer().pack
    return [pack((VERSION, *row)) for row in rows]


def decode_task(data: bytes) -> TaskRow:
    return _unpack("task", data, _task)


def _task(
    task_id: int, due_ms: int, topic: str, body: bytes, extras: Iterable[Any] | None
) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, None if extras is None else _extras(*extras))


def encode_progress(row: ProgressRow) -> bytes:
    return _pack(*row)


def decode_progress(data: bytes) -> ProgressRow:
    return _unpack("progress", data, _progress)


def _progress(
    task_id: int, group: str, state: int, attempt: int, at_ms: int, epoch: int, failures: Any
) -> ProgressRow:
    return ProgressRow(task_id, group, _STATES[state], attempt, at_ms, epoch, _failures(failures))


def encode_dead(row: DeadRow) -> bytes:
    return _pack(*row)


def decode_dead(data: bytes) -> DeadRow:
    return _unpack("dead letter", data, _dead)


def _dead(
    task_id: int, group: str, topic: str, died_ms: int, attempt: int, reason: str, failures: Any
) -> DeadRow:
    return DeadRow(task_id, group, topic, died_ms, attempt, reason, _failures(failures))


def encode_group(row: GroupRow) -> bytes:
    return _pack(*row)


def decode_group(data: bytes) -> GroupRow:
    return _unpack("group", data, _group)


def _group(topic: str, group: str, since_ms: int) -> GroupRow:
    return GroupRow(topic, group, since_ms)


def encode_session(row: SessionRow) -> bytes:
    return _pack(*row)


def decode_session(data: bytes) -> SessionRow:
    return _unpack("session", data, _session)


def _session(session: bytes, floor: int, seen_ms: int, outcomes: Any) -> SessionRow:
    return SessionRow(session, floor, seen_ms, _outcomes(outcomes))
