-- epoch, owner, incarnation, newest claim known. A connection claims the shard before it writes:
-- what an older connection sent is void from here on, so that the last batch read here is final.
local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'incarnation', 'last', 'parts', 'part',
  'rewriting', 'link')
if not w[1] then return {'gone'} end
if w[3] ~= ARGV[3] then return {'other', w[3] or '', w[1], w[2]} end
local epoch, mine = tonumber(w[1]), tonumber(ARGV[1])
if epoch > mine or (epoch == mine and w[2] ~= ARGV[2]) then return {'fenced', w[1], w[2] or ''} end
begin(true)
-- A lower epoch: Redis lost the last opening too.
if epoch < mine then redis.call('HSET', WHEEL, 'epoch', ARGV[1], 'owner', ARGV[2], 'clean', 0) end
-- Redis may have come back with a lower number: no claim is given twice.
local link = math.max(tonumber(w[8] or '0'), tonumber(ARGV[4])) + 1
redis.call('HSET', WHEEL, 'link', link)
return {'ok', tostring(link), w[4] or '0', w[5] or '', w[6] or '', w[7] or '', w[1]}
