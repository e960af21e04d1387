-- incarnation, last, score and member to go on after ('' at first), how many at most, bytes of
-- records at which to stop, whether records are wanted (0/1). The member may be gone by now, and
-- many tasks may share the score: the place is found by halving. Members and scores are returned;
-- of the first of them, as many as were read: topics, each with the number of tasks that follow each
-- other with it; keys, each behind the place of its task, from 0; records, if they are wanted.
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
local byte, char, sub = string.byte, string.char, string.sub
local skip = {[0xcc] = 2, [0xd0] = 2, [0xcd] = 3, [0xd1] = 3, [0xce] = 5, [0xd2] = 5,
  [0xcf] = 9, [0xd3] = 9}
-- The text at k, and what comes behind it.
local function text(record, k)
  local b, size, head = byte(record, k), 0, 1
  if b < 0xc0 then size = b - 0xa0
  elseif b == 0xd9 then size, head = byte(record, k + 1), 2
  else size, head = byte(record, k + 1) * 256 + byte(record, k + 2), 3 end
  return sub(record, k + head, k + head + size - 1), k + head + size
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
local ids, topics, keys, records = {}, {}, {}, {}
for k = 1, #found, 2 do ids[#ids + 1] = found[k] end
local size, max, wanted = 0, tonumber(ARGV[6]), ARGV[7] == '1'
-- Most tasks have the topic of the one before and no options. They are known by where their parts
-- are: version, id and due take 20 bytes, then come the topic as 'packed', a short body, nothing.
local packed, last, first = '', 0, 1
local function is_plain(record)
  local k = 21 + #packed
  if sub(record, 21, k - 1) ~= packed or byte(record, 3) ~= 0xcf or byte(record, 12) ~= 0xcf then
    return false
  end
  local kind, bytes = byte(record, k, k + 1)
  return kind == 0xc4 and k + 2 + bytes == #record and byte(record, #record) == 0xc0
end
local step = 1  -- 64 behind small records: large ones are not all to be here at once
while first <= #ids and size <= max do
  local before = size
  local some = redis.call('HMGET', TASK, unpack(ids, first, math.min(first + step - 1, #ids)))
  for j = 1, #some do
    local record = some[j]
    if not record then return {'damaged', ids[first + j - 1]} end
    size = size + #record
    if wanted then records[#records + 1] = record end
    if not is_plain(record) then
      local topic, key = topic_and_key(record)
      if topic ~= topics[last - 1] then
        last = last + 2
        topics[last - 1], topics[last] = topic, 0
        packed = (#topic < 32 and char(0xa0 + #topic) or char(0xd9, #topic)) .. topic
      end
      if key then
        keys[#keys + 1] = first + j - 2
        keys[#keys + 1] = key
      end
    end
    topics[last] = topics[last] + 1
  end
  first = first + #some
  step = size - before < 65536 and 64 or 1
end
return {'ok', found, {topics, keys, records}}
