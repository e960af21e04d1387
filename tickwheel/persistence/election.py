"""Who leads: the contract between daemons that share one store, only one of which may act.

A lease with a time to live in the store itself. It keeps daemons polite; it is not what makes
a deposed one harmless: that is the fence (epoch, owner and number of every batch). Stores that
one process has for itself (SQLite, memory) have no election.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from tickwheel.persistence.contract import Opened, Store


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
    """How long the store's server has been up, in seconds, rounded down."""
    rewriting: str = ""
    """The owner who was writing the data anew from memory and is not done; empty: nobody."""

    is_replica: bool = False
    """Whether the server is a replica: it takes no writes, and may lack the newest ones later."""

    @property
    def known_leader(self) -> Leader | None:
        """The leader with its epoch, also before it has written its epoch itself."""
        leader = self.leader
        if leader is None or leader.epoch or leader.owner != self.owner:
            return leader
        return replace(leader, epoch=self.epoch)


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


class SharedStore(Store, Protocol):
    """A store that more than one daemon can open."""

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, may_create: bool = True
    ) -> Opened:
        """``Store.open``; with ``may_create`` False an empty store is refused (StoreUnusable)."""
        ...
