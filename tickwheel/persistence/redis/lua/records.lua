-- incarnation, last, bytes of records at which to stop, bytes from which on a record's body is left out,
-- ids … Returns lists of records (false: the task has ended), and their number.
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local byte, sub = string.byte, string.sub
local skip = {[0xcc] = 2, [0xd0] = 2, [0xcd] = 3, [0xd1] = 3, [0xce] = 5, [0xd2] = 5,
  [0xcf] = 9, [0xd3] = 9}
-- A record is a msgpack array: version, id, due, topic, body, options (every version keeps this).
local function without_body(record)
  local k = 2
  for _ = 1, 3 do k = k + (skip[byte(record, k)] or 1) end
  local kind, high, low = byte(record, k, k + 2)
  if kind < 0xc0 then k = k + 1 + kind - 0xa0
  elseif kind == 0xd9 then k = k + 2 + high
  else k = k + 3 + high * 256 + low end
  local width = byte(record, k) == 0xc4 and 1 or byte(record, k) == 0xc5 and 2 or 4
  local size = 0
  for j = 1, width do size = size * 256 + byte(record, k + j) end
  return sub(record, 1, k - 1) .. '\196\0' .. sub(record, k + 1 + width + size)
end
local lists, first, size, max, whole = {}, 5, 0, tonumber(ARGV[3]), tonumber(ARGV[4])
local step = 1  -- 64 after small records; large records are read one by one to bound memory
while first <= #ARGV and size <= max do
  local before = size
  local some = redis.call('HMGET', TASK, unpack(ARGV, first, math.min(first + step - 1, #ARGV)))
  for j = 1, #some do
    local record = some[j]
    if record then
      size = size + #record
      if #record >= whole then some[j] = without_body(record) end
    end
  end
  lists[#lists + 1] = some
  first = first + #some
  step = size - before < 65536 and 64 or 1
end
return {'ok', lists, first - 5}
