"""The Lua scripts: those that apply a batch (at once, or staged in parts, sealed, and applied),
those that open, claim, close and rewrite a shard, and those that read one and write nothing.

``keys`` says what they all keep to.
"""

from __future__ import annotations

from tickwheel.persistence.redis.keys import FENCE, PRELUDE, Script

_APPLY = """
local function each(command, key, list)
  for j = 1, #list, STEP do
    redis.call(command, key, unpack(list, j, math.min(j + STEP - 1, #list)))
  end
end
local function touch(args, first, stop)
  for j = first, stop, STEP do
    local ids, now, set = {}, {}, {}
    for k = j, math.min(j + STEP - 1, stop), 2 do ids[#ids + 1] = args[k] end
    local lists = redis.call('HMGET', TOUCHED, unpack(ids))
    for k = 1, #ids do
      local id, group = ids[k], args[j + 2 * k - 1]
      local list = now[id] or lists[k] or ''
      if not string.find('\\n' .. list, '\\n' .. group .. '\\n', 1, true) then
        now[id] = list .. group .. '\\n'
      end
    end
    for id, list in pairs(now) do
      set[#set + 1] = id
      set[#set + 1] = list
    end
    if #set > 0 then redis.call('HSET', TOUCHED, unpack(set)) end
  end
end
local function finish(args, first, stop)
  local touched = redis.call('EXISTS', TOUCHED) == 1
  for j = first, stop, STEP do
    local upto = math.min(j + STEP - 1, stop)
    redis.call('HDEL', TASK, unpack(args, j, upto))
    redis.call('ZREM', STORE, unpack(args, j, upto))
    if touched then
      local lists = redis.call('HMGET', TOUCHED, unpack(args, j, upto))
      local ids, members = {}, {}
      for k = 1, upto - j + 1 do
        if lists[k] then
          local id = args[j + k - 1]
          ids[#ids + 1] = id
          for group in string.gmatch(lists[k], '([^\\n]*)\\n') do
            members[#members + 1] = id .. '/' .. group
          end
        end
      end
      each('HDEL', TOUCHED, ids)
      each('HDEL', PROGRESS, members)
      each('ZREM', PREPARE, members)
      each('HDEL', DEAD_RECORD, members)
      each('ZREM', DEAD, members)
    end
  end
end
local function remember(args, first)
  local max, count, record = tonumber(args[first]), args[first + 1], args[first + 2]
  local total = tonumber(redis.call('HGET', WHEEL, 'endings') or '0') + tonumber(count)
  redis.call('RPUSH', ENDINGS, count .. ':' .. record)
  while true do
    local head = redis.call('LINDEX', ENDINGS, 0)
    local oldest = tonumber(string.match(head, '^(%d+):'))
    if total - oldest < max then break end
    redis.call('LPOP', ENDINGS)
    total = total - oldest
  end
  redis.call('HSET', WHEEL, 'endings', total)
end
local function apply(args, at)
  while at <= #args do
    local op, key, size = args[at], KEYS[tonumber(args[at + 1])], tonumber(args[at + 2])
    local first, stop = at + 3, at + 2 + size
    if op == 'TOUCH' then touch(args, first, stop)
    elseif op == 'END' then finish(args, first, stop)
    elseif op == 'ENDING' then remember(args, first)
    elseif op == 'NEW' then redis.call('ZADD', key, unpack(cmsgpack.unpack(args[first])))
    elseif op == 'RECORDS' then redis.call('HSET', key, unpack(cmsgpack.unpack(args[first])))
    else
      for j = first, stop, STEP do
        redis.call(op, key, unpack(args, j, math.min(j + STEP - 1, stop)))
      end
    end
    at = stop + 1
  end
end
"""

COMMIT = Script(
    "commit",
    PRELUDE
    + FENCE
    + _APPLY
    + """
-- epoch, owner, link, n, makes tasks (0/1), lowest new id, id mark, position, operations …
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
refused = place(w, ARGV[4])
if refused then return refused end
if ARGV[6] ~= '' and ARGV[6] <= redis.call('HGET', WHEEL, 'id_mark') then
  local id = find_twice(ARGV, 9)
  if id then return {'twice', id} end
end
begin(ARGV[5] == '0')
apply(ARGV, 9)
redis.call('HSET', WHEEL, 'last', ARGV[4], 'id_mark', ARGV[7], 'position_ms', ARGV[8])
return {'applied'}
""",
)

STAGE = Script(
    "stage",
    PRELUDE
    + FENCE
    + """
-- epoch, owner, link, n, makes tasks (0/1), operations …; the part's key comes last
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
refused = place(w, ARGV[4])
if refused then return refused end
local id = find_twice(ARGV, 6)
if id then return {'twice', id} end
begin(ARGV[5] == '0')
local part = KEYS[13]
redis.call('DEL', part)
for j = 6, #ARGV, STEP do
  redis.call('RPUSH', part, unpack(ARGV, j, math.min(j + STEP - 1, #ARGV)))
end
return {'staged'}
""",
)

SEAL = Script(
    "seal",
    PRELUDE
    + FENCE
    + """
-- epoch, owner, link, n, id mark, position; the keys of all parts come last. From here on the
-- batch is taken: whoever owns the shard applies its parts before anything else.
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
refused = place(w, ARGV[4])
if refused then return refused end
for k = 13, #KEYS do
  if redis.call('EXISTS', KEYS[k]) == 0 then return {'unstaged'} end
end
begin(true)
redis.call('HSET', WHEEL, 'last', ARGV[4], 'id_mark', ARGV[5], 'position_ms', ARGV[6],
  'parts', #KEYS - 12, 'part', 0)
return {'applied'}
""",
)

APPLY_PART = Script(
    "apply_part",
    PRELUDE
    + FENCE
    + _APPLY
    + """
-- epoch, owner, link, part; the part's key comes last
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if not w[5] or tonumber(ARGV[4]) <= tonumber(w[6]) then return {'before'} end
if tonumber(ARGV[4]) ~= tonumber(w[6]) + 1 then return {'gap', w[6]} end
begin(true)
apply(redis.call('LRANGE', KEYS[13], 0, -1), 1)
redis.call('DEL', KEYS[13])
if ARGV[4] == w[5] then redis.call('HDEL', WHEEL, 'parts', 'part')
else redis.call('HSET', WHEEL, 'part', ARGV[4]) end
return {'applied'}
""",
)


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
