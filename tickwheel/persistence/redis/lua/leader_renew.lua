-- owner, value, ttl
if not mine(ARGV[1]) then return {0, {}} end
redis.call('DEL', SCRATCH)
redis.call('PEXPIRE', LEADER, ARGV[3])
if found ~= ARGV[2] then redis.call('SET', LEADER, ARGV[2], 'PX', ARGV[3]) end
note_here()
return {1, standing_by(UP_S, ARGV[3])}
