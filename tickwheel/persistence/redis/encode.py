"""Effects as operations for the scripts, cut into parts that one script may take.

An operation is a flat run of arguments: name, number of the key, number of arguments, arguments.
Scripts hand those on to Redis a thousand at a time, so pairs stay together at even counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from tickwheel.persistence.codec import (
    encode_dead,
    encode_endings,
    encode_group,
    encode_progress,
    encode_session,
    encode_tasks,
)
from tickwheel.persistence.redis.layout import (
    IN_PREPARE,
    KEY,
    group_field,
    group_text,
    id_text,
    member,
    prepare_score,
)
from tickwheel.wheel.effects import Effects

PART_BYTES_MAX = 8 << 20
PART_ARGS_MAX = 20_000
"""About 5,000 new tasks: 25 ms of Redis's time. Everybody waits while a script runs."""
SLICE_ARGS = 1_000

Op = tuple[bytes, bytes, list[bytes]]
"""Name, number of the key, arguments."""


def operations(effects: Effects, endings_max: int) -> list[Op]:
    """Everything of a batch but its marks."""
    ops: list[Op] = []
    _tasks(ops, effects)
    _progress(ops, effects)
    _dead(ops, effects)
    _add(ops, b"HSET", "groups", _pairs(
        (group_field(*key), encode_group(row))
        for key, row in effects.groups.items() if row is not None
    ))  # fmt: skip
    _add(ops, b"HDEL", "groups", [
        group_field(*key) for key, row in effects.groups.items() if row is None
    ])  # fmt: skip
    _add(ops, b"HSET", "sessions", _pairs(
        (key.hex().encode(), encode_session(row))
        for key, row in effects.sessions.items() if row is not None
    ))  # fmt: skip
    _add(ops, b"HDEL", "sessions", [
        key.hex().encode() for key, row in effects.sessions.items() if row is None
    ])  # fmt: skip
    if effects.ended:
        _add(ops, b"END", "task", [id_text(task_id) for task_id in effects.ended])
        ended = list(effects.ended.items())[-endings_max:]
        count, record = b"%d" % len(ended), encode_endings(dict(ended))
        _add(ops, b"ENDING", "endings", [b"%d" % endings_max, count, record])
    return ops


def _tasks(ops: list[Op], effects: Effects) -> None:
    for name, rows in ((b"NEW", effects.enqueued), (b"ZADD", effects.updated)):
        if rows:
            ids = [b"%019d" % task_id for task_id in rows]
            dues = [b"%d" % row.due_ms for row in rows.values()]
            ops.append((name, KEY["store"], _pairs(zip(dues, ids, strict=True))))
            records = encode_tasks(rows.values())
            ops.append((b"HSET", KEY["task"], _pairs(zip(ids, records, strict=True))))


def _progress(ops: list[Op], effects: Effects) -> None:
    if not effects.progress:
        return
    records, queued, gone, dropped, touched = [], [], [], [], []
    for (task_id, group), row in effects.progress.items():
        name = member(task_id, group)
        if row is None:
            dropped.append(name)
            gone.append(name)
            continue
        records += [name, encode_progress(row)]
        touched += [id_text(task_id), group_text(group)]
        if row.state in IN_PREPARE:
            queued += [prepare_score(row), name]
        else:
            gone.append(name)
    _add(ops, b"HSET", "progress", records)
    _add(ops, b"HDEL", "progress", dropped)
    _add(ops, b"ZADD", "prepare", queued)
    _add(ops, b"ZREM", "prepare", gone)
    _add(ops, b"TOUCH", "touched", touched)


def _dead(ops: list[Op], effects: Effects) -> None:
    if not effects.dead:
        return
    rows = [(key, row) for key, row in effects.dead.items() if row is not None]
    gone = [member(*key) for key, row in effects.dead.items() if row is None]
    _add(ops, b"HSET", "dead_record", _pairs((member(*key), encode_dead(row)) for key, row in rows))
    _add(ops, b"ZADD", "dead", _pairs((b"0", member(*key)) for key, _ in rows))
    _add(ops, b"TOUCH", "touched", _pairs((id_text(i), group_text(g)) for (i, g), _ in rows))
    _add(ops, b"HDEL", "dead_record", gone)
    _add(ops, b"ZREM", "dead", gone)


def _pairs(pairs: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    return list(chain.from_iterable(pairs))


def _add(ops: list[Op], name: bytes, key: str, args: list[bytes]) -> None:
    if args:
        ops.append((name, KEY[key], args))


def parts(ops: Sequence[Op]) -> tuple[list[list[bytes]], int]:
    """Flat arguments of each script that the operations need, and all bytes in them.

    One list, possibly empty, for nearly every batch.
    """
    size_bytes = sum(sum(map(len, args)) for _, _, args in ops)
    if size_bytes <= PART_BYTES_MAX and sum(len(args) for _, _, args in ops) <= PART_ARGS_MAX:
        return [_flat(ops)], size_bytes
    found: list[list[bytes]] = []
    part: list[Op] = []
    part_args = part_bytes = 0
    for op in _slices(ops):
        op_bytes = sum(map(len, op[2]))
        full = part_args + len(op[2]) > PART_ARGS_MAX or part_bytes + op_bytes > PART_BYTES_MAX
        if part and full:
            found.append(_flat(part))
            part, part_args, part_bytes = [], 0, 0
        part.append(op)
        part_args += len(op[2])
        part_bytes += op_bytes
    found.append(_flat(part))
    return found, size_bytes


def _slices(ops: Sequence[Op]) -> list[Op]:
    """Operations of a thousand arguments and 8 MiB at most; a pair is never divided."""
    found: list[Op] = []
    for name, key, args in ops:
        waiting = [args[i : i + SLICE_ARGS] for i in range(0, len(args), SLICE_ARGS)][::-1]
        while waiting:
            some = waiting.pop()
            if len(some) > 3 and sum(map(len, some)) > PART_BYTES_MAX:
                middle = len(some) // 4 * 2
                waiting += [some[middle:], some[:middle]]
            else:
                found.append((name, key, some))
    return found


def _flat(ops: Sequence[Op]) -> list[bytes]:
    flat: list[bytes] = []
    for name, key, args in ops:
        flat += (name, key, b"%d" % len(args))
        flat += args
    return flat
