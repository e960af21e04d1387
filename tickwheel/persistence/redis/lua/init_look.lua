-- layout, types of the keys …
local refused, any, w, whole = seen(1)
if refused then return refused end
return {'seen', any, whole, w[2] or '0', w[3] or '', w[4] or '', w[5] or '', w[6] or '0',
  w[8] or '0',
  redis.call('HLEN', TASK), redis.call('ZCARD', PREPARE), redis.call('ZCARD', DEAD),
  redis.call('HLEN', RECORDS)}
