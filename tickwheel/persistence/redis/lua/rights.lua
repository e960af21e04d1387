local missing = {}
local unknown = {}
local function may(command, ...)
  local reply = redis.pcall(command, ...)
  local error = type(reply) == 'table' and reply.err
  if error and (string.find(error, 'NOPERM') or string.find(error, 'ACL failure')
      or string.find(error, 'user executing')) then
    missing[#missing + 1] = command
    return false
  end
  if error and string.find(error, 'nknown .-ommand') then  -- renamed
    unknown[#unknown + 1] = command
    return false
  end
  return reply
end
local there = may('exists', SCRATCH)
if there ~= 0 then return {missing, unknown} end  -- another program's key, which open.lua reports
local removable = may('del', SCRATCH)  -- the first write: Redis does not refuse later ones
may('info', 'server')
local j = 1
while j <= #ARGV do
  local count = tonumber(ARGV[j + 1])
  may(ARGV[j], SCRATCH, unpack(ARGV, j + 2, j + 1 + count))
  j = j + 2 + count
end
-- This command cannot be tried without a write.
if removable and may('rpush', SCRATCH, 'v') then redis.pcall('del', SCRATCH) end
return {missing, unknown}
