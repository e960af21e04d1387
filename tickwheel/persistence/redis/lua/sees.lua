-- Checks that a read sees the same incarnation, every batch whose commit has returned, and no batch of
-- which only some parts are applied.
local function blind(incarnation, last)
  local w = redis.call('HMGET', WHEEL, 'incarnation', 'last', 'parts')
  if not w[1] then return {'gone'} end
  if w[1] ~= incarnation then return {'other', w[1]} end
  if tonumber(w[2]) < tonumber(last) then return {'behind', w[2]} end
  if w[3] then return {'half', w[2]} end
end
