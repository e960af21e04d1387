"""The Redis store, which implements the contract with one connection for writes and one for reads;
the leader's lease, which has its own connection; and the registry of nodes.

The store is as durable as Redis: a committed batch survives the failures that Redis's
``appendonly`` and ``appendfsync`` cover, or that ``wait_replicas`` replicas cover.

The lease is one key with a time to live, changed only by its owner. ``S:leader`` has
``owner|address|since_ms|epoch|life|http``, where the last two can be empty. The lease's connection
has time-outs well below the time to live, and a commit never delays a renewal. A renewal begins
with a harmless removal and extends the lease with PEXPIRE. Redis permits both even when it is out
of memory. ``S:standbys`` only informs people: a standby writes its entry
(``node|address|since_ms|http``) with ``look``, and the leader reads the entries with its renewals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Final

from tickwheel.limits import NODES_MAX
from tickwheel.model.key_hash import SEED_BYTES, KeyHash
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import (
    LOST_BY,
    ElectionState,
    Evidence,
    Handles,
    Keyed,
    Leader,
    NodeRecord,
    NodesSeen,
    Opened,
    SmallState,
    Standby,
    StoreAway,
    StoreError,
)
from tickwheel.persistence.on_server import (
    ServerElection,
    ServerNodes,
    ServerStore,
    ServerTrouble,
    opening_errors,
    unreachable,
    unusable,
)
from tickwheel.persistence.redis import opening
from tickwheel.persistence.redis.connection import Connection, check, is_command_unavailable
from tickwheel.persistence.redis.driver import RedisOptions, ServerError
from tickwheel.persistence.redis.layout import (
    LEADER_ACQUIRE,
    LEADER_LOOK,
    LEADER_RELEASE,
    LEADER_RENEW,
    NODES_BEAT,
    Keys,
)
from tickwheel.persistence.redis.mirror import Mirror, NoMirror
from tickwheel.persistence.redis.reader import ReadClient, Reader
from tickwheel.persistence.redis.recovery import Recovering, Rewriter, Watch, copy_to_sqlite
from tickwheel.persistence.redis.writer import Tally, Writer
from tickwheel.waiting import finish_despite_cancellation

log = logging.getLogger(__name__)

ROOM_DIVISOR = 64
"""Enqueues need 1/64 of the memory limit, at least 1 MiB, to be free."""
ROOM_BYTES_MIN = 1 << 20


class RedisStore(ServerStore):
    """The Redis store; see ``contract.Store``. It can be opened again after it was closed."""

    _reader: Reader

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options.name)
        self.options = options
        self.keys = Keys(options.prefix, options.namespace, options.shard)
        self._tally = Tally()
        self._server_changes, self._last_address = 0, ""
        """Number of server changes, and last address, from earlier calls of ``open``."""
        self._writing = Connection(options)
        self._reset()

    def _reset(self) -> None:
        options, keys = self.options, self.keys
        self._server_changes, self._last_address = self.server_changes, self.address
        self._writing, self._reading = Connection(options), Connection(options)
        self._mirror = (
            Mirror(options.endings_max, options.resident_bytes_max)
            if options.mirror
            else NoMirror()
        )
        self._writer = Writer(self._writing, keys, options, self._mirror, self._tally)
        name = f"store {options.name}: {keys.shard}"
        self._rewriter = Rewriter(self._writer, self._mirror, self._tally, name)
        read_client = ReadClient(self._reading, keys, options, self._writer, self._rewriter.verify)
        self._reader = Reader(read_client, self._writer, self._mirror)
        self._writer.landed = self._reader.landed
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        key_hash = KeyHash(self._key_seed)
        self._recovering = Recovering(read_client, keys, self._writer, self._mirror, key_hash, name)
        self._watch = Watch(read_client, self._rewriter)

    @property
    def incarnation(self) -> str:
        """The random id of the shard's data; a different id means different data."""
        return self._writer.incarnation

    @property
    def address(self) -> str:
        """The address of the server for writes, ``HOST:PORT``; empty until one was reached."""
        return self._writing.address_text or self._last_address

    @property
    def server_changes(self) -> int:
        """Number of times that the shard changed its server, over all openings."""
        return self._server_changes + self._writing.server_changes

    @property
    def mirror(self) -> bool:
        """See ``Mirrored``."""
        return self.options.mirror

    @property
    def replays(self) -> int:
        """Number of times that lost batches were replayed to Redis."""
        return self._tally.replays

    @property
    def rewrites(self) -> int:
        """Number of times that all data was written again after a larger loss."""
        return self._tally.rewrites

    @property
    def resident_bytes(self) -> int:
        """Approximate bytes of memory that the mirror takes."""
        return self._mirror.bytes_held

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = (),
        may_create: bool = True,
    ) -> Opened:  # fmt: skip
        """See ``SharedStore.open``. A standby that has read data must not initialize an empty shard
        while its owner may still be alive, so it sets ``may_create`` to False."""
        check(self.options)
        self._reset()
        # The connection for reads is opened concurrently.
        reading = asyncio.get_running_loop().create_task(self._reading.ready())
        try:
            opened = await self._open(owner, now_ms, epoch_min, may_create, evidence)
            await reading
            await self._upgrade()
        except BaseException:
            await finish_despite_cancellation(self._close_both(reading))
            raise
        # The seed changes with each start. Hashes are not stored, because a start reads every key.
        opened.key_seed = self._key_seed
        self._is_open = True
        self._watch.start()
        if not self._mirror.has_room:
            opened.has_room = False
            opened.no_room = (
                f"its tasks need about {self._mirror.bytes_held} bytes of memory; the limit is"
                f" {self.options.resident_bytes_max} (resident_bytes_max)"
            )
            log.warning(
                "store %s: %s; all tasks are loaded, but new tasks are refused",
                self.name,
                opened.no_room,
            )
        return opened

    async def _close_both(self, reading: asyncio.Task[None]) -> None:
        """Close both connections. The connection for reads may still be connecting."""
        reading.cancel()
        await asyncio.wait((reading,))
        await self._reading.close()
        await self._writing.close()

    async def _open(
        self,
        owner: str,
        now_ms: int,
        epoch_min: int,
        may_create: bool,
        evidence: Sequence[Evidence],
    ) -> Opened:
        """Begin an epoch and prepare the writer."""
        connection = self._writing
        with opening_errors(self.name):
            await opening.inspect(connection, self.options)
            self._durability = await opening.durability(connection, self.options)
            opened, topics = await opening.begin_epoch(
                connection, self.keys, self.options, owner, now_ms, may_create, epoch_min, evidence
            )
            await self._writer.begin(owner, opened, topics)
            if opened.created:
                self._mirror.mark_complete()
            elif self.options.mirror:
                self._mirror.expect(await opening.estimate(connection, self.keys))
        return opened

    async def _upgrade(self) -> None:
        try:
            with opening_errors(self.name):
                await self._recovering.upgrade()
        except StoreAway as error:
            raise unreachable(self.name, error) from error

    async def recover_small(self) -> SmallState:
        self._check_open()
        return await self._recovering.small(self.options.endings_max)

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        self._check_open()
        async for handles in self._recovering.handles(chunk):
            yield handles

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        self._check_open()
        async for keyed in self._recovering.keys():
            yield keyed

    def ahead(self, effects: Effects) -> None:
        """See ``WorksAhead``."""
        self._writer.ahead.add(effects.enqueued)

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``. If Redis has lost data, raise CommitRefused while the mirror writes
        it again; without a complete mirror raise StoreBehind or StoreLost."""
        self._check_open()
        return await self._rewriter.commit(epoch, owner, n, effects)

    async def backup(self, path: str) -> int:
        """Copy the data to a SQLite database, which a daemon can open as its store."""
        self._check_open()
        return await copy_to_sqlite(self._reader, self.recover_small, self._writer, path)

    async def probe_room(self) -> bool:
        self._check_open()
        if not self._mirror.has_room:
            return False
        try:
            text: bytes = await self._reading.call("INFO", "memory")
        except ServerTrouble:
            return False
        rows = (row.split(":", 1) for row in text.decode().splitlines() if ":" in row)
        info = dict(rows)
        limit, used = int(info["maxmemory"]), int(info["used_memory"])
        return limit == 0 or limit - used >= max(ROOM_BYTES_MIN, limit // ROOM_DIVISOR)

    async def verify(self) -> None:
        """See ``Store.verify``."""
        self._check_open()
        with contextlib.suppress(StoreAway, ServerTrouble):
            await self._rewriter.verify()

    async def close(self, clean: bool) -> None:
        """See ``Store.close``. If Redis cannot be reached, ``clean`` is not recorded."""
        if not self._is_open:
            return
        self._is_open = False
        await self._watch.stop()
        try:
            clean = clean and not self._rewriter.active
            await self._rewriter.close()
            if clean:
                await self._writer.end()
        except StoreError as error:
            log.warning("store %s: not closed cleanly: %s", self.name, error.message)
        finally:
            await self._writing.close()
            await self._reading.close()


# --- the lease -----------------------------------------------------------------------------------


class RedisElection(ServerElection):
    """The election in Redis; see ``contract.Election``."""

    _link: Connection

    def __init__(self, options: RedisOptions, ttl_ms: int) -> None:
        super().__init__(options, ttl_ms, Connection)
        keys = Keys(options.prefix, options.namespace, options.shard)
        self._keys = (keys.leader, keys.named["scratch"], keys.named["wheel"], keys.standbys)

    async def prepare(self) -> None:
        async with opening.connected_to(self._options) as connection:
            await opening.inspect(connection, self._options)

    async def look(self, me: Standby | None = None) -> ElectionState:
        args = (self._ttl_ms, "" if me is None else _standby_value(me))
        reply = await self._link.run(LEADER_LOOK, self._keys, args)
        value, ttl_ms, incarnation, epoch, owner, clean, up_s, rewriting, role = reply[:9]
        self._standbys, was_promoted, leased_here = _standbys(reply[9]), reply[10], reply[11]
        mark = rewriting.decode(errors="replace")
        data_age_s = min(int(up_s), self._link.connected_s) if was_promoted else int(up_s)
        return ElectionState(
            leader=_leader(value.decode(errors="replace")),
            ttl_ms=max(0, ttl_ms),
            incarnation=incarnation.decode(),
            epoch=int(epoch),
            owner=owner.decode(errors="replace"),
            clean=clean == b"1",
            up_s=data_age_s,
            rewriting="" if mark.startswith(LOST_BY) else mark,
            is_replica=role == b"slave",
            lost_by=mark.removeprefix(LOST_BY) if mark.startswith(LOST_BY) else "",
            leased_here=bool(leased_here),
        )

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        replaced = _value(instead_of) if instead_of is not None else ""
        args = (_owner(me), _value(me), self._ttl_ms, replaced)
        return bool(await self._link.run(LEADER_ACQUIRE, self._keys, args))

    async def renew(self, me: Leader) -> bool:
        args = (_owner(me), _value(me), self._ttl_ms)
        renewed, standbys = await self._link.run(LEADER_RENEW, self._keys, args)
        self._standbys = _standbys(standbys)
        return bool(renewed)

    async def release(self, me: Leader) -> None:
        await self._link.run(LEADER_RELEASE, self._keys, (_owner(me),))


def _owner(leader: Leader) -> str:
    return _field(leader.owner)


def _field(text: str) -> str:
    """Return text that can be a field of the lease's value, in which ``|`` separates fields."""
    return text.replace("|", "_")


def _value(leader: Leader) -> str:
    address, http = _field(leader.address), _field(leader.http)
    return f"{_owner(leader)}|{address}|{leader.since_ms}|{leader.epoch}|{leader.life}|{http}"


def _leader(value: str) -> Leader | None:
    if not value:
        return None
    owner, address, since_ms, epoch, life, http = [*value.split("|"), *[""] * 5][:6]
    since, at_epoch = (int(text) if text.isdecimal() else 0 for text in (since_ms, epoch))
    return Leader(owner, address, since, at_epoch, life, http)


def _standby_value(standby: Standby) -> str:
    node, address, http = map(_field, (standby.node, standby.address, standby.http))
    return f"{node}|{address}|{standby.since_ms}|{http}"


def _standbys(values: list[bytes]) -> tuple[Standby, ...]:
    standbys = {}
    for value in values:
        text = value.decode(errors="replace")
        node, address, since_ms, http = [*text.split("|"), *[""] * 3][:4]
        since = int(since_ms) if since_ms.isdecimal() else 0
        # A later entry of the same node and address replaces an earlier one.
        standbys[node, address] = Standby(node, address, http, since)
    return tuple(standbys[key] for key in sorted(standbys))


# --- the registry of nodes ------------------------------------------------------------------------

NODES_PART: Final = "nodes"
NODES_NAMES: Final = ("nodes", "until", "placed", "drained", "route", "scratch")


class RedisNodes(ServerNodes):
    """The registry of the nodes that share a Redis; see ``contract.NodeRegistry``.

    All its keys, and no others, have the hash tag ``S`` = ``{tw:default:nodes}``:

    | key | type | contents |
    |---|---|---|
    | S:nodes | hash | node → its run and its record (JSON with a format) |
    | S:until | hash | node → the millisecond, by Redis's clock, at which it counts as ended |
    | S:placed | hash | shard → the node where an operator has placed it |
    | S:drained | hash | the nodes that an operator has drained |
    | S:route | hash | number of shards; version; shard → the daemon that last claimed to lead it |

    If this registry is lost, each node writes its record again with its next beat. Only the
    placements and drains of operators are lost; no task is.
    """

    def __init__(self, options: RedisOptions, shards: int) -> None:
        check(options)
        super().__init__(options.name, shards)
        options = replace(options, part=NODES_PART)
        self._has_answered = False
        self._connection = Connection(options)
        self._keys = tuple(f"{{{options.tag}}}:{name}".encode() for name in NODES_NAMES)

    async def _write(self, me: NodeRecord, text: str, instead_of: str) -> NodesSeen:
        args: list[str | int] = [self._shards, me.ttl_ms, me.name, me.run, text, instead_of]
        args.append(NODES_MAX)
        for claim in me.claims:
            args += [claim.shard, f"{claim.epoch}|{claim.address}"]
        try:
            shards, *reply = await self._connection.run(NODES_BEAT, self._keys, args)
        except ServerError as error:
            if self._has_answered or not is_command_unavailable(error):
                raise
            # No call has succeeded yet, so the server or the user's rights are not suitable.
            raise unusable(self._name, error.message) from None
        self._has_answered = True
        self._check_shards(int(shards))
        if len(reply) == 1:
            raise self._too_many(int(reply[0]), NODES_MAX)
        now_ms, is_mine, version, nodes, until, placed, drained = reply
        return self._seen(
            me,
            {name: text.partition("|")[2] for name, text in _pairs(nodes).items()},
            {name: int(text) for name, text in _pairs(until).items()},
            is_mine=bool(is_mine),
            now_ms=now_ms,
            placed={int(shard): node for shard, node in _pairs(placed).items()},
            drained=_pairs(drained),
            version=int(version),
        )

    async def place(self, shard: int, node: str | None) -> None:
        key = self._keys[NODES_NAMES.index("placed")]
        if node is None:
            await self._connection.call("HDEL", key, shard)
        else:
            await self._connection.call("HSET", key, shard, node)

    async def drain(self, node: str, *, draining: bool) -> None:
        key = self._keys[NODES_NAMES.index("drained")]
        if draining:
            await self._connection.call("HSET", key, node, 1)
        else:
            await self._connection.call("HDEL", key, node)

    async def close(self) -> None:
        await self._connection.close()


def _pairs(flat: list[bytes]) -> dict[str, str]:
    texts = [value.decode(errors="replace") for value in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
