"""What all Lua scripts share: names of the keys, the first write, the fence.

What the traps of Lua inside Redis (6.2 to 7, Valkey) ask for, and every script here keeps:

* No call gets more than 1,000 arguments (``unpack`` fails at about 8,000).
* A script is checked whole before its first write, because an error leaves the earlier writes.
  What Redis itself may refuse (no memory, read-only, no replicas) it refuses at the first
  write of a script and never later; ``begin`` makes that one harmless write.
* Without memory Redis refuses a script that begins with a growing command, and lets one pass
  that begins with DEL. So a batch that makes no task always goes through.
* Ids and epochs are compared as strings; numbers in Lua lose digits above 2^53.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Script:
    """Text and the name under which Redis caches it."""

    name: str
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


PRELUDE = """
local WHEEL, STORE, TASK, PREPARE, PROGRESS, TOUCHED, DEAD, DEAD_RECORD =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local ENDINGS, SCRATCH = KEYS[11], KEYS[12]
local STEP = 1000
-- The first write: refused when Redis takes no writes, and without memory unless 'must'.
local function begin(must)
  if must then redis.call('DEL', SCRATCH) else redis.call('SETRANGE', SCRATCH, 0, '') end
end
"""

# Nobody but the current owner on its newest connection: anything else is late.
FENCE = """
local function fence(epoch, owner, link)
  local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'link', 'last', 'parts', 'part')
  if not w[1] then return {'gone'} end
  if w[1] ~= epoch or w[2] ~= owner then return {'fenced', w[1], w[2]} end
  if w[3] ~= link then return {'stale'} end
  return nil, w
end
local function place(w, n)
  local last = tonumber(w[4])
  if tonumber(n) <= last then return {'before', w[4]} end
  if tonumber(n) > last + 1 then return {'gap', w[4]} end
end
-- The id among those of new tasks that is stored already, or nil.
local function twice(packed)
  local args, ids = cmsgpack.unpack(packed), {}
  for k = 2, #args, 2 do ids[#ids + 1] = args[k] end
  local scores = redis.call('ZMSCORE', STORE, unpack(ids))
  for k = 1, #ids do if scores[k] then return ids[k] end end
end
-- Operations are: name, number of the key, number of arguments, arguments. Those of NEW and
-- RECORDS are packed into one.
local function find_twice(args, at)
  while at <= #args do
    local size = tonumber(args[at + 2])
    if args[at] == 'NEW' then
      local id = twice(args[at + 3])
      if id then return id end
    end
    at = at + 3 + size
  end
end
"""
