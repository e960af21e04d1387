-- owner
if mine(ARGV[1]) then redis.call('DEL', LEADER) end
return 1
