-- epoch, owner, link, part; the part's key is last
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if not w[5] or tonumber(ARGV[4]) <= tonumber(w[6]) then return {'before'} end
if tonumber(ARGV[4]) ~= tonumber(w[6]) + 1 then return {'gap', w[6]} end
begin(true)
apply(redis.call('LRANGE', KEYS[FIRST_PART], 0, -1), 1)
redis.call('DEL', KEYS[FIRST_PART])
if ARGV[4] == w[5] then redis.call('HDEL', WHEEL, 'parts', 'part')
else redis.call('HSET', WHEEL, 'part', ARGV[4]) end
return {'applied'}
