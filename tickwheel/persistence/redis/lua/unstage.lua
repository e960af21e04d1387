-- epoch, owner, link; the keys of the parts are last. Returns how many of them a batch has left that
-- was not sealed.
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
begin(true)
return {'applied', redis.call('DEL', unpack(KEYS, FIRST_PART))}
