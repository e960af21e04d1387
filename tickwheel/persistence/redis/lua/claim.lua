-- epoch, owner, incarnation, newest known claim. A connection claims the shard before it writes. This
-- voids all scripts of older connections, so the last batch read here is final.
local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'incarnation', 'last', 'parts', 'part',
  'rewriting', 'link')
if not w[1] then return {'gone'} end
if w[3] ~= ARGV[3] then return {'other', w[3] or '', w[1], w[2]} end
local epoch, mine = tonumber(w[1]), tonumber(ARGV[1])
if epoch > mine or (epoch == mine and w[2] ~= ARGV[2]) then return {'fenced', w[1], w[2] or ''} end
begin(true)
-- A lower epoch means that Redis has also lost the last opening.
if epoch < mine then redis.call('HSET', WHEEL, 'epoch', ARGV[1], 'owner', ARGV[2], 'clean', 0) end
-- Redis can have lost the newest claim; no number is used twice.
local link = math.max(tonumber(w[8] or '0'), tonumber(ARGV[4])) + 1
redis.call('HSET', WHEEL, 'link', link)
return {'ok', tostring(link), w[4] or '0', w[5] or '', w[6] or '', w[7] or '', w[1]}
