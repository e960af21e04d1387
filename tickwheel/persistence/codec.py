"""The encoding of records in stores, backups and the history.

Every record is a msgpack array whose first element is the version it was written with. Retry
policies and settings are plain fields inside records, and belong to the record's version. This
module knows the values of ``model.records`` and msgpack; it must not know stores, keys or the wire.

Version 1 of a kind of record has the fields of its value in order. Trailing fields that have their
defaults are left out (``shortened``). Invariants:

* Records of every released version can be decoded forever; golden files in the tests prove it.
* A version that this release does not know is refused, never guessed.
* A released version never changes. A new field needs a new version of its kind of record, and
  another build function in its decoder.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack

from tickwheel.model.kinds import (
    KINDS,
    Key,
    Kind,
    defaults_from,
    options_fields,
    options_of,
    shortened,
)
from tickwheel.model.records import (
    NO_PAST,
    DeadRow,
    Failure,
    Outcome,
    Past,
    ProgressRow,
    ProgressState,
    TaskOptions,
    TaskRow,
    is_key_alone,
    keys_alone,
)
from tickwheel.persistence.contract import Claim, NodeRecord, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from tickwheel.model.kinds import RecordKey


VERSION = 1
"""The format version of every kind of record."""

ROWS_PER_BATCH = 1_000
"""Maximum rows in one batch while a store is filled; encoding a batch blocks the event loop."""
BYTES_PER_BATCH = 4 << 20
"""While a store is filled, a batch ends when its bodies or records reach this many bytes."""

_T = TypeVar("_T")
_STATES = {int(state): state for state in ProgressState}
_ENDINGS = {int(outcome): outcome for outcome in Outcome}


class RecordUnreadable(StoreError):
    """Stored bytes are not a record of a version that this release reads."""


def pack(*fields: object, version: int = VERSION) -> bytes:
    """Encode a record with these fields."""
    packed: bytes = msgpack.packb((version, *fields))
    return packed


def unpack(name: str, data: bytes, *builds: Callable[..., _T]) -> _T:
    """Decode a record with the build function of its version; ``builds`` begin with version 1.
    Raise RecordUnreadable, whose message begins with ``name``."""
    try:
        record = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordUnreadable(f"{name}: not a msgpack value: {error}") from error
    if not isinstance(record, tuple) or not record or type(record[0]) is not int:
        raise RecordUnreadable(f"{name}: not an array that starts with its version")
    version, newest = record[0], len(builds)
    if not 0 < version <= newest:
        versions = f"versions 1 to {newest}" if newest > 1 else "version 1"
        raise RecordUnreadable(
            f"{name}: version {version}; this release reads {versions}"
            + ("; a newer release wrote it" if version > newest else "")
        )
    try:
        return builds[version - 1](*record[1:])
    except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
        raise RecordUnreadable(f"{name}: wrong fields: {error!r}") from error


_RARE_PROGRESS = defaults_from(ProgressRow, "failed")
_RARE_PAST = defaults_from(Past, "failed")
_RARE_DEAD = defaults_from(DeadRow, "deaths")


# --- records of every kind ------------------------------------------------------------------


def encode_record(kind: Kind[_T], row: _T) -> bytes:
    return pack(*kind.fields(row), version=len(kind.builds))


def decode_record(kind: Kind[_T], data: bytes) -> _T:
    return unpack(kind.name, data, *kind.builds)


def encode_records(records: Mapping[RecordKey, Any]) -> list[bytes | None]:
    """Encode the records of a batch, in order, as ``encode_record`` does. None: removed."""
    pack = msgpack.Packer().pack
    return [
        None if row is None else pack((len(kind.builds), *kind.fields(row)))
        for (kind, _), row in records.items()
    ]


def key_text(key: Key) -> str:
    """Return a key as stores write it: its parts separated by one space, bytes in hex. Percent
    signs and spaces are escaped to keep keys distinct, NUL because SQLite's JSON rejects it."""
    if isinstance(key, str):
        return _escaped(key)
    return " ".join(
        [
            part.hex()
            if isinstance(part, bytes)
            else _escaped(part)
            if isinstance(part, str)
            else str(part)
            for part in key
        ]
    )


def _escaped(text: str) -> str:
    if "%" in text or " " in text or "\0" in text:
        return text.replace("%", "%25").replace(" ", "%20").replace("\0", "%00")
    return text


def kind_of(number_or_name: int | str) -> Kind[Any]:
    """Return the kind with this number or name. Raise RecordUnreadable if there is none."""
    for kind in KINDS.values():
        if number_or_name in (kind.number, kind.name):
            return kind
    raise RecordUnreadable(
        f"this release does not know the record kind {number_or_name!r}; a newer release wrote it"
    )


def in_parts(items: Iterable[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield lists of items that end at ``ROWS_PER_BATCH`` items or ``BYTES_PER_BATCH`` bytes."""
    part: list[_T] = []
    size = 0
    for item in items:
        part.append(item)
        size += size_of(item)
        if len(part) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
            yield part
            part, size = [], 0
    if part:
        yield part


def in_batches(records: Mapping[RecordKey, Any]) -> Iterator[dict[RecordKey, Any]]:
    """Yield the records in parts that each fit into one batch."""
    parts = in_parts(records.items(), lambda item: len(encode_record(item[0][0], item[1])))
    return map(dict, parts)


# --- parts of a row, for stores that keep the other fields in columns ------------------------


def encode_extras(options: TaskOptions | None) -> bytes | None:
    return None if options is None else pack(*options_fields(options))


def encode_extras_of(all_options: Collection[TaskOptions | None]) -> Sequence[bytes | str | None]:
    """Encode the options of many tasks as a column. Options that consist of a key become the key's
    text; others are encoded as in ``encode_extras``. ``decode_extras_of`` reads both forms."""
    keys = keys_alone(all_options)
    if keys is not None:
        return keys
    pack = msgpack.Packer().pack
    return [
        options
        if options is None
        else options[0]
        if is_key_alone(options)
        else pack(extras_record(options))
        for options in all_options
    ]


def extras_record(options: TaskOptions) -> tuple[object, ...]:
    """Return the array that ``encode_extras`` packs."""
    return (VERSION, *options_fields(options))


def decode_extras_of(data: bytes | str | None) -> TaskOptions | None:
    """Decode one element of the column that ``encode_extras_of`` returns."""
    return TaskOptions(data) if isinstance(data, str) else decode_extras(data)


def decode_extras(data: bytes | None) -> TaskOptions | None:
    return None if not data else unpack("extras", data, options_of)


def encode_past(past: Past) -> bytes | None:
    """Encode a task's failures. Return None if it has none, like most tasks."""
    return None if past == NO_PAST else pack(*shortened(past, _RARE_PAST))


def decode_past(data: bytes | None) -> Past:
    return NO_PAST if not data else unpack("failures", data, _past)


def _past(items: Iterable[Any], *counts: int) -> Past:
    return Past(_failures(items), *counts)


def _failures(items: Iterable[Any]) -> tuple[Failure, ...]:
    return tuple(
        Failure(attempt, at_ms, reason, subscriber) for attempt, at_ms, reason, subscriber in items
    )


def encode_endings(ended: dict[int, Outcome]) -> bytes:
    """Encode a batch of outcomes: 8-byte little-endian ids, then one byte for each outcome."""
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


class Heads(NamedTuple):
    """The fields of tasks that recovery needs, as columns of equal length."""

    ids: list[int]
    dues_ms: list[int]
    topics: list[str]
    keys: list[str | None]


def encode_task(row: TaskRow) -> bytes:
    return encode_tasks((row,))[0]


def encode_tasks(rows: Iterable[TaskRow]) -> list[bytes]:
    """Encode many tasks as ``encode_task`` does, at half the cost per task."""
    pack = msgpack.Packer().pack
    return [
        pack((VERSION, *row))
        if row[4] is None
        else pack((VERSION, *row[:4], options_fields(row[4])))
        for row in rows
    ]


def decode_task(data: bytes) -> TaskRow:
    return unpack("task", data, _task)


def _task(
    task_id: int, due_ms: int, topic: str, body: bytes, options: Iterable[Any] | None
) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, None if options is None else options_of(*options))


def decode_heads(records: Sequence[bytes]) -> Heads:
    """Decode the heads of many tasks, at half the cost of ``decode_task`` per task. Records can
    lack their bodies. Raise RecordUnreadable."""
    unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=0)
    unpacker.feed(b"".join(records))
    ids, dues_ms, topics, keys = Heads([], [], [], [])
    try:
        for version, task_id, due_ms, topic, _, options in unpacker:
            if version != VERSION:
                raise ValueError
            ids.append(task_id)
            dues_ms.append(due_ms)
            topics.append(topic)
            keys.append(options[0] if options else None)
    except (TypeError, ValueError, msgpack.UnpackException):
        for record in records:
            decode_task(record)  # raises an error that describes the record
        raise
    return Heads(ids, dues_ms, topics, keys)


def encode_progress(row: ProgressRow) -> bytes:
    return pack(*shortened(row, _RARE_PROGRESS))


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
    return pack(*shortened(row, _RARE_DEAD))


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


# --- nodes ---------------------------------------------------------------------------------------

NODES_FORMAT = 1


def encode_node(record: NodeRecord) -> str:
    return json.dumps({"format": NODES_FORMAT, **asdict(record)}, separators=(",", ":"))


def decode_node(name: str, text: str) -> NodeRecord | None:
    """Return the record in ``text``, or None if its format is unknown or newer."""
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("format") != NODES_FORMAT:
            return None
        claims = tuple(Claim(**claim) for claim in fields.pop("claims"))
        standbys = {int(shard): address for shard, address in fields.pop("standbys").items()}
        record = NodeRecord(claims=claims, standbys=standbys, **fields)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return replace(record, name=name)
