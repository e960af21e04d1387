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
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from tickwheel.errors import TickwheelError
from tickwheel.model.bulk import BulkRow
from tickwheel.model.effects import Effects, ProgressKey
from tickwheel.model.records import (
    NO_BODY,
    DeadRow,
    GroupRow,
    Outcome,
    ProgressRow,
    SessionRow,
    TaskOptions,
    TaskRow,
    task_bytes,
)
from tickwheel.model.schedules import ScheduleRow
from tickwheel.model.transactions import Halves, TransactionRow


class StoreError(TickwheelError):
    """A store could not do what it was asked."""

    code = "store_error"


class CommitRefused(StoreError):
    """The batch was certainly not applied; the same batch number is still free."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full
        """No room (ENOSPC, OOM): only batches that make no task can succeed until there is."""


class CommitUnknown(StoreError):
    """The store did not say whether the batch was applied; send the same number again."""


class Fenced(StoreError):
    """Another owner has taken over: this daemon must stop at once."""


class StoreBroken(StoreError):
    """The store failed in a way that retrying cannot mend (a failed fsync, EIO): stop."""


class StoreUnusable(StoreError):
    """The store cannot be opened as it is; the message says what to change."""


class StoreUnreachable(StoreUnusable):
    """The store does not answer, so nothing is known of it; it may answer soon."""


class StoreAway(StoreError):
    """The store does not answer at the moment; the read may be tried again."""

    retryable = True


class StoreBusy(StoreAway):
    """It holds what it should, but one more reader cannot be had now (descriptors, a lock)."""


class StoreBehind(StoreError):
    """The store came back older than what it had confirmed: batches are missing from it.

    What was confirmed is still in this daemon's memory; nothing may be confirmed before the
    store has it again.
    """

    def __init__(self, message: str, *, last_seen: int, last_known: int) -> None:
        super().__init__(message)
        self.last_seen = last_seen
        """The last batch that the store holds."""
        self.last_known = last_known
        """The last batch that the store had confirmed."""


class StoreLost(StoreError):
    """The store came back without what it held: empty, or laid out anew by somebody."""


@dataclass(slots=True)
class Opened:
    """What ``open`` found."""

    epoch: int
    """Raised by this open; larger than any epoch before it."""
    last_batch: int
    """Number of the last batch applied; the next is this plus one."""
    id_mark: int
    position_ms: int
    clean: bool
    """The last owner closed the store; False after a crash, True for a new store."""
    created: bool
    """The store was empty and has been laid out now."""
    has_room: bool = True
    """False: enqueues would be refused for lack of room, see ``Store.probe_room``."""
    no_room: str = "the store was opened without room"
    """Why, when there is none."""
    key_seed: bytes = b""
    """Of the hashes that ``recover_keys`` gives; see ``model/key_hash.py``."""


class StoredTask(NamedTuple):
    """Everything a store holds about one id."""

    row: TaskRow
    progress: tuple[ProgressRow, ...]
    dead: tuple[DeadRow, ...]


SCAN_BYTES_MAX = 16 << 20
"""A page of tasks ends with the one that reaches this."""


def is_cut(page: Iterable[StoredTask]) -> bool:
    """Whether a page of ``scan`` ended because of its bytes."""
    return sum(task_bytes(task.row) for task in page) >= SCAN_BYTES_MAX


@dataclass(slots=True)
class Small:
    """The part of recovery that fits in memory whole."""

    groups: list[GroupRow] = field(default_factory=list)
    sessions: list[SessionRow] = field(default_factory=list)
    progress: list[ProgressRow] = field(default_factory=list)
    dead: list[tuple[int, str, str]] = field(default_factory=list)
    """(id, group, topic) of every dead letter."""
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    """The newest endings, oldest first, at most the store's bound."""
    schedules: list[ScheduleRow] = field(default_factory=list)
    transactions: list[TransactionRow | Halves] = field(default_factory=list)
    """In any order."""
    bulks: list[BulkRow] = field(default_factory=list)


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
    """How many there are altogether, at most; 0: that is not known."""


@dataclass(slots=True)
class Audit:
    """Counts found by a full scan, against what indexes and counters say."""

    tasks: int
    progress: int
    dead: int
    sessions: int
    problems: list[str] = field(default_factory=list)


class Store(Protocol):
    """See the module's text. All calls are made from one event loop."""

    @property
    def durability(self) -> str:
        """For people: what a task that was confirmed survives, and what not. Known once open."""
        ...

    async def open(self, owner: str, now_ms: int, *, epoch_min: int = 1) -> Opened:
        """``epoch_min``: the epoch is not below it; for a store that takes another's place."""
        ...

    async def recover_small(self) -> Small: ...

    def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        """Every task row, in due order (ties by id). Tasks may be made and end meanwhile; their
        due times stay as they are, because commands by id wait for the end of it."""
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
        """The rows of those of ``ids`` that exist."""
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
        """Write a consistent copy to ``path`` while in use; its size in bytes."""
        ...

    async def probe_room(self) -> bool:
        """After a refusal for lack of room: is there room for enqueues again?"""
        ...

    async def verify(self) -> None:
        """The store may have come back as another: look whether it holds what it confirmed, and
        set that right. Returns at once where that cannot happen, or while it is away."""
        ...

    async def close(self, clean: bool) -> None:
        """Release everything. ``clean`` is recorded for the next ``open``. Idempotent."""
        ...


@dataclass(slots=True)
class Heads:
    """Tasks that were read, most of them as columns: no id is in two places."""

    plain: dict[str, dict[int, int]] = field(default_factory=dict)
    """topic → id → due_ms of tasks of which nothing else is recorded but their bodies, and their
    keys."""
    keys: dict[int, str] = field(default_factory=dict)
    """Of those of ``plain`` that have one."""
    others: dict[int, StoredTask] = field(default_factory=dict)
    """Those with other options, and whole; those with progress or dead letters, maybe
    ``NO_BODY``."""

    def absent(self, ids: Iterable[int]) -> set[int]:
        """Those of ``ids`` that are not here."""
        absent = set(ids) - self.others.keys()
        for dues_ms in self.plain.values():
            absent -= dues_ms.keys()
        return absent

    def add(self, more: Heads) -> None:
        """Take over what is in ``more``."""
        self.others |= more.others
        self.keys |= more.keys
        for topic, dues_ms in more.plain.items():
            self.plain.setdefault(topic, {}).update(dues_ms)

    def drop(self, ids: Collection[int]) -> None:
        """These shall not be here."""
        for task_id in self.others.keys() & ids:
            del self.others[task_id]
        for dues_ms in self.plain.values():
            for task_id in dues_ms.keys() & ids:
                del dues_ms[task_id]
                self.keys.pop(task_id, None)


def head_row(task_id: int, due_ms: int, topic: str, keys: Mapping[int, str]) -> TaskRow:
    """The row of a task of ``Heads.plain``; ``keys``: those of ``Heads``."""
    key = keys.get(task_id)
    options = None if key is None else TaskOptions(key)
    return TaskRow(task_id, due_ms, topic, NO_BODY, options)


@runtime_checkable
class Moves(Protocol):
    """A store in which a due time is read and written without the body beside it. ``commit``
    takes ``Effects.moved``, and rows with ``NO_BODY`` in ``Effects.updated``."""

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        """``read_some`` that may leave bodies out; tasks that are read without count no bytes."""
        ...


@runtime_checkable
class WorksAhead(Protocol):
    """A store that can prepare a batch while the one before is on its way."""

    def ahead(self, effects: Effects) -> None:
        """``effects`` may still change, and need never come to ``commit``. Never fails."""
        ...
