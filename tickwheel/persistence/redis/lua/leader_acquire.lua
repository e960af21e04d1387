-- owner, value, ttl, a value that may be replaced. Asking twice is harmless: the first answer
-- may have been lost.
if found and not mine(ARGV[1]) and found ~= ARGV[4] then return 0 end
redis.call('DEL', SCRATCH)
redis.call('SET', LEADER, ARGV[2], 'PX', ARGV[3])
note_here()
return 1
