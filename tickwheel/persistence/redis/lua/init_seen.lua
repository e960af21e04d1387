-- Shared by the scripts of `tickwheel init` and `tickwheel store upgrade`. KEYS: the keys of the shard, then that of the leader.
local LEADER = KEYS[#KEYS]
local function seen(first)
  local any = '0'
  for k = 1, #KEYS - 1 do
    local kind = redis.call('TYPE', KEYS[k]).ok
    if kind ~= 'none' then
      if kind ~= ARGV[first + k] then return {'foreign', KEYS[k]} end
      any = '1'
    end
  end
  local w = redis.call('HMGET', WHEEL, 'format', 'epoch', 'incarnation', 'owner', 'rewriting',
    'parts', 'link', 'last', 'id_mark', 'position_ms', 'clean')
  if any == '1' and w[1] and tonumber(w[1]) > tonumber(ARGV[1]) then
    return {'newer', w[1]}
  end
  local whole = '1'
  for _, k in ipairs({1, 2, 3, 7, 8, 9, 10, 11}) do if not w[k] then whole = '0' end end
  return nil, any, w, whole
end
