"""What a user of Redis must be allowed to do, tried before a shard is used.

A right that is missing would otherwise show in the middle of a script, after its first writes,
or only when something is acknowledged. Nothing is changed by trying: every command gets the key
that never exists, or arguments that Redis refuses after it has looked at the user's rights.
"""

from __future__ import annotations

from typing import Any

from tickwheel.persistence.redis.drivers import Argument
from tickwheel.persistence.redis.layout import Keys
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.lua import PRELUDE
from tickwheel.persistence.redis.options import RedisOptions

OUTSIDE = ("client|setname", "select", "eval", "evalsha", "wait", "memory|usage")
"""Not from scripts. ``select`` for databases but 0, ``wait`` for ``wait_replicas``; without
``memory|usage`` the size of what there is is known only when it is loaded."""
_TRIED: dict[str, tuple[str, ...]] = {
    "get": (), "hdel": ("f",), "hget": ("f",), "hlen": (), "hmget": ("f",),
    "hscan": ("0",), "hset": ("f", "v", "f"), "lindex": ("0",), "lpop": (), "lrange": ("0", "0"),
    "pexpire": ("x",), "pttl": (), "set": ("v", "PX", "0"), "setrange": ("0", ""), "type": (),
    "unlink": (), "zadd": ("x", "m"), "zcard": (), "zcount": ("0", "0"), "zmscore": ("m",),
    "zrange": ("0", "0"), "zrangebylex": ("-", "+"), "zrem": ("m",), "zscan": ("0",),
}  # fmt: skip
"""What follows the key."""
COMMANDS = ("exists", "del", "info", *_TRIED, "rpush")
_TRY = (
    PRELUDE
    + """
local missing = {}
local function may(command, ...)
  local reply = redis.pcall(command, ...)
  local error = type(reply) == 'table' and reply.err
  if error and (string.find(error, 'NOPERM') or string.find(error, 'ACL failure')
      or string.find(error, 'user executing')) then
    missing[#missing + 1] = command
    return false
  end
  return reply
end
local there = may('exists', SCRATCH)
if there ~= 0 then return missing end  -- not ours, which the opening says
local removable = may('del', SCRATCH)  -- the first write: from here on memory is no matter
may('info', 'server')
local j = 1
while j <= #ARGV do
  local count = tonumber(ARGV[j + 1])
  may(ARGV[j], SCRATCH, unpack(ARGV, j + 2, j + 1 + count))
  j = j + 2 + count
end
-- This one cannot but write.
if removable and may('rpush', SCRATCH, 'v') then redis.pcall('del', SCRATCH) end
return missing
"""
)


async def missing(line: Line, options: RedisOptions) -> list[str]:
    """Commands that scripts may not run. Raises Answer for those outside, Away, Lost."""
    keys = Keys(options.prefix, options.namespace, options.shard)
    names = (*keys.all, keys.leader, keys.stage(1))
    tried: list[Argument] = []
    for name, rest in _TRIED.items():
        tried += (name, len(rest), *rest)
    reply: list[Any] = await line.call("EVAL", _TRY, len(names), *names, *tried)
    if options.wait_replicas:
        await line.call("WAIT", 0, 1)
    return [name.decode() for name in reply]
