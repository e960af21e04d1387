-- incarnation, last, score, member. Returns how many tasks are in the StoreQueue up to this position. The
-- member can have been removed, and many tasks can have its score: a binary search finds the position.
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local at = redis.call('ZCOUNT', STORE, '-inf', '(' .. ARGV[3])
local stop = at + redis.call('ZCOUNT', STORE, ARGV[3], ARGV[3])
while at < stop do
  local middle = math.floor((at + stop) / 2)
  if redis.call('ZRANGE', STORE, middle, middle)[1] > ARGV[4] then stop = middle
  else at = middle + 1 end
end
return {'ok', at, 0}
