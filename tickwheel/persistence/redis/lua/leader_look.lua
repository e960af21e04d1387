local w = redis.call('HMGET', WHEEL, 'incarnation', 'epoch', 'owner', 'clean', 'rewriting')
local up_s = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
local role = string.match(redis.call('INFO', 'replication'), 'role:(%a+)')
return {found or '', redis.call('PTTL', LEADER), w[1] or '', w[2] or '0', w[3] or '',
  w[4] or '1', up_s, w[5] or '', role or ''}
