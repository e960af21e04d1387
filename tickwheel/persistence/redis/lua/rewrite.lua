-- epoch, owner, incarnation, layout, phase (begin/end/lost), last batch, now, newest known claim,
-- batches written, mark. Between begin and end commits count from 1, and no other daemon opens the
-- shard. Lost: the data stays, and no daemon opens the shard from then on.
local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'incarnation', 'rewriting', 'link',
  'last', 'parts')
if w[1] then
  local epoch, mine = tonumber(w[1]), tonumber(ARGV[1])
  if w[3] ~= ARGV[3] or epoch > mine or (epoch == mine and w[2] ~= ARGV[2]) then
    return {'fenced', w[1], w[2] or ''}
  end
  -- An outdated script must not remove data written since.
  if w[5] ~= ARGV[8] then return {'stale'} end
end
if ARGV[5] == 'end' then
  if not w[4] then return {'gone'} end
  if w[6] ~= ARGV[9] or w[7] then return {'behind'} end
  begin(true)
  redis.call('HSET', WHEEL, 'last', ARGV[6])
  redis.call('HDEL', WHEEL, 'rewriting')
  return {'applied'}
end
if ARGV[5] == 'lost' and w[1] then
  begin(true)
  redis.call('HSET', WHEEL, 'rewriting', ARGV[10])
  return {'applied'}
end
begin(w[1])  -- the data that it removes makes room
if ARGV[5] == 'begin' then redis.call('UNLINK', unpack(KEYS)) end
redis.call('HSET', WHEEL, 'format', ARGV[4], 'incarnation', ARGV[3], 'epoch', ARGV[1],
  'owner', ARGV[2], 'last', 0, 'id_mark', '0000000000000000000', 'position_ms', 0, 'clean', 0,
  'opened_ms', ARGV[7], 'link', tonumber(ARGV[8]) + 1, 'endings', 0, 'rewriting', ARGV[10])
return {'applied'}
