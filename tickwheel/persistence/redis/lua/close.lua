-- epoch, owner, link
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
begin(true)
redis.call('HSET', WHEEL, 'clean', 1)
return {'applied'}
