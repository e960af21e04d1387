-- Only the current owner with its newest claim may write; other scripts are outdated.
local function fence(epoch, owner, link)
  local w = redis.call('HMGET', WHEEL, 'epoch', 'owner', 'link', 'last', 'parts', 'part',
    'id_mark')
  if not w[1] then return {'gone'} end
  if w[1] ~= epoch or w[2] ~= owner then return {'fenced', w[1], w[2]} end
  if w[3] ~= link then return {'stale'} end
  return nil, w
end
local function place(w, n)
  local last = tonumber(w[4])
  if tonumber(n) <= last then return {'before', w[4]} end
  if tonumber(n) > last + 1 then return {'gap', w[4]} end
end
-- Returns the id of a new task that is already stored, or nil.
local function twice(packed)
  local args, ids = cmsgpack.unpack(packed), {}
  for k = 2, #args, 2 do ids[#ids + 1] = args[k] end
  local scores = redis.call('ZMSCORE', STORE, unpack(ids))
  for k = 1, #ids do if scores[k] then return ids[k] end end
end
-- Operations are: name, number of the key, number of arguments, arguments. Those of NEW and
-- RECORDS are packed into one.
local function find_twice(args, at)
  while at <= #args do
    local size = tonumber(args[at + 2])
    if args[at] == 'NEW' then
      local id = twice(args[at + 3])
      if id then return id end
    end
    at = at + 3 + size
  end
end
