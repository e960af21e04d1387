"""The layout of a shard in Redis: its keys, the scripts that use them, and the operations of a
batch for these scripts.

**Keys.** Only this module defines the keys that an operator sees with redis-cli. All keys of a
shard have one hash tag, so Redis Cluster keeps them on one node. Layout 2, for the shard ``S`` =
``{tw:default:0}``:

| key | type | contents |
|---|---|---|
| S:wheel | hash | epoch, owner, last (batch), position_ms, incarnation, format, id_mark, clean, … |
| S:store | zset | StoreQueue: every unfinished task; score: see ``TopicNumbers`` |
| S:topics | hash | number → name of the topics that scores of the StoreQueue contain |
| S:task | hash | id → record (all fields) |
| S:prepare | zset | PrepareQueue: id/group in flight or waiting for a retry; score: see below |
| S:progress | hash | id/group → record (exact deadline, attempt, failures) |
| S:touched | hash | id → the groups that have or had a row in progress or dead_record |
| S:dead | zset | id/group of every dead letter, score 0: ordered by id, then group |
| S:dead_record | hash | id/group → record |
| S:records | hash | kind and key → record: groups, sessions, schedules, … (model/kinds.py) |
| S:endings | list | the newest outcomes, an element for each batch: "count:record" |
| S:stage:1 … | list | parts of a batch too large for one script; deleted when it is decided |
| S:leader | string | the leader's lease, with a time to live (the election's key) |
| S:standbys | zset | the standbys; score: server uptime in seconds when it last polled |

Invariants: a stored id has 19 digits with leading zeros, so the order of bytes is the order of ids.
No number above 2^53 is ever a Lua number.

The wheel's field ``format`` contains the number of the layout. Opening a shard that has an older
layout updates the number, and older releases then refuse the shard. Keys that a later layout adds
begin empty, and records have their own versions. (Shards from before the first release have a field
``layout`` instead, and are refused.) In layout 1, a score of the StoreQueue was the due time in
milliseconds, which is below every score of layout 2: so the tasks that an upgrade has not changed
yet are the first of the queue.

**Scripts.** Scripts are composed of the files in ``lua/``. They apply a batch (at once, or staged
in parts, sealed, and applied); open, claim, close and rewrite a shard; read without writing; and
serve ``tickwheel init`` and the leader's lease.

Every script begins with the names of the keys, the fence and the first write. Because of the
pitfalls of Lua in Redis (6.2 to 7, Valkey), every script follows these rules:

* No call has more than 1,000 arguments (``unpack`` fails at about 8,000).
* A script makes all its checks before its first write, because an error does not undo writes. Redis
  itself refuses a script (out of memory, read-only, no replicas) only at its first write, and
  ``begin`` makes the first write a harmless one.
* When Redis is out of memory, it refuses a script whose first write can allocate memory, but
  permits one that begins with DEL. So a batch that creates no task always succeeds.
* Ids and epochs are compared as strings; numbers in Lua lose digits above 2^53.

**Operations.** Effects are cut into parts that fit into one script. An operation is a flat sequence
of arguments: name, number of the key, number of arguments, arguments. Scripts pass these to Redis
in slices of 1,000, an even number that keeps pairs together. The mirror uses only ``kind_in``
and ``Records``.

One argument contains up to a thousand new tasks, as a msgpack array that Lua in Redis unpacks in
one call. If they were separate arguments, Redis would first create an object for each task, at 0.3
µs. The encoding uses only msgpack forms that all versions of Redis read. Tasks are encoded when
they are added; ``operations`` only sorts and joins. Scores ascend within a batch, because the
sorted set then inserts each task near the previous one.

New tasks are most of a batch's cost in this process, so they are encoded ahead, while Redis still
processes the previous batch. Invariant: tasks encoded ahead are used only if the open batch still
begins with exactly the same rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain, islice
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.model.kinds import Kind, RecordKey
from tickwheel.model.records import MOMENT_MS_MAX, ProgressRow, ProgressState
from tickwheel.persistence.codec import (
    encode_dead,
    encode_endings,
    encode_progress,
    encode_records,
    encode_tasks,
    key_text,
    kind_of,
)
from tickwheel.persistence.redis.driver import Packed, joined, pack_args

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tickwheel.model.kinds import Effects
    from tickwheel.model.records import TaskRow

LAYOUT = 2
ID_MAX = 2**63 - 1
RETRY_MAX = 999
"""Maximum number of failures that the last three digits of a score can show."""

NAMES = (
    "wheel", "store", "task", "prepare", "progress", "touched", "dead", "dead_record",
    "records", "endings", "scratch", "topics",
)  # fmt: skip
"""The keys in the order in which they are passed to scripts: KEYS[1] is the wheel. ``scratch``
never exists."""
TYPES = (
    "hash", "zset", "hash", "zset", "hash", "hash", "zset", "hash",
    "hash", "list", "string", "hash",
)  # fmt: skip
KEY = {name: str(i + 1).encode() for i, name in enumerate(NAMES)}
"""Name of a key → the number that stands for it in operations."""

IN_PREPARE = frozenset((ProgressState.IN_FLIGHT, ProgressState.WAITING, ProgressState.HELD))


class Keys:
    """The key names of one shard."""

    def __init__(self, prefix: str, namespace: str, shard: int) -> None:
        self.shard = f"{{{prefix}:{namespace}:{shard}}}"
        self.all = tuple(f"{self.shard}:{name}".encode() for name in NAMES)
        self.named = dict(zip(NAMES, self.all, strict=True))
        self.leader = f"{self.shard}:leader".encode()
        self.standbys = f"{self.shard}:standbys".encode()

    def stage(self, part: int) -> bytes:
        """Return the key of part ``part`` of a large batch. Parts are numbered from 1."""
        return f"{self.shard}:stage:{part}".encode()


def id_text(task_id: int) -> bytes:
    return b"%019d" % task_id


def packed_ids(ids: Sequence[int]) -> Packed:
    """Return the texts of ids as the last arguments of a command."""
    return Packed(len(ids), (b"$19\r\n%019d\r\n" * len(ids)) % tuple(ids))


def member(task_id: int, group: str) -> bytes:
    """Return the member that identifies a task and group in the PrepareQueue, progress and dead
    letters."""
    return b"%019d/%b" % (task_id, group_text(group))


def group_text(group: str) -> bytes:
    """Return a group's name as used in a member. Line feeds are escaped, because they separate
    groups in ``touched``."""
    return group.replace("%", "%25").replace("\n", "%0A").encode()


def split_member(data: bytes) -> tuple[int, str]:
    task_id, _, group = data.partition(b"/")
    return int(task_id), group.decode().replace("%0A", "\n").replace("%25", "%")


def record_field(key: RecordKey) -> bytes:
    """Return the hash field of a record: its kind and key as readable text."""
    kind, parts = key
    return f"{kind.name} {key_text(parts)}".encode()


def kind_in(field: bytes) -> Kind[Any]:
    """Return the kind of the record in this field. Raise RecordUnreadable."""
    return kind_of(field.partition(b" ")[0].decode())


def prepare_score(row: ProgressRow) -> bytes:
    """Return the score in the PrepareQueue: the deadline's second * 1000 + failures (up to 999)."""
    return b"%d" % (row.at_ms // 1000 * 1000 + min(row.failed, RETRY_MAX))


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and the digest by which Redis caches it."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


_FOLDER = files(__package__) / "lua"


def _script(*names: str) -> Script:
    """Return the script composed of these files, in order."""
    return Script("".join(_FOLDER.joinpath(f"{name}.lua").read_text("utf-8") for name in names))


COMMIT = _script("keys", "fence", "apply", "commit")
STAGE = _script("keys", "fence", "stage")
SEAL = _script("keys", "fence", "seal")
APPLY_PART = _script("keys", "fence", "apply", "apply_part")
UNSTAGE = _script("keys", "fence", "unstage")

OPEN = _script("keys", "open")
CLAIM = _script("keys", "claim")
CLOSE = _script("keys", "fence", "close")
REWRITE = _script("keys", "rewrite")
RIGHTS = _script("keys", "rights")
GROUPS = _script("groups")

READ = _script("keys", "sees", "read")
DEAD_PAGE = _script("keys", "sees", "dead_page")
POSITION = _script("keys", "sees", "position")
RECORDS = _script("keys", "sees", "records")
RESCORE = _script("keys", "fence", "rescore")

INIT_LOOK = _script("keys", "init_seen", "init_look")
INIT_LAY_OUT = _script("keys", "init_seen", "init_lay_out")
INIT_UPGRADE = _script("keys", "init_seen", "init_upgrade")

LEADER_LOOK = _script("leader", "leader_look")
LEADER_ACQUIRE = _script("leader", "leader_acquire")
LEADER_RENEW = _script("leader", "leader_renew")
LEADER_RELEASE = _script("leader", "leader_release")
NODES_BEAT = _script("nodes_beat")


CODE_BITS = 9
SCORE_MIN = 1 << 52
"""The lowest score of layout 2."""
NUMBERS_MAX = (1 << (CODE_BITS - 1)) - 1
"""Maximum topics of a shard that have a number."""
DUE_MS_MAX = (1 << (52 - CODE_BITS)) - 1
"""The latest due time of a score below 2^53, so that it is an exact double."""
assert MOMENT_MS_MAX <= DUE_MS_MAX


class TopicNumbers:
    """The numbers of topics in the scores of the StoreQueue, from which a start reads all that the
    wheel has of a task: ``score = 2^52 + due_ms * 2^9 + number * 2 + has_key``.

    A start reads the records of tasks with number 0: those of a topic without a number, because
    ``NUMBERS_MAX`` others have one, and those with a due time that no score contains. Each batch
    writes the numbers that it uses, so Redis has them whatever batches are repeated, refused or
    lost.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        """Number → topic. A topic that had no task for a while can have two numbers."""
        self._used: set[int] = set()
        self._index()

    def load(self, names: Sequence[bytes | None]) -> None:
        """Set the numbers that Redis has; ``names``: the topics with the numbers from 1 on."""
        pairs = enumerate(names, 1)
        self._names = {number: name.decode() for number, name in pairs if name is not None}
        self._used.clear()
        self._index()

    def keep(self, numbers: set[int]) -> None:
        """Make all numbers free except these, which tasks have, and those used since ``load``."""
        kept = numbers | self._used
        self._names = {number: topic for number, topic in self._names.items() if number in kept}
        self._index()

    def _index(self) -> None:
        self._numbers = {topic: number for number, topic in self._names.items()}
        self._free = [number for number in range(NUMBERS_MAX, 0, -1) if number not in self._names]

    def of(self, topic: str) -> int:
        """Return the number of a topic, which can be a new one; 0 if none is free."""
        number = self._numbers.get(topic, 0)
        if not number and self._free:
            number = self._numbers[topic] = self._free.pop()
            self._names[number] = topic
        if number:
            self._used.add(number)
        return number

    def names(self) -> list[str | None]:
        """Return the topic of each code, None for codes that do not tell it."""
        names: list[str | None] = [None] * (1 << CODE_BITS)
        for number, topic in self._names.items():
            names[2 * number] = names[2 * number + 1] = topic
        return names

    def scores(self, rows: Sequence[TaskRow]) -> list[int]:
        """Return the scores of these tasks."""
        topics: Collection[str] = {row[2] for row in rows}
        if len(topics) > 1:
            topics = dict.fromkeys([row[2] for row in rows])  # in order
        bases = {topic: SCORE_MIN + 2 * self.of(topic) for topic in topics}
        dues_ms = [row[1] for row in rows]
        if rows and not 0 <= min(dues_ms) <= max(dues_ms) <= DUE_MS_MAX:
            return [_score(bases[row[2]], row) for row in rows]
        if len(bases) == 1 and [row[4] for row in rows].count(None) == len(rows):
            (base,) = bases.values()
            return [base + (due_ms << CODE_BITS) for due_ms in dues_ms]
        return [
            bases[row[2]] + (row[1] << CODE_BITS) + (row[4] is not None and row[4].key is not None)
            for row in rows
        ]

    def pairs(self, topics: Iterable[str]) -> list[bytes]:
        """Return numbers and names of these topics, for HSET."""
        numbers = self._numbers
        return _pairs((b"%d" % numbers[one], one.encode()) for one in topics if one in numbers)


def _score(base: int, row: TaskRow) -> int:
    due_ms = min(max(0, row.due_ms), DUE_MS_MAX)
    if due_ms != row.due_ms:
        base = SCORE_MIN
    return base + (due_ms << CODE_BITS) + (row.options is not None and row.options.key is not None)


NEW_ROWS = 500
"""Number of new tasks in one operation; they take a thousand arguments."""
NEW_BYTES = 1 << 20
_ID_SIZE, _PAIR_SIZE = 1 + 19, 1 + 16 + 1 + 19
_NEW = pack_args((b"NEW", KEY["store"], b"1")).data
_RECORDS = pack_args((b"RECORDS", KEY["task"], b"1")).data


class NewTasks:
    """The new tasks of one batch."""

    def __init__(self, numbers: TopicNumbers) -> None:
        self._numbers = numbers
        self._queue: list[bytes] = []
        """Score and id of each task, packed as two consecutive strings."""
        self._record_operations: list[Packed] = []

    def add(self, rows: Sequence[TaskRow], records: Sequence[bytes]) -> None:
        """Add tasks with their records."""
        if not rows:
            return
        queue = _score_pairs(self._numbers.scores(rows), rows)
        ids = [pair[-_ID_SIZE:] for pair in queue]
        for start in range(0, len(rows), NEW_ROWS):
            stop = start + NEW_ROWS
            _append_records(self._record_operations, ids[start:stop], records[start:stop])
        # All scores have 16 digits, so the order of the bytes equals the order of scores. The
        # final sort is fast because its parts are already sorted.
        queue.sort()
        self._queue += queue

    def operations(self) -> list[Packed]:
        """Return the operations that store the tasks, records first."""
        queue, operations = self._queue, self._record_operations.copy()
        queue.sort()
        for start in range(0, len(queue), NEW_ROWS):
            pairs = queue[start : start + NEW_ROWS]
            operations.append(_operation(_NEW, len(pairs), b"".join(pairs)))
        return operations


def _operation(name: bytes, pairs: int, data: bytes) -> Packed:
    size = (2 * pairs).to_bytes(2, "big")
    packed = b"%b$%d\r\n\xdc%b%b\r\n" % (name, len(data) + 3, size, data)
    return Packed(4, packed, weight=3 + 2 * pairs)


def _head(size: int) -> bytes:
    """Return the msgpack head of a string of this size."""
    if size < 1 << 16:
        return b"\xda" + size.to_bytes(2, "big")
    return b"\xdb" + size.to_bytes(4, "big")


def _score_pairs(scores: Sequence[int], rows: Sequence[TaskRow]) -> list[bytes]:
    """Encode score and id of each task in msgpack."""
    numbers = tuple(chain.from_iterable(zip(scores, [row[0] for row in rows], strict=True)))
    text = (b"\xb0%d\xb3%019d" * len(rows)) % numbers
    return [text[at : at + _PAIR_SIZE] for at in range(0, len(text), _PAIR_SIZE)]


def _append_records(
    operations: list[Packed], ids: Sequence[bytes], records: Sequence[bytes]
) -> None:
    """Append operations that store these records; ``ids`` are already packed."""
    sizes = list(map(len, records))
    count = len(ids)
    if sum(sizes) > NEW_BYTES and count > 1:
        middle = count // 2
        _append_records(operations, ids[:middle], records[:middle])
        _append_records(operations, ids[middle:], records[middle:])
        return
    heads = {size: _head(size) for size in set(sizes)}
    pieces = zip(ids, map(heads.__getitem__, sizes), records, strict=True)
    operations.append(_operation(_RECORDS, count, b"".join(chain.from_iterable(pieces))))


PART_BYTES_MAX = 8 << 20
PART_ARGS_MAX = 80_000
"""Maximum arguments of one script: about 20,000 new tasks, more than a frame can contain. Redis
needs 80 ms for them, while other clients wait. Smaller parts would cost 50% more."""
SLICE_ARGS = 1_000

Op = tuple[bytes, bytes, list[bytes]]
"""(name, number of the key, arguments) of an operation."""


class Records(NamedTuple):
    """The encoded rows of a batch, each list in the order of its map. A removed row is None. Redis
    and the mirror get the same bytes objects."""

    enqueued: list[bytes]
    enqueued_bytes: int
    """Total bytes of the records in ``enqueued``."""
    updated: list[bytes]
    progress: list[bytes | None]
    dead: list[bytes | None]
    fields: list[tuple[bytes, bytes | None]]
    """(field of the hash in Redis, record), for all kinds of records."""
    outcomes: tuple[int, bytes] | None
    """Number of outcomes, at most ``endings_max``, and their record."""


def records_of(
    effects: Effects, endings_max: int, enqueued: list[bytes], enqueued_bytes: int
) -> Records:
    """Encode the rows of a batch. ``enqueued`` are the records of its new tasks."""
    outcomes = None
    if effects.ended:
        ended = list(effects.ended.items())[-endings_max:]
        outcomes = (len(ended), encode_endings(dict(ended)))
    return Records(
        enqueued,
        enqueued_bytes,
        encode_tasks(effects.updated.values()) if effects.updated else [],
        [None if row is None else encode_progress(row) for row in effects.progress.values()],
        [None if row is None else encode_dead(row) for row in effects.dead.values()],
        list(zip(map(record_field, effects.records), encode_records(effects.records), strict=True)),
        outcomes,
    )


def operations(
    effects: Effects, endings_max: int, records: Records, numbers: TopicNumbers
) -> list[Op]:
    """Return the operations for a batch's encoded rows, without its marks and new tasks."""
    updated = list(effects.updated.values())
    scores = numbers.scores(updated)
    topics = {row[2] for row in chain(effects.enqueued.values(), updated)}
    ops: list[Op] = []
    _add(ops, b"HSET", "topics", numbers.pairs(topics))
    _updated(ops, scores, effects.updated, records.updated)
    if effects.progress:
        _progress(ops, effects, records.progress)
    if effects.dead:
        _dead(ops, effects, records.dead)
    _fields(ops, "records", records.fields)
    if records.outcomes is not None:
        _add(ops, b"END", "task", [id_text(task_id) for task_id in effects.ended])
        count, record = records.outcomes
        _add(ops, b"ENDING", "endings", [b"%d" % endings_max, b"%d" % count, record])
    return ops


def _updated(
    ops: list[Op], scores: list[int], rows: dict[int, TaskRow], records: list[bytes]
) -> None:
    if rows:
        ids = [b"%019d" % task_id for task_id in rows]
        texts = [b"%d" % score for score in scores]
        ops.append((b"ZADD", KEY["store"], _pairs(zip(texts, ids, strict=True))))
        ops.append((b"HSET", KEY["task"], _pairs(zip(ids, records, strict=True))))


def _progress(ops: list[Op], effects: Effects, records: list[bytes | None]) -> None:
    written, queued, removed, dropped, touched = [], [], [], [], []
    for ((task_id, group), row), record in zip(effects.progress.items(), records, strict=True):
        name = member(task_id, group)
        if row is None or record is None:
            dropped.append(name)
            removed.append(name)
            continue
        written += [name, record]
        touched += [id_text(task_id), group_text(group)]
        if row.state in IN_PREPARE:
            queued += [prepare_score(row), name]
        else:
            removed.append(name)
    _add(ops, b"HSET", "progress", written)
    _add(ops, b"HDEL", "progress", dropped)
    _add(ops, b"ZADD", "prepare", queued)
    _add(ops, b"ZREM", "prepare", removed)
    _add(ops, b"TOUCH", "touched", touched)


def _dead(ops: list[Op], effects: Effects, records: list[bytes | None]) -> None:
    written = [key for key, row in effects.dead.items() if row is not None]
    removed = [member(*key) for key, row in effects.dead.items() if row is None]
    names = [member(*key) for key in effects.dead]
    _fields(ops, "dead_record", list(zip(names, records, strict=True)))
    _add(ops, b"ZADD", "dead", _pairs((b"0", member(*key)) for key in written))
    _add(ops, b"TOUCH", "touched", _pairs((id_text(i), group_text(g)) for i, g in written))
    _add(ops, b"ZREM", "dead", removed)


def _fields(ops: list[Op], key: str, pairs: Sequence[tuple[bytes, bytes | None]]) -> None:
    """Set fields of a hash, or remove fields without a record."""
    _add(ops, b"HSET", key, _pairs((n, r) for n, r in pairs if r is not None))
    _add(ops, b"HDEL", key, [name for name, record in pairs if record is None])


def _pairs(pairs: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    return list(chain.from_iterable(pairs))


def _add(ops: list[Op], name: bytes, key: str, args: list[bytes]) -> None:
    if args:
        ops.append((name, KEY[key], args))


FEW_ARGS, FEW_BYTES = 64, 16 << 10
"""Maximum arguments and bytes of an operation that is packed together with its neighbours."""


def packed(ops: Iterable[Op]) -> list[Packed]:
    """Pack operations in order, with at most a thousand arguments and 8 MiB each, and without
    dividing pairs. Small operations are packed together, because each call has a cost."""
    packs: list[Packed] = []
    small_ops: list[bytes] = []
    for name, key, args in ops:
        if len(args) <= FEW_ARGS and sum(map(len, args)) <= FEW_BYTES:
            small_ops += (name, key, b"%d" % len(args), *args)
            continue
        if small_ops:
            packs.append(pack_args(small_ops))
            small_ops = []
        waiting = [args[i : i + SLICE_ARGS] for i in range(0, len(args), SLICE_ARGS)][::-1]
        while waiting:
            slice_args = waiting.pop()
            if len(slice_args) > 3 and sum(map(len, slice_args)) > PART_BYTES_MAX:
                middle = len(slice_args) // 4 * 2
                waiting += [slice_args[middle:], slice_args[:middle]]
            else:
                packs.append(pack_args((name, key, b"%d" % len(slice_args), *slice_args)))
    if small_ops:
        packs.append(pack_args(small_ops))
    return packs


def parts(ops: Sequence[Packed]) -> tuple[list[Packed], int]:
    """Divide operations into parts, one for each script call. Return the parts and their total
    bytes. Nearly every batch has one part, which can be empty."""
    divided: list[Packed] = []
    part: list[Packed] = []
    part_args = part_bytes = size_bytes = 0
    for op in ops:
        weight, op_bytes = op.weight or op.number, len(op.data)
        full = part_args + weight > PART_ARGS_MAX or part_bytes + op_bytes > PART_BYTES_MAX
        if part and full:
            divided.append(joined(part))
            part, part_args, part_bytes = [], 0, 0
        part.append(op)
        part_args += weight
        part_bytes += op_bytes
        size_bytes += op_bytes
    divided.append(joined(part))
    return divided, size_bytes


class Encoded(NamedTuple):
    """All new tasks of a batch, encoded, in their order."""

    records: list[bytes]
    records_bytes: int
    operations: list[Packed]
    """The operations that store these tasks."""


class AheadEncoder:
    """Encodes the new tasks of the open batch while Redis processes the previous batch."""

    def __init__(self, numbers: TopicNumbers) -> None:
        self._numbers = numbers
        self._begin({})

    def add(self, enqueued: dict[int, TaskRow]) -> None:
        """Encode the tasks added since the last call, in multiples of ``NEW_ROWS``."""
        if enqueued is not self._enqueued:
            self._begin(enqueued)
        fresh = len(enqueued) - len(self._rows)
        if fresh >= NEW_ROWS:
            self._encode(fresh // NEW_ROWS * NEW_ROWS)

    def finish(self, enqueued: dict[int, TaskRow]) -> Encoded:
        """Encode the remaining tasks. Return all tasks of the batch."""
        if enqueued is not self._enqueued or not (
            len(self._rows) <= len(enqueued) and all(map(is_, self._rows, enqueued.values()))
        ):
            self._begin(enqueued)
        if len(enqueued) > len(self._rows):
            self._encode(len(enqueued) - len(self._rows))
        encoded = Encoded(self._records, self._records_bytes, self._tasks.operations())
        self._begin({})
        return encoded

    def _begin(self, enqueued: dict[int, TaskRow]) -> None:
        self._enqueued = enqueued
        self._rows: list[TaskRow] = []
        self._records: list[bytes] = []
        self._records_bytes = 0
        self._tasks = NewTasks(self._numbers)

    def _encode(self, count: int) -> None:
        encoded_rows = len(self._rows)
        rows = list(islice(self._enqueued.values(), encoded_rows, encoded_rows + count))
        records = encode_tasks(rows)
        self._tasks.add(rows, records)
        self._rows += rows
        self._records += records
        self._records_bytes += sum(map(len, records))


class Prepared(NamedTuple):
    """A batch in the form sent to Redis, and its records, which the mirror keeps afterwards."""

    records: Records
    flat: list[Packed]
    """The arguments of each script of the batch."""
    size_bytes: int


def prepare(
    effects: Effects, endings_max: int, numbers: TopicNumbers, ahead: AheadEncoder | None = None
) -> Prepared:
    """Encode a batch. ``ahead`` may already have encoded some of its new tasks."""
    encoded = (ahead or AheadEncoder(numbers)).finish(effects.enqueued)
    records = records_of(effects, endings_max, encoded.records, encoded.records_bytes)
    other_ops = packed(operations(effects, endings_max, records, numbers))
    return Prepared(records, *parts([*encoded.operations, *other_ops]))
