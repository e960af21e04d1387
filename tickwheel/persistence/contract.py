"""The store contract: what the committer may rely on, whatever keeps the data.

A store knows rows and batches; it must not know wheels, sessions on the network or replies.
Invariants every store keeps, and one conformance suite proves:

* ``commit(epoch, owner, n, effects)`` is applied at once or not at all, and only if
  ``(epoch, owner)`` is current and ``n == last + 1``; ``n <= last`` changes nothing.
* When ``commit`` returns, the batch survives a power cut.
* Whatever reads sees every batch whose ``commit`` had returned when the read began, in whole
  batches, and all of it as of one moment, however many statements or calls it takes: a row that
  a commit moves or changes meanwhile is seen as it was before or after, never missed.
* ``CommitRefused`` means certainly not applied; ``CommitUnknown`` means try the same again;
  anything else means stop.

``Election`` says who leads: the contract between daemons that share one store, only one of which
may act. A lease with a time to live in the store itself. It keeps daemons polite; it is not what
makes a deposed one harmless: that is the fence (epoch, owner and number of every batch). Stores
that one process has for itself (SQLite, memory) have no election.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from tickwheel.errors import TickwheelError
from tickwheel.model.kinds import Effects, Kind, ProgressKey, RecordKey
from tickwheel.model.records import (
    NO_BODY,
    DeadRow,
    GroupRow,
    Outcome,
    ProgressRow,
    SettingsCounter,
    TaskOptions,
    TaskRow,
    task_bytes,
)

_R = TypeVar("_R")


class StoreError(TickwheelError):
    """A store could not do what it was asked."""

    code = "store_error"


class CommitRefused(StoreError):
    """The batch was certainly not applied; the same batch number is still free."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full
        """No room (ENOSPC, OOM): until there is, only batches that make no task can succeed."""


class CommitUnknown(StoreError):
    """The store did not say whether the batch was applied; send the same number again."""


class Fenced(StoreError):
    """Another owner has taken over: this daemon must stop at once."""


class StoreBroken(StoreError):
    """The store failed in a way that retrying cannot mend (a failed fsync, EIO): stop."""


class StoreForgot(StoreBroken):
    """The store came back without what it had confirmed, and nobody has it in memory: stop. Only a
    restore brings it back."""


class StoreUnusable(StoreError):
    """The store cannot be opened as it is; the message says what to change."""


class StoreUnreachable(StoreUnusable):
    """The store does not answer, so nothing is known of it; it may answer soon."""


class StoreAway(StoreError):
    """The store does not answer at the moment; the read may be tried again."""

    retryable = True


class StoreBusy(StoreAway):
    """The store is sound, but has no further reader to give now (descriptors, a lock)."""


class StoreBehind(StoreError):
    """The store came back older than what it had confirmed: batches are missing from it.

    What was confirmed is still in this daemon's memory; nothing may be confirmed before the
    store has it again.
    """

    def __init__(self, message: str, *, last_seen: int, last_known: int) -> None:
        super().__init__(message)
        self.last_seen = last_seen
        """The number of the last batch that the store holds."""
        self.last_known = last_known
        """The number of the last batch that the store had confirmed."""


class StoreLost(StoreError):
    """The store came back without its data: empty, or laid out anew by somebody."""


class Known(NamedTuple):
    """What is known of a store from elsewhere. ``epoch`` 0: only that there was one."""

    where: str
    """Who knows it, for people."""
    epoch: int = 0
    mark: str = ""
    """The mark of the epoch; empty: unknown. Then nothing is compared, and the number of the epoch
    is not given again."""
    batch: int = 0
    """The last batch of the epoch that is known to have been durable."""
    until: str = ""
    """When that was, about, for people; empty: unknown."""


@dataclass(slots=True)
class Opened:
    """What ``open`` found in the store."""

    epoch: int
    """The epoch that this open began; larger than any before it."""
    last_batch: int
    """The number of the last batch applied; the next is one higher."""
    id_mark: int
    position_ms: int
    clean: bool
    """Whether the last owner closed the store, or it is new; False after a crash."""
    created: bool
    """The store was empty and has been laid out now."""
    has_room: bool = True
    """False: enqueues would be refused for lack of room, see ``Store.probe_room``."""
    no_room: str = "the store was opened without room"
    """Why the store has no room, when it has none."""
    key_seed: bytes = b""
    """The seed of the hashes that ``recover_keys`` gives; see ``model/key_hash.py``."""
    since_epoch: int = 0
    """Events of earlier epochs in the history are about tasks that may be in other shards."""
    mark: str = ""
    """The mark of the epoch; this and what follows: see ``identity.py``."""
    incarnation: str = ""
    after: str = ""
    """The mark of the epoch that it follows; empty: none."""
    is_branch: bool = False
    """Whether a new branch of the store begins with the epoch."""
    is_behind: bool = False
    """Whether the store lacks what is known of the one that it was a copy of."""


class StoredTask(NamedTuple):
    """Everything a store holds about one id."""

    row: TaskRow
    progress: tuple[ProgressRow, ...]
    dead: tuple[DeadRow, ...]


SCAN_BYTES_MAX = 16 << 20
"""A page of tasks ends with the task that reaches this many bytes."""


def is_cut(page: Iterable[StoredTask]) -> bool:
    """Whether a page of ``scan`` ended because of its bytes."""
    return sum(task_bytes(task.row) for task in page) >= SCAN_BYTES_MAX


@dataclass(slots=True)
class Small:
    """The part of recovery that fits in memory whole."""

    records: dict[RecordKey, Any] = field(default_factory=dict)
    """The records of every kind, in any order."""
    progress: list[ProgressRow] = field(default_factory=list)
    dead: list[tuple[int, str, str]] = field(default_factory=list)
    """(id, group, topic) of every dead letter."""
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    """The newest endings, oldest first, at most the store's bound."""

    def of_kind(self, kind: Kind[_R]) -> list[_R]:
        """The rows of the records of one kind, in any order."""
        return [row for (other, _), row in self.records.items() if other is kind]


@dataclass(slots=True)
class Handles:
    """A chunk of pending tasks in due order, as columns of equal length."""

    ids: Sequence[int]
    dues_ms: Sequence[int]
    topics: Sequence[str]


class Keyed(NamedTuple):
    """Some tasks that have a key, as columns of equal length."""

    ids: Sequence[int]
    hashes: Sequence[int]
    expected: int = 0
    """How many tasks have a key, at most; 0: not known."""


@dataclass(slots=True)
class Audit:
    """Counts found by a full scan, against what indexes and counters say."""

    tasks: int
    progress: int
    dead: int
    sessions: int
    problems: list[str] = field(default_factory=list)


class Store(Protocol):
    """A store as the committer uses it. All calls are made from one event loop."""

    @property
    def durability(self) -> str:
        """What a confirmed task survives and what not, in words; known once the store is open."""
        ...

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, known: Sequence[Known] = ()
    ) -> Opened:
        """Open the store; the epoch is at least ``epoch_min``, for a store that follows another.

        Raises StoreUnusable, and changes nothing, when the store lacks what is ``known`` of it.
        """
        ...

    async def recover_small(self) -> Small: ...

    def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        """Every task row, in due order (ties by id). Tasks may be made and end meanwhile; due times
        stay, because commands by id wait for the end of the recovery."""
        ...

    def recover_keys(self) -> AsyncIterator[Keyed]:
        """Every task that has a key, in any order and without its body; to be called when
        ``recover_handles`` has come to its end. Those that ended since the store was opened may
        be among them, and those that were made since may be, or not."""
        ...

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """Apply batch ``n``. True: applied now. False: it had been applied before.

        Raises CommitRefused, CommitUnknown, Fenced, StoreBroken.
        """
        ...

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """The stored tasks of those of ``ids`` that exist."""
        ...

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """``read`` of the first of ``ids``, in their order, until their bytes reach
        ``bytes_max``: the rows, and the ids that are left. At least one is looked at."""
        ...

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """Up to ``limit`` tasks with an id above ``after_id``, by id; ``topic`` filters. There may
        be more after a page that is shorter when ``is_cut`` says so: its bytes were used up."""
        ...

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """Up to ``limit`` tasks with an id below ``before_id``, the highest first; cut like those
        of ``scan``."""
        ...

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        """Up to ``limit`` dead letters after the (id, group) ``after``, in that order."""
        ...

    async def backup(self, path: str) -> int:
        """Write a consistent copy to ``path`` while the store is in use; returns its bytes."""
        ...

    async def probe_room(self) -> bool:
        """Whether there is room for enqueues again, after a refusal for lack of room."""
        ...

    async def verify(self) -> None:
        """The store may have come back as another: look whether it holds what it confirmed, and
        set that right. Returns at once where that cannot happen, or while it is away."""
        ...

    async def close(self, clean: bool) -> None:
        """Release everything; ``clean`` is recorded for the next ``open``. May be repeated."""
        ...


@dataclass(slots=True)
class Heads:
    """Tasks that were read, most of them as columns; no id is in two of the fields."""

    plain: dict[str, dict[int, int]] = field(default_factory=dict)
    """Topic → id → due_ms of tasks of which only bodies and keys are recorded beside."""
    keys: dict[int, str] = field(default_factory=dict)
    """Id → key of those tasks of ``plain`` that have one."""
    others: dict[int, StoredTask] = field(default_factory=dict)
    """Tasks with other options, whole; and tasks with progress or dead letters, maybe
    ``NO_BODY``."""

    def absent(self, ids: Iterable[int]) -> set[int]:
        """The ids of ``ids`` that were not read."""
        absent = set(ids) - self.others.keys()
        for dues_ms in self.plain.values():
            absent -= dues_ms.keys()
        return absent

    def add(self, more: Heads) -> None:
        """Take over all tasks that ``more`` has."""
        self.others |= more.others
        self.keys |= more.keys
        for topic, dues_ms in more.plain.items():
            self.plain.setdefault(topic, {}).update(dues_ms)

    def drop(self, ids: Collection[int]) -> None:
        """Remove these tasks."""
        for task_id in self.others.keys() & ids:
            del self.others[task_id]
        for dues_ms in self.plain.values():
            for task_id in dues_ms.keys() & ids:
                del dues_ms[task_id]
                self.keys.pop(task_id, None)


def head_row(task_id: int, due_ms: int, topic: str, keys: Mapping[int, str]) -> TaskRow:
    """The row of a task of ``Heads.plain``, with its key from ``keys``."""
    key = keys.get(task_id)
    options = None if key is None else TaskOptions(key)
    return TaskRow(task_id, due_ms, topic, NO_BODY, options)


@runtime_checkable
class Moves(Protocol):
    """A store in which a due time is read and written without the body beside it. ``commit``
    takes ``Effects.moved``, and rows with ``NO_BODY`` in ``Effects.updated``."""

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        """``read_some`` without most bodies; tasks read without a body count no bytes."""
        ...


@runtime_checkable
class Located(Protocol):
    """A store on a server, which may be another one after a while."""

    @property
    def at(self) -> str:
        """The server that has the store, ``HOST:PORT``; empty: none was found yet."""
        ...

    @property
    def moves(self) -> int:
        """How often another server had the store than before."""
        ...


@runtime_checkable
class OnDisk(Protocol):
    """A store in a file of this machine."""

    @property
    def path(self) -> str:
        """The file."""
        ...


@runtime_checkable
class Mirrored(Protocol):
    """A store on a server that may lose what it had confirmed."""

    @property
    def mirror(self) -> bool:
        """Whether this daemon keeps all records in memory, and writes them again then."""
        ...


@runtime_checkable
class WorksAhead(Protocol):
    """A store that can prepare a batch while the one before is on its way."""

    def ahead(self, effects: Effects) -> None:
        """Prepare ``effects``, which may still change and need never be committed. Never fails."""
        ...


@dataclass(frozen=True, slots=True)
class Leader:
    """What the leader says of itself."""

    owner: str
    address: str
    since_ms: int
    epoch: int
    """The leader's epoch; 0 until it has opened the store."""
    life: str = ""
    """Marks the leader's process, so that others on its machine see its end; empty: unknown."""
    http: str = ""
    """The URL of the leader's HTTP API and console; empty: it has none."""

    @property
    def node(self) -> str:
        return self.owner.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Standby:
    """What a standby says of itself while it waits for its turn."""

    node: str
    address: str
    http: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the store by a daemon that does not lead."""

    leader: Leader | None
    ttl_ms: int
    """How long the leader's lease still runs, in ms; 0: there is no leader."""
    incarnation: str
    """The incarnation of the data in the store; empty: there is none."""
    epoch: int
    owner: str
    """The owner who opened the store last."""
    clean: bool = True
    """Whether the store was closed: then no memory holds anything that the store may lack."""
    up_s: int = 0
    """How long the store's server has surely had the store, in seconds, rounded down."""
    rewriting: str = ""
    """The owner who was writing the data anew from memory and is not done; empty: nobody."""
    is_replica: bool = False
    """Whether the server is a replica: it takes no writes, and may lack the newest ones later."""
    lost_by: str = ""
    """The owner who had confirmed more than there is, and has it no more; empty: nobody."""
    leased_here: bool = False
    """Whether the last leader took or renewed its lease at this server, since that was started and
    promoted: then a lease that is not there has ended, and nothing was lost on the way here."""

    @property
    def known_leader(self) -> Leader | None:
        """The leader with its epoch, also before it has written its epoch itself."""
        leader = self.leader
        if leader is None or leader.epoch or leader.owner != self.owner:
            return leader
        return replace(leader, epoch=self.epoch)


class SiblingSettings(NamedTuple):
    """What another shard has committed of its groups and of the settings of its topics."""

    counter: SettingsCounter
    """What it has numbered of those whose home it is."""
    rows: Sequence[GroupRow] | None
    """All of them as they were at that number, in any order; None: they were not read."""


class Siblings(Protocol):
    """The other shards of a store with several, as one of them reads what they have committed:
    without being their owner, and whether or not daemons serve them."""

    def prepare(self) -> None:
        """Begin with what the first look needs, beside other work. What goes wrong with it, that
        look says."""
        ...

    async def settings(self, shard: int, known: int | None) -> SiblingSettings:
        """The counter of a shard, and the rows unless its number is ``known``: then one small
        record is all that is read. Raises StoreError, mostly StoreAway."""
        ...

    async def have(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        """Whether a shard has a record under each of these keys. Raises as ``settings``."""
        ...

    async def close(self) -> None: ...


class Election(Protocol):
    """A daemon's part in choosing the leader. All calls raise StoreError if the store is away."""

    @property
    def connections(self) -> int:
        """How many connections were made: the store on a new one may be another."""
        ...

    async def prepare(self) -> None:
        """Check the store once, before taking part. Raises StoreUnusable naming what to change."""
        ...

    @property
    def at(self) -> str:
        """The server that was asked last, ``HOST:PORT``; empty: none was reached yet."""
        ...

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """The daemons that stood by within the time to live, as of the last look or renewal."""
        ...

    async def look(self, me: Standby | None = None) -> Seen:
        """Look at the store; ``me`` says that this daemon stands by for another time to live. It is
        no error when the store does not take that, for example because it is full."""
        ...

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        """Take the lease, if nobody leads, or only ``instead_of``, which is known to be dead."""
        ...

    async def renew(self, me: Leader) -> bool:
        """Renew the lease for a time to live. False: the lease is gone, or another's."""
        ...

    async def release(self, me: Leader) -> None:
        """Give the lease back, if this daemon still has it."""
        ...

    async def close(self) -> None: ...


# --- several nodes -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A shard that a node leads, as the node says."""

    shard: int
    epoch: int
    address: str
    since_ms: int
    http: str = ""
    """The URL of its HTTP; empty: it has none."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What a node says of itself."""

    name: str
    run: str
    """Marks this run of the node, from its start to its end."""
    address: str
    """Its front door."""
    version: str
    capacity: float
    since_ms: int
    ttl_ms: int
    """It counts as gone when it was not heard of for so long."""
    leaving: bool = False
    """Whether it is about to end, and gives its shards away."""
    life: str = ""
    """Marks its process, so that others on its machine see its end; empty: unknown."""
    http: str = ""
    claims: tuple[Claim, ...] = ()
    standbys: Mapping[int, str] = field(default_factory=dict)
    """Shard for which a daemon of it stands by → the address of that daemon."""


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """All nodes at one moment, by the clock of the store."""

    now_ms: int
    nodes: Mapping[str, NodeRecord]
    """Those that live, by name."""
    seen_ms: Mapping[str, int]
    """When each was heard of last."""
    placed: Mapping[int, str]
    """Shard → the node where an operator wants it."""
    drained: frozenset[str]
    """Names of nodes that shall have no shards, as an operator says."""
    version: int
    """It grows whenever a shard is led by another daemon."""
    namesake: NodeRecord | None = None
    """Another node that lives under the name of the one that asked, which is not among them."""


class NodeRegistry(Protocol):
    """Where the nodes that share a store find each other. All calls raise StoreError if the store
    is away; ``StoreUnusable`` if it was laid out for another number of shards, or has as many nodes
    as it may."""

    async def beat(self, me: NodeRecord, instead_of: str = "") -> NodesSeen:
        """Say what this node says of itself, for a time to live, and see all. ``instead_of``: the
        run of a node with the same name that is known to be over."""
        ...

    async def leave(self, me: NodeRecord) -> None:
        """Take this node out."""
        ...

    async def place(self, shard: int, node: str | None) -> None:
        """Note where a shard shall be; None: anywhere."""
        ...

    async def drain(self, node: str, *, draining: bool) -> None:
        """Note whether a node shall have no shards."""
        ...

    async def close(self) -> None: ...


class SharedStore(Store, Protocol):
    """A store that more than one daemon can open."""

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, known: Sequence[Known] = (),
        may_create: bool = True,
    ) -> Opened:  # fmt: skip
        """``Store.open``; with ``may_create`` False an empty store is refused (StoreUnusable)."""
        ...
