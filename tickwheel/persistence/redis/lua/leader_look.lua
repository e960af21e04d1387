-- ttl, entry of a standby ('': none). Without memory, or on a replica, the entry is not written.
local w = redis.call('HMGET', WHEEL, 'incarnation', 'epoch', 'owner', 'clean', 'rewriting',
  'leased_at')
local role = string.match(replication, 'role:(%a+)')
-- A promoted server cannot tell how long it has had the store.
local promoted = string.match(replication, 'second_repl_offset:%d') and 1 or 0
local left_ms = redis.call('PTTL', LEADER)
if ARGV[2] ~= '' then
  -- Entries from before a restart of the server would count again at the same uptime.
  local old = redis.pcall('ZRANGE', STANDBYS, '(' .. UP_S, '+inf', 'BYSCORE', 'LIMIT', 0, 64)
  if not old.err and #old > 0 then redis.pcall('ZREM', STANDBYS, unpack(old)) end
  redis.pcall('ZADD', STANDBYS, UP_S, ARGV[2])
  redis.pcall('PEXPIRE', STANDBYS, ARGV[1] + 1000)
end
return {found or '', left_ms, w[1] or '', w[2] or '0', w[3] or '',
  w[4] or '1', tostring(UP_S), w[5] or '', role or '', standing_by(UP_S, ARGV[1]), promoted,
  HERE ~= '' and w[6] == HERE and 1 or 0}
