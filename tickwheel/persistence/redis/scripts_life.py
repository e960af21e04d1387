"""The scripts that open, claim, close and rewrite a shard. See ``lua``."""

from __future__ import annotations

from tickwheel.persistence.redis.lua import FENCE, PRELUDE, Script

CLAIM = Script(
    "claim",
    PRELUDE
    + """
-- epoch, owner, incarnation, newest claim known. A connection claims the shard before it writes:
-- what an older connection sent is void from here on, so that the last batch read here is final.
local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'incarnation', 'last', 'parts', 'part',
  'rewriting', 'link')
if not w[1] then return {'gone'} end
if w[3] ~= ARGV[3] then return {'other', w[3] or '', w[1], w[2]} end
local epoch, mine = tonumber(w[1]), tonumber(ARGV[1])
if epoch > mine or (epoch == mine and w[2] ~= ARGV[2]) then return {'fenced', w[1], w[2] or ''} end
begin(true)
-- A lower epoch: Redis lost the last opening too.
if epoch < mine then redis.call('HSET', WHEEL, 'epoch', ARGV[1], 'owner', ARGV[2], 'clean', 0) end
-- Redis may have come back with a lower number: no claim is given twice.
local link = math.max(tonumber(w[8] or '0'), tonumber(ARGV[4])) + 1
redis.call('HSET', WHEEL, 'link', link)
return {'ok', tostring(link), w[4] or '0', w[5] or '', w[6] or '', w[7] or '', w[1]}
""",
)

OPEN = Script(
    "open",
    PRELUDE
    + """
-- owner, now, incarnation if it is new, layout, may be created (0/1), lowest epoch, types of the
-- keys …
local kind = redis.call('TYPE', WHEEL).ok
if kind == 'none' then
  for k = 2, #KEYS do
    if redis.call('EXISTS', KEYS[k]) == 1 then return {'foreign', KEYS[k]} end
  end
  if ARGV[5] == '0' then return {'empty'} end
  begin(false)
  redis.call('HSET', WHEEL, 'layout', ARGV[4], 'incarnation', ARGV[3], 'epoch', ARGV[6],
    'owner', ARGV[1], 'last', 0, 'id_mark', '0000000000000000000', 'position_ms', 0,
    'clean', 0, 'opened_ms', ARGV[2], 'link', 0, 'endings', 0)
  return {'created', ARGV[6], '0', '0', '0', '1', ARGV[3]}
end
for k = 1, #KEYS do
  kind = redis.call('TYPE', KEYS[k]).ok
  if kind ~= 'none' and kind ~= ARGV[6 + k] then return {'foreign', KEYS[k]} end
end
local w = redis.call('HMGET', WHEEL, 'layout', 'epoch', 'last', 'id_mark', 'position_ms',
  'clean', 'incarnation', 'link', 'rewriting')
if not w[1] then return {'foreign', WHEEL} end
if tonumber(w[1]) > tonumber(ARGV[4]) then return {'newer', w[1]} end
for k = 2, 8 do if not w[k] then return {'damaged'} end end
if w[9] then return {'rewriting', w[9]} end
begin(true)
local epoch = math.max(tonumber(w[2]) + 1, tonumber(ARGV[6]))
redis.call('HSET', WHEEL, 'epoch', epoch)
redis.call('HSET', WHEEL, 'owner', ARGV[1], 'clean', 0, 'opened_ms', ARGV[2])
return {'opened', tostring(epoch), w[3], w[4], w[5], w[6], w[7]}
""",
)

CLOSE = Script(
    "close",
    PRELUDE
    + FENCE
    + """
-- epoch, owner, link
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
begin(true)
redis.call('HSET', WHEEL, 'clean', 1)
return {'applied'}
""",
)

REWRITE = Script(
    "rewrite",
    PRELUDE
    + """
-- epoch, owner, incarnation, layout, phase (begin/end), last batch, now, newest claim known,
-- batches written. Between begin and end commits count from 1, and nobody else opens the shard.
local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'incarnation', 'rewriting', 'link',
  'last', 'parts')
if w[1] then
  local epoch, mine = tonumber(w[1]), tonumber(ARGV[1])
  if w[3] ~= ARGV[3] or epoch > mine or (epoch == mine and w[2] ~= ARGV[2]) then
    return {'fenced', w[1], w[2] or ''}
  end
  -- A late one must not remove what was written since.
  if w[5] ~= ARGV[8] then return {'stale'} end
end
if ARGV[5] == 'end' then
  if not w[4] then return {'gone'} end
  if w[6] ~= ARGV[9] or w[7] then return {'behind'} end
  begin(true)
  redis.call('HSET', WHEEL, 'last', ARGV[6])
  redis.call('HDEL', WHEEL, 'rewriting')
  return {'applied'}
end
begin(false)
redis.call('UNLINK', unpack(KEYS))
redis.call('HSET', WHEEL, 'layout', ARGV[4], 'incarnation', ARGV[3], 'epoch', ARGV[1],
  'owner', ARGV[2], 'last', 0, 'id_mark', '0000000000000000000', 'position_ms', 0, 'clean', 0,
  'opened_ms', ARGV[7], 'link', tonumber(ARGV[8]) + 1, 'endings', 0, 'rewriting', ARGV[2])
return {'applied'}
""",
)
