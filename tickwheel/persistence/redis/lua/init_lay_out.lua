-- layout, whether the shard can have data (0/1), its expected epoch and incarnation, the new
-- incarnation, owner, now, reason for a new branch (or empty), types of the keys …
local leader = redis.call('GET', LEADER)
if leader then return {'led', leader} end
local refused, any, w, whole = seen(8)
if refused then return refused end
if any == '1' and ARGV[2] == '0' then return {'changed'} end
if (w[2] or '0') ~= ARGV[3] or (w[3] or '') ~= ARGV[4] then return {'changed'} end
begin(any == '1')
redis.call('UNLINK', unpack(KEYS))
local epoch = tonumber(w[2] or '0')
if any == '1' then epoch = epoch + 1 end
redis.call('HSET', WHEEL, 'format', ARGV[1], 'incarnation', ARGV[5], 'epoch', epoch,
  'owner', ARGV[6], 'last', 0, 'id_mark', '0000000000000000000', 'position_ms', 0, 'clean', 1,
  'opened_ms', ARGV[7], 'link', tonumber(w[7] or '0') + 1, 'endings', 0)
if ARGV[8] ~= '' then redis.call('HSET', WHEEL, 'branch', ARGV[8]) end
return {'laid out'}
