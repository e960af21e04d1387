-- The settings of another shard, read beside its owner, in one moment. Its hash of records; the field
-- of its counter, the pattern of the fields of groups, how many records may be looked at. The groups
-- are left out where there are more.
local counter = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[3]) then return {counter} end
local found = redis.call('HSCAN', KEYS[1], 0, 'MATCH', ARGV[2], 'COUNT', ARGV[3])
if found[1] ~= '0' then return {counter} end
return {counter, found[2]}
