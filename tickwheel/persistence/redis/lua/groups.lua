-- Reads the settings of another shard at one moment. KEYS: its hash of records, its wheel. ARGV: the
-- field of its counter, the pattern of the fields of groups, the maximum number of records to scan.
-- With more records, the groups are left out. The reply is empty if the shard is incomplete.
local w = redis.call('HMGET', KEYS[2], 'rewriting', 'parts')
if w[1] or w[2] then return {} end
local counter = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[3]) then return {counter} end
local found = redis.call('HSCAN', KEYS[1], 0, 'MATCH', ARGV[2], 'COUNT', ARGV[3])
if found[1] ~= '0' then return {counter} end
return {counter, found[2]}
