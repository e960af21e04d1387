-- owner, now, incarnation of a new shard, newest known layout, whether to create it (0/1), lowest
-- epoch, earlier epochs, number of topics that can have numbers, types of the keys …
local kind = redis.call('TYPE', WHEEL).ok
if kind == 'none' then
  for k = 2, #KEYS do
    if redis.call('EXISTS', KEYS[k]) == 1 then return {'foreign', KEYS[k]} end
  end
  if ARGV[5] == '0' then return {'empty'} end
  begin(false)
  redis.call('HSET', WHEEL, 'format', ARGV[4], 'incarnation', ARGV[3], 'epoch', ARGV[6],
    'owner', ARGV[1], 'last', 0, 'id_mark', '0000000000000000000', 'position_ms', 0,
    'clean', 0, 'opened_ms', ARGV[2], 'link', 0, 'endings', 0)
  return {'created', ARGV[6], '0', '0', '0', '1', ARGV[3], {}}
end
for k = 1, #KEYS do
  kind = redis.call('TYPE', KEYS[k]).ok
  if kind ~= 'none' and kind ~= ARGV[8 + k] then return {'foreign', KEYS[k]} end
end
local w = redis.call('HMGET', WHEEL, 'format', 'epoch', 'last', 'id_mark', 'position_ms',
  'clean', 'incarnation', 'link', 'rewriting')
if not w[1] and redis.call('HGET', WHEEL, 'layout') then return {'unreleased'} end
if not w[1] then return {'foreign', WHEEL} end
if tonumber(w[1]) > tonumber(ARGV[4]) then return {'newer', w[1]} end
for k = 2, 8 do if not w[k] then return {'damaged'} end end
if w[9] then return {'rewriting', w[9]} end
begin(true)
local epoch = math.max(tonumber(w[2]) + 1, tonumber(ARGV[6]))
redis.call('HSET', WHEEL, 'epoch', epoch)
redis.call('HSET', WHEEL, 'format', ARGV[4], 'owner', ARGV[1], 'clean', 0, 'opened_ms', ARGV[2],
  'past', ARGV[7])
redis.call('HDEL', WHEEL, 'branch')
local numbers = {}
for k = 1, tonumber(ARGV[8]) do numbers[k] = k end
return {'opened', tostring(epoch), w[3], w[4], w[5], w[6], w[7],
  redis.call('HMGET', TOPICS, unpack(numbers))}
