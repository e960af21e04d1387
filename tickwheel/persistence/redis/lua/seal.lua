-- epoch, owner, link, n, id mark, position; the keys of all parts are last. From here on the batch is
-- accepted: every owner of the shard applies its parts before anything else.
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
refused = place(w, ARGV[4])
if refused then return refused end
for k = FIRST_PART, #KEYS do
  if redis.call('EXISTS', KEYS[k]) == 0 then return {'unstaged'} end
end
begin(true)
redis.call('HSET', WHEEL, 'last', ARGV[4], 'id_mark', ARGV[5], 'position_ms', ARGV[6],
  'parts', #KEYS - FIRST_PART + 1, 'part', 0)
return {'applied'}
