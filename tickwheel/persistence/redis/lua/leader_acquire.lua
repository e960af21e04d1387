-- owner, value, ttl, the value of a dead leader that can be replaced. A repeated call is harmless,
-- because the first answer can have been lost.
if found and not mine(ARGV[1]) and found ~= ARGV[4] then return 0 end
redis.call('DEL', SCRATCH)
redis.call('SET', LEADER, ARGV[2], 'PX', ARGV[3])
note_here()
return 1
