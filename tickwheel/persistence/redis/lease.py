"""The leader's lease in Redis: one key with a time to live, changed only by its owner.

``S:leader`` holds ``owner|address|since_ms|epoch|life|http``, of which the last two may be empty.
On a line of its own with time-outs well below the lease's, so that a batch under way never delays
a renewal. A renewal begins with a harmless removal and extends by PEXPIRE: Redis lets both pass
when it has no memory left. ``S:standbys`` is for people: who stands by says so at every look that
is given its name (``node|address|since_ms|http``), and who leads reads it with its renewals.
"""

from __future__ import annotations

from dataclasses import replace

from tickwheel.persistence.contract import Leader, Seen, Standby
from tickwheel.persistence.redis import opening
from tickwheel.persistence.redis.connection import Connection, check
from tickwheel.persistence.redis.driver import RedisOptions
from tickwheel.persistence.redis.layout import (
    LEADER_ACQUIRE,
    LEADER_LOOK,
    LEADER_RELEASE,
    LEADER_RENEW,
    Keys,
)

CALL_MS_MIN = 100


class RedisElection:
    """The election in Redis: see ``election.Election``."""

    def __init__(self, options: RedisOptions, ttl_ms: int) -> None:
        self._options = options
        call_ms = max(CALL_MS_MIN, ttl_ms // 4)
        self._line = Connection(
            replace(
                options,
                call_ms=min(options.call_ms, call_ms),
                connect_ms=min(options.connect_ms, call_ms),
            )
        )
        keys = Keys(options.prefix, options.namespace, options.shard)
        self._keys = (keys.leader, keys.named["scratch"], keys.named["wheel"], keys.standbys)
        self._ttl_ms = ttl_ms
        self._standbys: tuple[Standby, ...] = ()

    @property
    def connections(self) -> int:
        return self._line.connections

    @property
    def standbys(self) -> tuple[Standby, ...]:
        return self._standbys

    async def prepare(self) -> None:
        check(self._options)
        line = Connection(self._options)
        try:
            await opening.inspect(line, self._options)
        finally:
            await line.close()

    async def look(self, me: Standby | None = None) -> Seen:
        args = (self._ttl_ms, "" if me is None else _standby_value(me))
        reply = await self._line.run(LEADER_LOOK, self._keys, args)
        value, ttl_ms, incarnation, epoch, owner, clean, up_s, rewriting, role, standbys = reply
        self._standbys = _standbys(standbys)
        return Seen(
            leader=_leader(value.decode(errors="replace")),
            ttl_ms=max(0, ttl_ms),
            incarnation=incarnation.decode(),
            epoch=int(epoch),
            owner=owner.decode(errors="replace"),
            clean=clean == b"1",
            up_s=int(up_s),
            rewriting=rewriting.decode(errors="replace"),
            is_replica=role == b"slave",
        )

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        replaced = _value(instead_of) if instead_of is not None else ""
        args = (_owner(me), _value(me), self._ttl_ms, replaced)
        return bool(await self._line.run(LEADER_ACQUIRE, self._keys, args))

    async def renew(self, me: Leader) -> bool:
        args = (_owner(me), _value(me), self._ttl_ms)
        renewed, standbys = await self._line.run(LEADER_RENEW, self._keys, args)
        self._standbys = _standbys(standbys)
        return bool(renewed)

    async def release(self, me: Leader) -> None:
        await self._line.run(LEADER_RELEASE, self._keys, (_owner(me),))

    async def close(self) -> None:
        await self._line.close()


def _owner(leader: Leader) -> str:
    return _field(leader.owner)


def _field(text: str) -> str:
    """A text as a part of the lease's value, where ``|`` separates parts."""
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


def _standby_value(one: Standby) -> str:
    return f"{_field(one.node)}|{_field(one.address)}|{one.since_ms}|{_field(one.http)}"


def _standbys(values: list[bytes]) -> tuple[Standby, ...]:
    found = {}
    for value in values:
        text = value.decode(errors="replace")
        node, address, since_ms, http = [*text.split("|"), *[""] * 3][:4]
        since = int(since_ms) if since_ms.isdecimal() else 0
        # It said so before under another moment or address: the newest of a node counts.
        found[node, address] = Standby(node, address, http, since)
    return tuple(found[key] for key in sorted(found))
