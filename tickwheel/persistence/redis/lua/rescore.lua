-- epoch, owner, link, number of topics, number and name of each, then score and id of each task. Sets
-- scores during an upgrade; it is repeated until all are set.
local refused = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
begin(true)
local first = 5 + 2 * tonumber(ARGV[4])
if first > 5 then redis.call('HSET', TOPICS, unpack(ARGV, 5, first - 1)) end
for j = first, #ARGV, STEP do
  redis.call('ZADD', STORE, 'XX', unpack(ARGV, j, math.min(j + STEP - 1, #ARGV)))
end
return {'applied'}
