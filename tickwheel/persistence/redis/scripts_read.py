"""The scripts that read a shard; they write nothing. See ``lua``."""

from __future__ import annotations

from tickwheel.persistence.redis.lua import PRELUDE, Script

# What a read has to see at least: the same incarnation, every batch whose commit returned, and
# no batch of which only some parts are applied.
_SEES = """
local function blind(incarnation, last)
  local w = redis.call('HMGET', WHEEL, 'incarnation', 'last', 'parts')
  if not w[1] then return {'gone'} end
  if w[1] ~= incarnation then return {'other', w[1]} end
  if tonumber(w[2]) < tonumber(last) then return {'behind', w[2]} end
  if w[3] then return {'half', w[2]} end
end
"""

READ = Script(
    "read",
    PRELUDE
    + _SEES
    + """
-- incarnation, last, bytes at which to stop, ids …
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local tasks, rows, size, max = {}, {}, 0, tonumber(ARGV[3])
local touched = redis.call('EXISTS', TOUCHED) == 1
for k = 4, #ARGV do
  local id = ARGV[k]
  local record = redis.call('HGET', TASK, id)
  tasks[#tasks + 1] = record
  if record then
    size = size + #record
    local groups = touched and redis.call('HGET', TOUCHED, id)
    if groups then
      for group in string.gmatch(groups, '([^\\n]*)\\n') do
        local member = id .. '/' .. group
        rows[#rows + 1] = member
        rows[#rows + 1] = redis.call('HGET', PROGRESS, member)
        rows[#rows + 1] = redis.call('HGET', DEAD_RECORD, member)
      end
    end
    if size > max then break end
  end
end
return {'ok', tasks, rows}
""",
)

DEAD_PAGE = Script(
    "dead_page",
    PRELUDE
    + _SEES
    + """
-- incarnation, last, where to begin, how many
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local members = redis.call('ZRANGEBYLEX', DEAD, ARGV[3], '+', 'LIMIT', 0, ARGV[4])
if #members == 0 then return {'ok', members, members} end
return {'ok', members, redis.call('HMGET', DEAD_RECORD, unpack(members))}
""",
)

HANDLES = Script(
    "handles",
    PRELUDE
    + _SEES
    + """
-- incarnation, last, score and member to go on after ('' at first), how many at most, bytes of
-- records at which to stop. The member may be gone by now, and many tasks may share the score:
-- the place is found by halving. Each task's topic and record are returned.
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local at = 0
if ARGV[4] ~= '' then
  at = redis.call('ZCOUNT', STORE, '-inf', '(' .. ARGV[3])
  local stop = at + redis.call('ZCOUNT', STORE, ARGV[3], ARGV[3])
  while at < stop do
    local middle = math.floor((at + stop) / 2)
    if redis.call('ZRANGE', STORE, middle, middle)[1] > ARGV[4] then stop = middle
    else at = middle + 1 end
  end
end
local byte = string.byte
local skip = {[0xcc] = 2, [0xd0] = 2, [0xcd] = 3, [0xd1] = 3, [0xce] = 5, [0xd2] = 5,
  [0xcf] = 9, [0xd3] = 9}
-- A record is a msgpack array: version, id, due, topic … (every version keeps this beginning).
local function topic(record)
  local k = 2
  for _ = 1, 3 do k = k + (skip[byte(record, k)] or 1) end
  local b = byte(record, k)
  if b < 0xc0 then return string.sub(record, k + 1, k + b - 0xa0) end
  if b == 0xd9 then return string.sub(record, k + 2, k + 1 + byte(record, k + 1)) end
  local size = byte(record, k + 1) * 256 + byte(record, k + 2)
  return string.sub(record, k + 3, k + 2 + size)
end
local found = redis.call('ZRANGE', STORE, at, at + tonumber(ARGV[5]) - 1, 'WITHSCORES')
local values, size, max = {}, 0, tonumber(ARGV[6])
for k = 1, #found, 2 do
  if size > max then break end
  local record = redis.call('HGET', TASK, found[k])
  if not record then return {'damaged', found[k]} end
  size = size + #record
  values[k], values[k + 1] = topic(record), record
end
return {'ok', found, values}
""",
)
