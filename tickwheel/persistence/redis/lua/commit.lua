-- epoch, owner, link, n, makes tasks (0/1), lowest new id, id mark, position, operations …
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
refused = place(w, ARGV[4])
if refused then return refused end
if ARGV[6] ~= '' and ARGV[6] <= w[7] then
  local id = find_twice(ARGV, 9)
  if id then return {'twice', id} end
end
begin(ARGV[5] == '0')
apply(ARGV, 9)
redis.call('HSET', WHEEL, 'last', ARGV[4], 'id_mark', ARGV[7], 'position_ms', ARGV[8])
return {'applied'}
