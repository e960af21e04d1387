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
