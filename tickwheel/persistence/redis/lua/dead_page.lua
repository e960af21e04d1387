-- incarnation, last, start of the page, number of members
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local members = redis.call('ZRANGEBYLEX', DEAD, ARGV[3], '+', 'LIMIT', 0, ARGV[4])
if #members == 0 then return {'ok', members, members} end
return {'ok', members, redis.call('HMGET', DEAD_RECORD, unpack(members))}
