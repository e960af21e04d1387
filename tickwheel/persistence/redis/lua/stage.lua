-- epoch, owner, link, n, makes tasks (0/1), operations …; the part's key is last
local refused, w = fence(ARGV[1], ARGV[2], ARGV[3])
if refused then return refused end
if w[5] then return {'parts'} end
refused = place(w, ARGV[4])
if refused then return refused end
local id = find_twice(ARGV, 6)
if id then return {'twice', id} end
begin(ARGV[5] == '0')
local part = KEYS[FIRST_PART]
redis.call('DEL', part)
for j = 6, #ARGV, STEP do
  redis.call('RPUSH', part, unpack(ARGV, j, math.min(j + STEP - 1, #ARGV)))
end
return {'staged'}
