"""The store of the simulation: one server that several daemons share, far away from each of them.

It stands for Redis: a lease with a time to live, epochs, and batches that count only with the
current epoch, owner and next number. ``Server`` is what Redis and its scripts are, ``NodeStore``
and ``NodeElection`` are what a daemon has of it, by the contracts of the product. Rows are those of
the memory store, which the conformance suite proves.

A request or its answer may be lost, a request may land after its sender has given it up, the server
may refuse, be slow, or stand still. A failover may lose its newest batches: then who had them
confirmed writes them again, as the Redis store does; that part is a model of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from simulation.network import APART_S
from tickwheel.model.kinds import COUNTER, GROUP, Effects, ProgressKey, RecordKey
from tickwheel.model.records import SettingsCounter
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    ElectionState,
    Fenced,
    Handles,
    Heads,
    Keyed,
    Leader,
    Opened,
    SiblingSettings,
    SmallState,
    Standby,
    StoreAway,
    StoreBehind,
    StoreBroken,
    StoredTask,
    StoreError,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.persistence.memory import MemoryStore

if TYPE_CHECKING:
    from simulation.loop import Host, SimLoop
    from simulation.network import Network, Trace
    from tickwheel.persistence.contract import Evidence

STORE = "store"
"""The name of the server's host."""
CALL_S = 1.0
"""How long a daemon waits for an answer."""
WORK_S = (0.0002, 0.002)
SLOW_WORK_S = (0.05, 0.8)
LATE_SHARE = 0.5
"""The share of lost requests that are only late."""
KEPT_MAX = 64
"""Batches that a daemon keeps for a store that lost them."""
INCARNATION = "simulated"

T = TypeVar("T")


class Unanswered(Exception):
    """No answer came in time; it may have been done, or be done yet."""


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a method of the memory store, none of which waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the memory store waits for something")


class Server:
    """The data, the lease, and what is wrong with the server at the moment."""

    def __init__(self, loop: SimLoop, host: Host, net: Network, rnd: random.Random) -> None:
        self.loop, self.host, self.net, self.rnd = loop, host, net, rnd
        self.data = MemoryStore(endings_max=10_000)
        self.data._key_seed = rnd.randbytes(len(self.data._key_seed))
        self.keeps_copies = False
        self._copies: deque[MemoryStore] = deque(maxlen=8)
        """The states before the newest batches, the newest last."""
        self.leader: Leader | None = None
        self._lease_until_s = 0.0
        self._leased_life = 0
        """The life in which the lease was taken or renewed last; see ``lives``."""
        self._standbys: dict[str, tuple[Standby, float]] = {}
        self.up_since_s = -3_600.0
        self.lives = 1
        """How often the server began to answer: each is another connection."""
        self._links: dict[str, int] = {}
        """Owner → its newest line: what older ones still bring is void."""
        self.refuses = ""
        """Why no batch is taken; empty: they are."""
        self.is_slow = False
        self.late: list[Callable[[], None]] = []
        """Requests that were lost on their way, and arrive when that is free again."""
        self.opened: list[tuple[float, int, str]] = []
        """(when, epoch, owner) of each opening."""
        self.applied: list[tuple[float, int, str, int]] = []
        """(when, epoch, owner, n) of each batch."""
        self.fenced = 0
        """How often somebody wrote whose epoch was over."""
        self.replays = 0
        """How often lost batches were written again."""

    @property
    def epoch(self) -> int:
        return self.data._epoch

    def work_s(self) -> float:
        return self.rnd.uniform(*(SLOW_WORK_S if self.is_slow else WORK_S))

    def arrive_late(self) -> None:
        """Let what was held up on its way arrive now."""
        late, self.late = self.late, []
        for act in late:
            self.host.call_at(self.loop.time() + self.net.latency_s(), act)

    # --- the lease ------------------------------------------------------------------------------

    def _led_by(self) -> Leader | None:
        return self.leader if self.loop.time() < self._lease_until_s else None

    def _lease(self, me: Leader, ttl_s: float) -> None:
        self.leader, self._lease_until_s = me, self.loop.time() + ttl_s
        self._leased_life = self.lives

    def acquire(self, me: Leader, instead_of: Leader | None, ttl_s: float) -> bool:
        led_by = self._led_by()
        if led_by is not None and led_by.owner != me.owner and led_by != instead_of:
            return False
        self._lease(me, ttl_s)
        return True

    def renew(self, me: Leader, ttl_s: float) -> tuple[bool, tuple[Standby, ...]]:
        led_by = self._led_by()
        if led_by is None or led_by.owner != me.owner:
            return False, ()
        self._lease(me, ttl_s)
        return True, self.standing_by()

    def release(self, me: Leader) -> None:
        led_by = self._led_by()
        if led_by is not None and led_by.owner == me.owner:
            self.leader = None
            self._lease_until_s = 0.0

    def standing_by(self) -> tuple[Standby, ...]:
        now_s = self.loop.time()
        return tuple(one for one, until_s in self._standbys.values() if until_s > now_s)

    def look(self, me: Standby | None, ttl_s: float) -> tuple[ElectionState, tuple[Standby, ...]]:
        if me is not None:
            self._standbys[me.node] = (me, self.loop.time() + ttl_s)
        data, leader = self.data, self._led_by()
        seen = ElectionState(
            leader,
            0 if leader is None else int((self._lease_until_s - self.loop.time()) * 1000),
            INCARNATION if data._epoch else "",
            data._epoch,
            data._owner,
            data._clean,
            int(self.loop.time() - self.up_since_s),
            leased_here=self._leased_life == self.lives,
        )
        return seen, self.standing_by()

    # --- the data -------------------------------------------------------------------------------

    def open(self, owner: str, now_ms: int, epoch_min: int, may_create: bool) -> Opened:
        if not self.epoch and not may_create:
            raise StoreUnusable("the store is empty, and another daemon may hold what was in it")
        opened = at_once(self.data.open(owner, now_ms, epoch_min=epoch_min))
        self._copies.clear()  # what is lost is kept by its writer, and that is this one
        self.opened.append((self.loop.time(), opened.epoch, owner))
        return opened

    def close(self, epoch: int, owner: str) -> None:
        """Note that the owner has closed the store cleanly."""
        if (epoch, owner) == (self.data._epoch, self.data._owner):
            self.data._clean = True

    def commit(self, epoch: int, owner: str, n: int, effects: Effects, link: int) -> bool:
        data = self.data
        self._claim(epoch, owner, link)
        # Refused is what was certainly not applied: one whose answer was lost may have been.
        if self.refuses and n > data._last_batch:
            raise CommitRefused(self.refuses)
        if n > data._last_batch + 1:
            raise StoreBehind("it is older", last_seen=data._last_batch, last_known=n - 1)
        before = data.copy() if self.keeps_copies else None
        is_new = at_once(data.commit(epoch, owner, n, effects))
        if is_new:
            if before is not None:
                self._copies.append(before)
            self.applied.append((self.loop.time(), epoch, owner, n))
        return is_new

    def _claim(self, epoch: int, owner: str, link: int) -> None:
        """Whoever opened the store last may write, on its newest line. Raises Fenced."""
        data = self.data
        if epoch > data._epoch:  # a failover has lost the opening
            data._epoch, data._owner, data._clean = epoch, owner, False
        if (epoch, owner) != (data._epoch, data._owner):
            self.fenced += 1
            raise Fenced(f"epoch {epoch} of {owner} ended: {data._epoch} of {data._owner} began")
        if link < self._links.get(owner, 0):
            raise Unanswered  # nobody listens for this answer any more
        self._links[owner] = link

    def whole(self, last: int) -> MemoryStore:
        """The data, if it has all batches up to this one. Raises StoreBehind."""
        if self.data._last_batch < last:
            raise StoreBehind("older", last_seen=self.data._last_batch, last_known=last)
        return self.data

    def fail_over(self, lost: int) -> int:
        """Another server stands in, which lacks the newest batches, and perhaps the lease; returns
        how many."""
        gone = 0
        if self.rnd.random() < 0.5:
            self.leader, self._lease_until_s = None, 0.0
        while self._copies and gone < lost:
            self.data = self._copies.pop()
            self.data._is_open = True
            gone += 1
        self.up_since_s = self.loop.time()
        self.lives += 1
        return gone


class Line:
    """One daemon's connection to the server: one request at a time arrives, in order."""

    def __init__(self, server: Server, host: Host, trace: Trace) -> None:
        self.server, self.host, self._trace = server, host, trace
        self.number = 1
        """Number of the connection, which changes after each missing answer."""
        self._life = server.lives
        self._last_s = 0.0

    async def call(self, what: str, act: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """Let the server act. Raises Unanswered, or what it says."""
        server, net, loop = self.server, self.server.net, self.server.loop
        if self._life != server.lives:
            self._life = server.lives
            self.number += 1
        reply: asyncio.Future[T] = loop.create_future()

        def answer(result: Any, error: Exception | None) -> None:
            if reply.done():
                return
            if error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(result)

        def arrived() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = act()
            except Unanswered:
                return
            except StoreError as problem:
                error = problem
            self._trace("store", self.host, what, "" if error is None else type(error).__name__)
            if net.is_blocked(STORE, self.host.name):
                return  # the answer is lost, and what was done stays
            self.host.call_at(loop.time() + net.latency_s(), answer, result, error)

        if net.is_blocked(self.host.name, STORE):
            if server.rnd.random() < LATE_SHARE:
                server.late.append(arrived)
        else:
            arrival_s = loop.time() + net.latency_s() + server.work_s()
            self._last_s = max(self._last_s + APART_S, arrival_s)
            server.host.call_at(self._last_s, arrived)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            self.number += 1
            self._trace("unanswered", self.host, what)
            raise Unanswered from None


class NodeElection:
    """A daemon's part in the election; see ``contract.Election``."""

    address = STORE

    def __init__(self, line: Line, ttl_ms: int) -> None:
        self._line, self._ttl_s = line, ttl_ms / 1000
        self.standbys: tuple[Standby, ...] = ()

    @property
    def connections(self) -> int:
        return self._line.number

    async def _ask(self, what: str, act: Callable[[], T]) -> T:
        try:
            return await self._line.call(what, act, self._ttl_s / 4)
        except Unanswered:
            raise StoreAway("the store does not answer") from None

    async def prepare(self) -> None:
        try:
            await self._line.call("prepare", lambda: None)
        except Unanswered:
            raise StoreUnreachable("the store does not answer") from None

    async def look(self, me: Standby | None = None) -> ElectionState:
        server = self._line.server
        seen, self.standbys = await self._ask("look", lambda: server.look(me, self._ttl_s))
        return seen

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        server = self._line.server
        return await self._ask("acquire", lambda: server.acquire(me, instead_of, self._ttl_s))

    async def renew(self, me: Leader) -> bool:
        server = self._line.server
        renewed, self.standbys = await self._ask("renew", lambda: server.renew(me, self._ttl_s))
        return renewed

    async def release(self, me: Leader) -> None:
        await self._ask("release", lambda: self._line.server.release(me))

    async def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class NodeStore:
    """What a daemon has of the store; see ``contract.SharedStore``."""

    durability = "as the simulation says"

    def __init__(self, line: Line) -> None:
        self._line, self._server = line, line.server
        self._epoch, self._owner, self._last = 0, "", 0
        self._kept: deque[tuple[int, Effects]] = deque(maxlen=KEPT_MAX)
        self._lock = asyncio.Lock()
        self._is_open = False

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = (),
        may_create: bool = True
    ) -> Opened:  # fmt: skip
        assert not evidence, "no daemon of the simulation has a history"
        server = self._server
        try:
            opened = await self._line.call(
                "open", lambda: server.open(owner, now_ms, epoch_min, may_create)
            )
        except Unanswered:
            raise StoreUnreachable("the store does not answer") from None
        self._epoch, self._owner, self._last = opened.epoch, owner, opened.last_batch
        self._kept.clear()
        self._is_open = True
        return opened

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        self._check_open()
        async with self._lock:
            is_new = await self._commit_behind_all(epoch, owner, n, effects)
            self._kept.append((n, effects))
            self._last = n
            return is_new

    async def _commit_behind_all(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """Commit, and write again before what the store has lost; that may be more meanwhile."""
        while True:
            try:
                return await self._commit(epoch, owner, n, effects)
            except StoreBehind as behind:
                await self._replay(behind.last_seen)

    async def _commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        server, link = self._server, self._line.number
        try:
            return await self._line.call(
                f"commit {n}", lambda: server.commit(epoch, owner, n, effects, link)
            )
        except Unanswered:
            raise CommitUnknown("the store does not answer") from None

    async def _replay(self, last_seen: int) -> None:
        """Write again what the store has lost. Raises StoreBroken: not all of it is kept."""
        lost = [(n, effects) for n, effects in self._kept if n > last_seen]
        if not lost or lost[0][0] != last_seen + 1:
            raise StoreBroken(f"the store lost batches after {last_seen} that are not kept")
        self._server.replays += 1
        try:
            for n, effects in lost:
                await self._commit(self._epoch, self._owner, n, effects)
        except StoreBehind as behind:  # another server stands in once more
            await self._replay(behind.last_seen)

    async def verify(self) -> None:
        self._check_open()
        async with self._lock:
            try:
                await self._ask("verify", lambda data: None)
            except StoreBehind as behind:
                try:
                    await self._replay(behind.last_seen)
                except (CommitUnknown, CommitRefused) as error:
                    raise StoreAway(error.message) from None

    # --- reads ----------------------------------------------------------------------------------

    async def _ask(self, what: str, act: Callable[[MemoryStore], T]) -> T:
        self._check_open()
        server, last = self._server, self._last
        try:
            return await self._line.call(what, lambda: act(server.whole(last)))
        except Unanswered:
            raise StoreAway("the store does not answer") from None

    async def _read(self, what: str, act: Callable[[MemoryStore], Coroutine[Any, Any, T]]) -> T:
        """A read of all that was confirmed, which is written again before if it is not there."""
        try:
            return await self._ask(what, lambda data: at_once(act(data)))
        except StoreBehind:
            await self.verify()
            raise StoreAway("the store was older than what it had confirmed") from None

    async def recover_small(self) -> SmallState:
        return await self._read("small", lambda data: data.recover_small())

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        async def all_of(data: MemoryStore) -> list[Handles]:
            return [handles async for handles in data.recover_handles(chunk)]

        for handles in await self._read("handles", all_of):
            yield handles

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        async def all_of(data: MemoryStore) -> list[Keyed]:
            return [keyed async for keyed in data.recover_keys()]

        for keyed in await self._read("keys", all_of):
            yield keyed

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        return await self._read("read", lambda data: data.read(ids))

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        return await self._read("read", lambda data: data.read_some(ids, bytes_max))

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        return await self._read("read", lambda data: data.read_heads(ids, bytes_max))

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        return await self._read("scan", lambda data: data.scan(after_id, limit, topic))

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        return await self._read("scan", lambda data: data.scan_back(before_id, limit, topic))

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[Any]:
        return await self._read("scan", lambda data: data.scan_dead(after, limit, topic, group))

    async def backup(self, path: str) -> int:
        raise StoreError("there is no disk for a backup")

    async def probe_room(self) -> bool:
        return not self._server.refuses

    async def close(self, clean: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if clean:
            server, epoch, owner = self._server, self._epoch, self._owner
            with suppress(Unanswered):  # the next start counts as one after a crash
                await self._line.call("close", lambda: server.close(epoch, owner))

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreBroken("the store is not open")


class NodeSiblings:
    """The other shards, as one daemon reads them: see ``contract.Siblings``."""

    def __init__(self, lines: Sequence[Line]) -> None:
        """``lines``: to the server of each shard."""
        self._lines = lines

    def prepare(self) -> None:
        """Do nothing: lines are always there."""

    async def settings(self, shard: int, known: int | None) -> SiblingSettings:
        line = self._lines[shard]

        def look() -> SiblingSettings:
            counter, rows = settings_in(line.server)
            return SiblingSettings(counter, None if counter.number == known else rows)

        try:
            return await line.call("look at settings", look)
        except Unanswered:
            raise StoreAway("the store does not answer") from None

    async def contains(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        line = self._lines[shard]

        def look() -> Sequence[bool]:
            return [key in line.server.data._records for key in keys]

        try:
            return await line.call("look at records", look)
        except Unanswered:
            raise StoreAway("the store does not answer") from None

    async def close(self) -> None:
        """Nothing is open."""


def settings_in(server: Server) -> SiblingSettings:
    """What a server has of groups and settings of topics."""
    records = server.data._records
    rows = [row for (kind, _), row in records.items() if kind is GROUP]
    counter = next((row for (kind, _), row in records.items() if kind is COUNTER), None)
    return SiblingSettings(counter or SettingsCounter(), rows)
