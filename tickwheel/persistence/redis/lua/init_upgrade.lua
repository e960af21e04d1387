-- layout, whether to upgrade an older one to it (0/1), types of the keys …
local refused, any, w = seen(2)
if refused then return refused end
if ARGV[2] == '1' and w[1] then
  local leader = redis.call('GET', LEADER)
  if leader then return {'led', leader} end
  begin(true)
  redis.call('HSET', WHEEL, 'format', ARGV[1])
end
return {'seen', w[1] or '0'}
