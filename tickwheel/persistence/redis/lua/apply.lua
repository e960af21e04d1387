-- Applies the operations of a batch, or of a part of one.
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
      if not string.find('\n' .. list, '\n' .. group .. '\n', 1, true) then
        now[id] = list .. group .. '\n'
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
          for group in string.gmatch(lists[k], '([^\n]*)\n') do
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
