"""The store contract: the guarantees that every store gives the committer.

A store knows rows and batches. It must not know wheels, network sessions or replies.
One conformance suite proves these invariants for every store:

* ``commit(epoch, owner, n, effects)`` is atomic. It applies a batch only if ``(epoch, owner)`` is
  current and ``n == last + 1``; ``n <= last`` changes nothing.
* When ``commit`` returns, the batch survives a power cut.
* A read is a snapshot: it contains every batch that was committed when the read began, only whole
  batches, and shows one moment, however many statements or calls it takes. A row that a concurrent
  commit changes or moves is read in its old or new state, never missed.
* ``CommitRefused``: the batch was certainly not applied. ``CommitUnknown``: the same batch must be
  committed again. After any other error the daemon must stop.

``Election`` is the contract between daemons that share one store: only the leader acts. The store
itself keeps the leader's lease, which has a time to live. The lease only avoids conflicts; the
fence (the epoch, owner and number of every batch) makes a deposed leader harmless. Stores that
belong to one process (SQLite, memory) have no election.
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
from tickwheel.upgrades import Upgrade

_R = TypeVar("_R")


class StoreError(TickwheelError):
    """A store could not carry out an operation."""

    code = "store_error"


class CommitRefused(StoreError):
    """The batch was certainly not applied; the same batch number is still free."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full
        """Whether the store is out of room (ENOSPC, OOM): until it has room again, only batches
        that create no task can succeed."""


class CommitUnknown(StoreError):
    """The store did not confirm whether the batch was applied; commit the same number again."""


class Fenced(StoreError):
    """Another owner has taken over the store; this daemon must stop at once."""


class StoreBroken(StoreError):
    """The store failed in a way that a retry cannot mend (a failed fsync, EIO); stop."""


class StoreForgot(StoreBroken):
    """The store lost confirmed data that no daemon has in memory; stop. Only a restore recovers
    it."""


class StoreUnusable(StoreError):
    """The store cannot be opened; the message says what to change."""


class StoreUnreachable(StoreUnusable):
    """The store does not answer, so its state is unknown; it may answer soon."""


class StoreAway(StoreError):
    """The store does not answer at the moment; the read can be retried."""

    retryable = True


class StoreBusy(StoreAway):
    """The store works, but cannot open another reader now (no file descriptor, or a lock)."""


class StoreBehind(StoreError):
    """The store lacks batches that it had confirmed. This daemon still has them in memory, and must
    confirm nothing until the store has them again."""

    def __init__(self, message: str, *, last_seen: int, last_known: int) -> None:
        super().__init__(message)
        self.last_seen = last_seen
        """Number of the last batch in the store."""
        self.last_known = last_known
        """Number of the last batch that the store had confirmed."""


class StoreLost(StoreError):
    """The store lost its data: it is empty, or it was initialized again."""


class Evidence(NamedTuple):
    """A fact about a store from outside the store: a history, a lock file, a reserve, a setting.
    ``epoch`` 0: the source only proves that the store existed."""

    where: str
    """The source of the fact, for messages."""
    epoch: int = 0
    mark: str = ""
    """The mark of the epoch; empty: unknown. An epoch without a mark is not compared with the
    store's epochs, but no later epoch gets its number."""
    batch: int = 0
    """The last batch of the epoch that was certainly durable."""
    until: str = ""
    """The approximate time of that batch, for messages; empty: unknown."""


@dataclass(slots=True)
class Opened:
    """The state of a store that ``open`` has opened."""

    epoch: int
    """The epoch that this ``open`` began, higher than every earlier epoch."""
    last_batch: int
    """Number of the last batch applied; the next one is one higher."""
    id_mark: int
    """The highest id that was assigned before this epoch."""
    position_ms: int
    clean: bool
    """Whether the last owner closed the store, or the store is new; False after a crash."""
    created: bool
    """Whether the store was empty and ``open`` has initialized it."""
    has_room: bool = True
    """Whether the store has room for enqueues. If not, they are refused until ``probe_room`` is
    True."""
    no_room: str = "the store was opened without room"
    """Why the store has no room, if ``has_room`` is False."""
    key_seed: bytes = b""
    """Seed of the hashes that ``recover_keys`` yields; see ``model/key_hash.py``."""
    since_epoch: int = 0
    """The first epoch of the current layout; history events of earlier epochs can be about tasks
    that are now in other shards."""
    mark: str = ""
    """The mark of the epoch; for this field and the rest, see ``identity.py``."""
    incarnation: str = ""
    after: str = ""
    """The mark of the preceding epoch; empty: there is none."""
    is_branch: bool = False
    """Whether the epoch begins a new branch of the store."""
    is_behind: bool = False
    """Whether the store lacks known batches and an operator has accepted this loss."""


class StoredTask(NamedTuple):
    """A task with all its progress and dead letters."""

    row: TaskRow
    progress: tuple[ProgressRow, ...]
    dead: tuple[DeadRow, ...]


SCAN_BYTES_MAX = 16 << 20
"""Bytes of tasks that end a page of ``scan``; the task that reaches them is the page's last."""


def is_cut(page: Iterable[StoredTask]) -> bool:
    """Return whether a page of ``scan`` ended because of ``SCAN_BYTES_MAX``."""
    return sum(task_bytes(task.row) for task in page) >= SCAN_BYTES_MAX


@dataclass(slots=True)
class SmallState:
    """The part of the recovered state that fits into memory as a whole."""

    records: dict[RecordKey, Any] = field(default_factory=dict)
    """Records of every kind, in any order."""
    progress: list[ProgressRow] = field(default_factory=list)
    dead: list[tuple[int, str, str]] = field(default_factory=list)
    """(id, group, topic) of every dead letter."""
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    """The newest outcomes, oldest first, up to the store's maximum."""

    def of_kind(self, kind: Kind[_R]) -> list[_R]:
        """Return the rows of all records of one kind, in any order."""
        return [row for (other, _), row in self.records.items() if other is kind]


@dataclass(slots=True)
class Handles:
    """Ids, due times and topics of stored tasks in due order, as columns of equal length."""

    ids: Sequence[int]
    dues_ms: Sequence[int]
    topics: Sequence[str]


class Keyed(NamedTuple):
    """A chunk of the tasks that have a key, as columns of equal length."""

    ids: Sequence[int]
    hashes: Sequence[int]
    expected: int = 0
    """Upper bound of the number of tasks that have a key, over all chunks; 0: unknown."""


@dataclass(slots=True)
class Audit:
    """The row counts and the problems that a full scan of a store has found."""

    tasks: int
    progress: int
    dead: int
    sessions: int
    problems: list[str] = field(default_factory=list)


class Reads(Protocol):
    """The reads of an open store that return rows; each is a snapshot."""

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """Return id → task, without the ids that have no task."""
        ...

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """Read the tasks of ``ids`` in their order until the rows reach ``bytes_max``. Return the
        tasks and the ids that were not read. At least one id is read."""
        ...

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """Return up to ``limit`` tasks with an id above ``after_id``, by id; ``topic`` filters. A
        shorter page is the last one, unless ``is_cut`` returns True for it."""
        ...

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """Return up to ``limit`` tasks with an id below ``before_id``, highest id first. A page
        ends early as in ``scan``."""
        ...

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        """Return up to ``limit`` dead letters after the (id, group) ``after``, in that order."""
        ...


class Store(Reads, Protocol):
    """A store as the committer uses it. All calls come from one event loop."""

    @property
    def durability(self) -> str:
        """A sentence on which failures a confirmed task survives; valid once the store is open."""
        ...

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = ()
    ) -> Opened:
        """Open the store and begin an epoch of at least ``epoch_min``. Raise StoreUnusable, and
        change nothing, if the store lacks an epoch or batch in ``evidence``."""
        ...

    async def recover_small(self) -> SmallState: ...

    def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        """Yield every task row, in due order (ties by id within a chunk). Tasks can be created and
        can end during the iteration. Due times do not change, because commands by id wait until
        recovery has ended."""
        ...

    def recover_keys(self) -> AsyncIterator[Keyed]:
        """Yield every task that has a key, in any order and without its body. Call it only after
        ``recover_handles`` has ended. The chunks can contain tasks that have ended since the store
        was opened, and can lack or contain tasks created since then."""
        ...

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """Apply batch ``n``. Return True if this call has applied it, False if an earlier call had.
        Raise CommitRefused, CommitUnknown, Fenced or StoreBroken."""
        ...

    async def backup(self, path: str) -> int:
        """Write a consistent copy to ``path`` while the store is in use. Return its size in
        bytes."""
        ...

    async def probe_room(self) -> bool:
        """Return whether enqueues have room again after a refusal for lack of room."""
        ...

    async def verify(self) -> None:
        """Check, after a reconnection, that the store still holds what it confirmed, and repair it
        if not. Return at once if this store cannot lose data, or while it does not answer."""
        ...

    async def close(self, clean: bool) -> None:
        """Release all resources and record ``clean`` for the next ``open``. Can be repeated."""
        ...


@dataclass(slots=True)
class Heads:
    """Tasks that were read, mostly as columns; an id is in ``plain`` or in ``others``."""

    plain: dict[str, dict[int, int]] = field(default_factory=dict)
    """Topic → id → due_ms of tasks without progress or dead letters, and without options except a
    key."""
    keys: dict[int, str] = field(default_factory=dict)
    """Id → key of the tasks in ``plain`` that have a key."""
    others: dict[int, StoredTask] = field(default_factory=dict)
    """All other tasks; those with no option but a key can have ``NO_BODY``."""

    def absent(self, ids: Iterable[int]) -> set[int]:
        """Return the ids that were not read."""
        absent = set(ids) - self.others.keys()
        for dues_ms in self.plain.values():
            absent -= dues_ms.keys()
        return absent

    def add(self, more: Heads) -> None:
        """Add all tasks of ``more``."""
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
    """Return the row, without its body, of a task of ``Heads.plain``; ``keys``: id → key."""
    key = keys.get(task_id)
    options = None if key is None else TaskOptions(key)
    return TaskRow(task_id, due_ms, topic, NO_BODY, options)


@runtime_checkable
class Moves(Protocol):
    """A store that reads and writes due times without the bodies. Its ``commit`` accepts
    ``Effects.moved``, and rows with ``NO_BODY`` in ``Effects.updated``."""

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        """Read as ``read_some`` does, but without most bodies. A task read without its body does
        not count towards ``bytes_max``."""
        ...


@runtime_checkable
class Located(Protocol):
    """A store on a server, which can be replaced by another server."""

    @property
    def address(self) -> str:
        """The address of the store's server, ``HOST:PORT``; empty until one was reached."""
        ...

    @property
    def server_changes(self) -> int:
        """Number of times that the store changed its server."""
        ...


@runtime_checkable
class OnDisk(Protocol):
    """A store in a local file."""

    @property
    def path(self) -> str: ...


@runtime_checkable
class Mirrored(Protocol):
    """A store whose server can lose confirmed data."""

    @property
    def mirror(self) -> bool:
        """Whether this daemon keeps all records in memory to write them again after a loss."""
        ...


@runtime_checkable
class WorksAhead(Protocol):
    """A store that can prepare a batch while the previous one is being committed."""

    def ahead(self, effects: Effects) -> None:
        """Prepare ``effects``, which can still change and may never be committed. Never fails."""
        ...


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader's entry in the store."""

    owner: str
    address: str
    since_ms: int
    epoch: int
    """The leader's epoch; 0 until it has opened the store."""
    life: str = ""
    """Identifies the leader's process, so that processes on the same machine can notice its end;
    empty: unknown."""
    http: str = ""
    """The URL of the leader's HTTP API and console; empty: it has none."""

    @property
    def node(self) -> str:
        return self.owner.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Standby:
    """The entry of a standby in the store."""

    node: str
    address: str
    http: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class ElectionState:
    """The store's state, as read by a daemon that does not lead."""

    leader: Leader | None
    ttl_ms: int
    """Milliseconds until the leader's lease ends; 0: there is no leader."""
    incarnation: str
    """The incarnation of the data in the store; empty: the store is empty."""
    epoch: int
    owner: str
    """The owner that opened the store last."""
    clean: bool = True
    """Whether the store was closed properly, so that no daemon has data that the store lacks."""
    up_s: int = 0
    """Number of seconds for which the server has certainly held the store's data, rounded down."""
    rewriting: str = ""
    """The owner of an unfinished rewrite of the data from memory; empty: none."""
    is_replica: bool = False
    """Whether the server is a replica, which accepts no writes and can lack the newest ones."""
    lost_by: str = ""
    """The owner whose confirmed data is lost from the store and from its memory; empty: none."""
    leased_here: bool = False
    """Whether the last leader took or renewed its lease at this server since the server started and
    since it was promoted. If so, a missing lease has ended and was not lost in a failover."""
    is_durable: bool = False
    """Whether the server cannot come back without its data, so that an empty store has no owner."""

    @property
    def known_leader(self) -> Leader | None:
        """The leader with its epoch, even before the leader has written its epoch itself."""
        leader = self.leader
        if leader is None or leader.epoch or leader.owner != self.owner:
            return leader
        return replace(leader, epoch=self.epoch)


class SiblingSettings(NamedTuple):
    """The groups and topic settings that another shard has committed."""

    counter: SettingsCounter
    """Counts the settings changes of the topics whose home is that other shard."""
    rows: Sequence[GroupRow] | None
    """All groups as of that counter, in any order; None: they were not read."""


class Siblings(Protocol):
    """The committed data of a store's other shards. A shard reads it without owning those shards,
    whether or not daemons serve them."""

    def prepare(self) -> None:
        """Start, in the background, the work that the first read needs. That read raises its
        errors."""
        ...

    async def settings(self, shard: int, known_number: int | None) -> SiblingSettings:
        """Return a shard's counter and its rows. If the counter's number is ``known_number``, read
        only the counter, which is one small record. Raise StoreError, usually StoreAway."""
        ...

    async def contains(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        """Return, for each key, whether a shard has a record under it. Raise StoreError, also if
        the shard may be incomplete: then a missing record does not prove that it does not exist."""
        ...

    async def close(self) -> None: ...


class Election(Protocol):
    """A daemon's access to the leader's lease. All calls raise StoreError if the store does not
    answer."""

    @property
    def connections(self) -> int:
        """Number of connections made so far; a new connection can reach a different store."""
        ...

    async def prepare(self) -> None:
        """Check the store before the first election. Raise StoreUnusable, which says what to
        change."""
        ...

    @property
    def address(self) -> str:
        """The address of the server last used, ``HOST:PORT``; empty until one was reached."""
        ...

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """The standbys seen within the time to live, as of the last ``look`` or ``renew``."""
        ...

    async def look(self, me: Standby | None = None) -> ElectionState:
        """Read the store's state, and renew the entry of the standby ``me`` for a time to live. A
        store that does not accept the entry, for example because it is full, raises no error."""
        ...

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        """Take the lease if nobody holds it, or if ``instead_of``, which has ended, holds it.
        Return whether this daemon now holds it."""
        ...

    async def renew(self, me: Leader) -> bool:
        """Renew the lease for a time to live. Return False if the lease has ended or has another
        owner."""
        ...

    async def release(self, me: Leader) -> None:
        """End the lease if this daemon still holds it."""
        ...

    async def close(self) -> None: ...


# --- several nodes -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A node's statement that it leads a shard."""

    shard: int
    epoch: int
    address: str
    since_ms: int
    http: str = ""
    """The URL of the daemon's HTTP API; empty: it has none."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The entry of a node in the registry."""

    name: str
    run: str
    """Identifies this run of the node, from its start to its end."""
    address: str
    """The address of the port that all shards of the node share."""
    version: str
    capacity: float
    since_ms: int
    ttl_ms: int
    """Number of milliseconds after its last beat at which the node counts as ended."""
    leaving: bool = False
    """Whether the node is handing over its shards because it is about to end."""
    life: str = ""
    """Identifies the node's process, so that processes on the same machine can notice its end;
    empty: unknown."""
    http: str = ""
    claims: tuple[Claim, ...] = ()
    standbys: Mapping[int, str] = field(default_factory=dict)
    """Shard → address of the node's daemon that is a standby for it."""


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """All nodes at one moment, by the clock of the store."""

    now_ms: int
    nodes: Mapping[str, NodeRecord]
    """The live nodes, by name."""
    seen_ms: Mapping[str, int]
    """Node → time of its last beat, in milliseconds."""
    placed: Mapping[int, str]
    """Shard → node on which an operator has placed it."""
    drained: frozenset[str]
    """Names of the nodes that an operator has drained. They must lead no shard."""
    version: int
    """A number that grows whenever a shard changes its leader."""
    namesake: NodeRecord | None = None
    """Another live node with the caller's name; the caller is then not in ``nodes``."""


class NodeRegistry(Protocol):
    """The list of the nodes that share a store. All calls raise StoreError if the store does not
    answer, and StoreUnusable if it was initialized for another number of shards or has the maximum
    number of nodes."""

    async def beat(self, me: NodeRecord, instead_of: str = "") -> NodesSeen:
        """Write this node's entry for a time to live, and return all nodes. ``instead_of``: the run
        of a node with the same name that has certainly ended."""
        ...

    async def leave(self, me: NodeRecord) -> None:
        """Remove this node's entry."""
        ...

    async def place(self, shard: int, node: str | None) -> None:
        """Record the node that must lead a shard; None: any node may lead it."""
        ...

    async def drain(self, node: str, *, draining: bool) -> None:
        """Record whether a node is drained. A drained node must lead no shard."""
        ...

    async def close(self) -> None: ...


# --- administration ------------------------------------------------------------------------------

LEADER_WATCH_S = 4.0
"""Seconds for which a leader's lease is watched. A running daemon renews its lease within 3 s, even
if the store has lost it."""
LOST_BY = "lost by "
"""Prefix in ``StoredShard.rewriting``, before the owner whose confirmed data is lost. Without the
prefix, the field names the owner of an unfinished rewrite."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """The state of a shard that ``Administration.look`` has read."""

    store: str
    """The store's URL, without secrets."""
    shard: str
    exists: bool
    is_complete: bool
    """Whether the shard has all fields that it needs."""
    rewriting: str
    """The owner whose rewrite of the shard was interrupted; or, after ``LOST_BY``, the owner whose
    confirmed data the shard lacks; empty if the shard is complete."""
    epoch: int
    incarnation: str
    counts: dict[str, int]
    """Number of records of each kind, by the names in ``COUNTED``."""
    parts: int = 0
    """Number of parts of a large batch that is being applied."""
    last: int = 0
    """Number of the last batch."""

    @property
    def unused(self) -> bool:
        """Whether the shard is initialized and has never had a batch."""
        return self.exists and self.is_complete and not self.rewriting and self.last == 0

    @property
    def state(self) -> str:
        """The state as text for messages."""
        if not self.exists:
            return "empty"
        contents = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in self.counts.items())
        trouble = "" if self.is_complete else "; it is damaged"
        if self.rewriting.startswith(LOST_BY):
            trouble += f"; it lacks data that {self.rewriting.removeprefix(LOST_BY)} had confirmed"
        elif self.rewriting:
            trouble += f"; it is incomplete, because {self.rewriting} was rewriting it"
        return f"initialized (epoch {self.epoch}): {contents}{trouble}"


class Administration(Protocol):
    """What operators do with a shard on a server while no daemon leads it."""

    shard: int

    async def look(self) -> StoredShard:
        """Return the state of the shard. Raise StoreUnusable if server or shard must not be
        used."""
        ...

    async def lay_out(
        self, stored: StoredShard, now_ms: int, *, watch_s: float | None = None,
        is_branch: bool = False,
    ) -> str:  # fmt: skip
        """Remove the data in ``stored``, and initialize the shard. Return its new incarnation.
        ``is_branch``: the next epoch begins a new branch, regardless of known epochs. First watch
        the leader's lease for ``watch_s`` (default: LEADER_WATCH_S). Raise StoreUnusable if a
        daemon leads the shard, or the shard has changed since ``look``."""
        ...

    async def upgrade(self, *, dry_run: bool = False, watch_s: float | None = None) -> Upgrade:
        """Upgrade the shard, or all shards that share its layout, to the layout of this release;
        ``dry_run``: change nothing. Return what was, or would be, done. First watch the leases as
        ``lay_out`` does. Raise StoreUnusable if a daemon leads, or the layout is newer."""
        ...

    async def begin_branch(self, *, watch_s: float | None = None) -> None:
        """On an operator's request, mark the shard so that its next epoch begins a new branch.
        Raise StoreUnusable if the shard does not exist, or if a daemon leads it."""
        ...

    async def end_restore(self, after: str) -> None:
        """Mark a restored shard so that its next epoch begins a new branch. The caller must hold
        the lease. ``after``: the mark of the last restored epoch."""
        ...


class SharedStore(Store, Protocol):
    """A store that more than one daemon can open."""

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = (),
        may_create: bool = True,
    ) -> Opened:  # fmt: skip
        """Open the store as ``Store.open`` does. Raise StoreUnusable for an empty store unless
        ``may_create``."""
        ...
