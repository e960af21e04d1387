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
    """What the one who leads says of itself."""

    owner: str
    address: str
    since_ms: int
    epoch: int
    """0 until it has opened the store."""
    life: str = ""
    """Of its process, by which others on its machine see that it is over; empty: unknown."""
    http: str = ""
    """The URL at which others find its HTTP API and its console; empty: it has none."""

    @property
    def node(self) -> str:
        return self.owner.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Standby:
    """What one who waits for its turn says of itself, as long as it does."""

    node: str
    address: str
    http: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the store by somebody who does not lead."""

    leader: Leader | None
    ttl_ms: int
    """How long the leader's lease still runs; 0 without a leader."""
    incarnation: str
    """Of the data that is there; empty when there is none."""
    epoch: int
    owner: str
    """Who opened the store last."""
    clean: bool = True
    """It was closed: nobody has anything in memory that the store may have lost."""
    up_s: int = 0
    """For how long the store's server has been running, rounded down."""
    rewriting: str = ""
    """Who writes it anew from memory and is not done: the only one who knows all of it."""

    is_replica: bool = False
    """The server takes no writes; it may lack the newest ones when it does one day."""

    @property
    def known_leader(self) -> Leader | None:
        """The leader with its epoch, also before it has written its epoch itself."""
        leader = self.leader
        if leader is None or leader.epoch or leader.owner != self.owner:
            return leader
        return replace(leader, epoch=self.epoch)


class Election(Protocol):
    """All calls raise StoreError when the store cannot be asked at the moment."""

    @property
    def connections(self) -> int:
        """Made so far: the store that answers on a new one may be another."""
        ...

    async def prepare(self) -> None:
        """Once, before taking part. Raises StoreUnusable naming what to change in the store."""
        ...

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """Who stood by within the time to live, as of the last look or renewal."""
        ...

    async def look(self, me: Standby | None = None) -> Seen:
        """``me``: says that this daemon stands by, for another time to live. That the store does
        not take it, because it is full for example, is no error."""
        ...

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        """Lead for the time to live, if nobody does, or only this one that is known dead."""
        ...

    async def renew(self, me: Leader) -> bool:
        """Lead for another time to live. False: the lease is gone, or another's."""
        ...

    async def release(self, me: Leader) -> None:
        """Give the lease back, if it is still mine."""
        ...

    async def close(self) -> None: ...


class SharedStore(Store, Protocol):
    """A store that more than one daemon can open."""

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, may_create: bool = True
    ) -> Opened:
        """``may_create`` False: an empty store is refused (StoreUnusable)."""
        ...
