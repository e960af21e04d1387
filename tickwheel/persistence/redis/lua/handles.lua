-- incarnation, last, score and member to go on after ('' at first), how many at most, bytes of
-- records at which to stop, whether records are wanted (0/1). The member may be gone by now, and
-- many tasks may share the score: the place is found by halving. Each task's topic, record ('' if
-- it is not wanted) and key, if it has one, are returned.
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
-- The text at k, and what comes behind it.
local function text(record, k)
  local b, size, head = byte(record, k), 0, 1
  if b < 0xc0 then size = b - 0xa0
  elseif b == 0xd9 then size, head = byte(record, k + 1), 2
  else size, head = byte(record, k + 1) * 256 + byte(record, k + 2), 3 end
  return string.sub(record, k + head, k + head + size - 1), k + head + size
end
-- A record is a msgpack array: version, id, due, topic, body, nothing or an array that begins with
-- the key or nothing (every version keeps this).
local function topic_and_key(record)
  local k, topic = 2, nil
  for _ = 1, 3 do k = k + (skip[byte(record, k)] or 1) end
  topic, k = text(record, k)
  local width = byte(record, k) == 0xc4 and 1 or byte(record, k) == 0xc5 and 2 or 4
  local size = 0
  for j = 1, width do size = size * 256 + byte(record, k + j) end
  k = k + 1 + width + size
  if byte(record, k) == 0xc0 or byte(record, k + 1) == 0xc0 then return topic, false end
  return topic, (text(record, k + 1))
end
local found = redis.call('ZRANGE', STORE, at, at + tonumber(ARGV[5]) - 1, 'WITHSCORES')
local values, at, size, max, wanted = {}, 1, 0, tonumber(ARGV[6]), ARGV[7] == '1'
for k = 1, #found, 2 do
  if size > max then break end
  local record = redis.call('HGET', TASK, found[k])
  if not record then return {'damaged', found[k]} end
  size = size + #record
  values[at + 1], values[at], values[at + 2] = wanted and record or '', topic_and_key(record)
  at = at + 3
end
return {'ok', found, values}
