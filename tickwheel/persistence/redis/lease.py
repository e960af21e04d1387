"""The leader's lease in Redis: one key with a time to live, changed only by its owner.

``S:leader`` holds ``owner|address|since_ms|epoch``, and ``|life`` where that is known; older
releases read the first four. On a line of its own with time-outs well below the lease's, so that
a batch under way never delays a renewal. A renewal begins with a harmless removal and extends by
PEXPIRE: Redis lets both pass when it has no memory left.
"""

from __future__ import annotations

from dataclasses import replace

from tickwheel.persistence.election import Leader, Seen
from tickwheel.persistence.redis import opening
from tickwheel.persistence.redis.connection import Line, check
from tickwheel.persistence.redis.keys import Keys, Script
from tickwheel.persistence.redis.options import RedisOptions

CALL_MS_MIN = 100

# Every script: KEYS leader, scratch, wheel.
_MINE = """
local LEADER, SCRATCH, WHEEL = KEYS[1], KEYS[2], KEYS[3]
local found = redis.call('GET', LEADER)
local function mine(owner)
  return found and string.sub(found, 1, #owner + 1) == owner .. '|'
end
"""
LOOK = Script(
    "look",
    _MINE
    + """
local w = redis.call('HMGET', WHEEL, 'incarnation', 'epoch', 'owner', 'clean', 'rewriting')
local up_s = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
local role = string.match(redis.call('INFO', 'replication'), 'role:(%a+)')
return {found or '', redis.call('PTTL', LEADER), w[1] or '', w[2] or '0', w[3] or '',
  w[4] or '1', up_s, w[5] or '', role or ''}
""",
)
ACQUIRE = Script(
    "acquire",
    _MINE
    + """
-- owner, value, ttl, a value that may be replaced. Asking twice is harmless: the first answer
-- may have been lost.
if found and not mine(ARGV[1]) and found ~= ARGV[4] then return 0 end
redis.call('DEL', SCRATCH)
redis.call('SET', LEADER, ARGV[2], 'PX', ARGV[3])
return 1
""",
)
RENEW = Script(
    "renew",
    _MINE
    + """
-- owner, value, ttl
if not mine(ARGV[1]) then return 0 end
redis.call('DEL', SCRATCH)
redis.call('PEXPIRE', LEADER, ARGV[3])
if found ~= ARGV[2] then redis.call('SET', LEADER, ARGV[2], 'PX', ARGV[3]) end
return 1
""",
)
RELEASE = Script(
    "release",
    _MINE
    + """
-- owner
if mine(ARGV[1]) then redis.call('DEL', LEADER) end
return 1
""",
)


class RedisElection:
    """See ``election.Election``."""

    def __init__(self, options: RedisOptions, ttl_ms: int) -> None:
        self._options = options
        call_ms = max(CALL_MS_MIN, ttl_ms // 4)
        self._line = Line(
            replace(
                options,
                call_ms=min(options.call_ms, call_ms),
                connect_ms=min(options.connect_ms, call_ms),
            )
        )
        keys = Keys(options.prefix, options.namespace, options.shard)
        self._keys = (keys.leader, keys.named["scratch"], keys.named["wheel"])
        self._ttl_ms = ttl_ms

    @property
    def connections(self) -> int:
        return self._line.connections

    async def prepare(self) -> None:
        check(self._options)
        line = Line(self._options)
        try:
            await opening.inspect(line, self._options)
        finally:
            await line.close()

    async def look(self) -> Seen:
        reply = await self._line.run(LOOK, self._keys, ())
        value, ttl_ms, incarnation, epoch, owner, clean, up_s, rewriting, role = reply
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
        return bool(await self._line.run(ACQUIRE, self._keys, args))

    async def renew(self, me: Leader) -> bool:
        args = (_owner(me), _value(me), self._ttl_ms)
        return bool(await self._line.run(RENEW, self._keys, args))

    async def release(self, me: Leader) -> None:
        await self._line.run(RELEASE, self._keys, (_owner(me),))

    async def close(self) -> None:
        await self._line.close()


def _owner(leader: Leader) -> str:
    return leader.owner.replace("|", "_")


def _value(leader: Leader) -> str:
    address = leader.address.replace("|", "_")
    told = f"{_owner(leader)}|{address}|{leader.since_ms}|{leader.epoch}"
    return f"{told}|{leader.life}" if leader.life else told


def _leader(value: str) -> Leader | None:
    if not value:
        return None
    owner, address, since_ms, epoch, life = [*value.split("|"), "", "0", "0", "", ""][:5]
    since, at_epoch = (int(text) if text.isdecimal() else 0 for text in (since_ms, epoch))
    return Leader(owner, address, since, at_epoch, life)
