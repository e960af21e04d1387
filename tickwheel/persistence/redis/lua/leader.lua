-- What every script of the lease begins with. KEYS: leader, scratch, wheel.
local LEADER, SCRATCH, WHEEL = KEYS[1], KEYS[2], KEYS[3]
local found = redis.call('GET', LEADER)
local function mine(owner)
  return found and string.sub(found, 1, #owner + 1) == owner .. '|'
end
