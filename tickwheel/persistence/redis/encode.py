"""Effects as operations for the scripts, cut into parts that one script may take.

An operation is a flat run of arguments: name, number of the key, number of arguments, arguments.
Scripts hand those on to Redis a thousand at a time, so pairs stay together at even counts. Of new
tasks (``new_tasks``) one argument holds them all.
``records_of`` and ``Records`` are all that the mirror knows of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from tickwheel.model.effects import Effects
from tickwheel.model.records import TaskRow
from tickwheel.persistence.codec import (
    encode_dead,
    encode_endings,
    encode_group,
    encode_progress,
    encode_session,
    encode_tasks,
)
from tickwheel.persistence.redis.drivers import Packed
from tickwheel.persistence.redis.layout import (
    IN_PREPARE,
    KEY,
    group_field,
    group_text,
    id_text,
    member,
    prepare_score,
)
from tickwheel.persistence.redis.packing import joined, pack_args

PART_BYTES_MAX = 8 << 20
PART_ARGS_MAX = 80_000
"""About 20,000 new tasks, more than a frame may have: 80 ms of Redis's time. Everybody waits
while a script runs; but parts cost half as much again, and everybody would wait for those."""
SLICE_ARGS = 1_000

Op = tuple[bytes, bytes, list[bytes]]
"""Name, number of the key, arguments."""


class Records(NamedTuple):
    """The encoded rows of a batch, each list in the order of its map; a dropped row is None.

    What is sent to Redis and what the mirror keeps are the same bytes objects.
    """

    enqueued: list[bytes]
    enqueued_bytes: int
    """All of these."""
    updated: list[bytes]
    progress: list[bytes | None]
    dead: list[bytes | None]
    groups: list[bytes | None]
    sessions: list[bytes | None]
    endings: tuple[int, bytes] | None
    """How many endings, at most ``endings_max``, and their record."""


def records_of(
    effects: Effects, endings_max: int, enqueued: list[bytes], enqueued_bytes: int
) -> Records:
    """A batch's rows, encoded once; those of its new tasks are there already."""
    endings = None
    if effects.ended:
        ended = list(effects.ended.items())[-endings_max:]
        endings = (len(ended), encode_endings(dict(ended)))
    return Records(
        enqueued,
        enqueued_bytes,
        encode_tasks(effects.updated.values()) if effects.updated else [],
        [None if row is None else encode_progress(row) for row in effects.progress.values()],
        [None if row is None else encode_dead(row) for row in effects.dead.values()],
        [None if row is None else encode_group(row) for row in effects.groups.values()],
        [None if row is None else encode_session(row) for row in effects.sessions.values()],
        endings,
    )


def operations(effects: Effects, endings_max: int, records: Records) -> list[Op]:
    """Everything of a batch but its marks and its new tasks. ``records`` are its own."""
    ops: list[Op] = []
    _updated(ops, effects.updated, records.updated)
    if effects.progress:
        _progress(ops, effects, records.progress)
    if effects.dead:
        _dead(ops, effects, records.dead)
    _fields(ops, "groups", [group_field(*key) for key in effects.groups], records.groups)
    _fields(ops, "sessions", [key.hex().encode() for key in effects.sessions], records.sessions)
    if records.endings is not None:
        _add(ops, b"END", "task", [id_text(task_id) for task_id in effects.ended])
        count, record = records.endings
        _add(ops, b"ENDING", "endings", [b"%d" % endings_max, b"%d" % count, record])
    return ops


def _updated(ops: list[Op], rows: dict[int, TaskRow], records: list[bytes]) -> None:
    if rows:
        ids = [b"%019d" % task_id for task_id in rows]
        dues = [b"%d" % row.due_ms for row in rows.values()]
        ops.append((b"ZADD", KEY["store"], _pairs(zip(dues, ids, strict=True))))
        ops.append((b"HSET", KEY["task"], _pairs(zip(ids, records, strict=True))))


def _progress(ops: list[Op], effects: Effects, records: list[bytes | None]) -> None:
    written, queued, gone, dropped, touched = [], [], [], [], []
    for ((task_id, group), row), record in zip(effects.progress.items(), records, strict=True):
        name = member(task_id, group)
        if row is None or record is None:
            dropped.append(name)
            gone.append(name)
            continue
        written += [name, record]
        touched += [id_text(task_id), group_text(group)]
        if row.state in IN_PREPARE:
            queued += [prepare_score(row), name]
        else:
            gone.append(name)
    _add(ops, b"HSET", "progress", written)
    _add(ops, b"HDEL", "progress", dropped)
    _add(ops, b"ZADD", "prepare", queued)
    _add(ops, b"ZREM", "prepare", gone)
    _add(ops, b"TOUCH", "touched", touched)


def _dead(ops: list[Op], effects: Effects, records: list[bytes | None]) -> None:
    kept = [key for key, row in effects.dead.items() if row is not None]
    gone = [member(*key) for key, row in effects.dead.items() if row is None]
    _fields(ops, "dead_record", [member(*key) for key in effects.dead], records)
    _add(ops, b"ZADD", "dead", _pairs((b"0", member(*key)) for key in kept))
    _add(ops, b"TOUCH", "touched", _pairs((id_text(i), group_text(g)) for i, g in kept))
    _add(ops, b"ZREM", "dead", gone)


def _fields(ops: list[Op], key: str, names: list[bytes], records: list[bytes | None]) -> None:
    """Fields of a hash: set, or dropped when there is no record."""
    if names:
        pairs = list(zip(names, records, strict=True))
        _add(ops, b"HSET", key, _pairs((n, r) for n, r in pairs if r is not None))
        _add(ops, b"HDEL", key, [name for name, record in pairs if record is None])


def _pairs(pairs: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    return list(chain.from_iterable(pairs))


def _add(ops: list[Op], name: bytes, key: str, args: list[bytes]) -> None:
    if args:
        ops.append((name, KEY[key], args))


def packed(ops: Iterable[Op]) -> list[Packed]:
    """Operations of a thousand arguments and 8 MiB at most; a pair is never divided."""
    found: list[Packed] = []
    for name, key, args in ops:
        waiting = [args[i : i + SLICE_ARGS] for i in range(0, len(args), SLICE_ARGS)][::-1]
        while waiting:
            some = waiting.pop()
            if len(some) > 3 and sum(map(len, some)) > PART_BYTES_MAX:
                middle = len(some) // 4 * 2
                waiting += [some[middle:], some[:middle]]
            else:
                found.append(pack_args((name, key, b"%d" % len(some), *some)))
    return found


def parts(ops: Sequence[Packed]) -> tuple[list[Packed], int]:
    """What each script gets that the operations need, and all bytes in them.

    One part, possibly empty, for nearly every batch.
    """
    found: list[Packed] = []
    part: list[Packed] = []
    part_args = part_bytes = size_bytes = 0
    for op in ops:
        weight, op_bytes = op.weight or op.count, len(op.data)
        full = part_args + weight > PART_ARGS_MAX or part_bytes + op_bytes > PART_BYTES_MAX
        if part and full:
            found.append(joined(part))
            part, part_args, part_bytes = [], 0, 0
        part.append(op)
        part_args += weight
        part_bytes += op_bytes
        size_bytes += op_bytes
    found.append(joined(part))
    return found, size_bytes
