-- What every script of the lease begins with. KEYS: leader, scratch, wheel, standbys.
local LEADER, SCRATCH, WHEEL, STANDBYS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local found = redis.call('GET', LEADER)
local function mine(owner)
  return found and string.sub(found, 1, #owner + 1) == owner .. '|'
end
local function uptime_s()
  return tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)'))
end
-- Who said within the time to live that it stands by. Seconds are whole: one more than that. This
-- is for people, and never in the way of the lease: without the right to it nobody is listed.
local function standing_by(now_s, ttl_ms)
  local from_s = now_s - math.ceil(ttl_ms / 1000) - 1
  local listed = redis.pcall('ZRANGE', STANDBYS, from_s, now_s, 'BYSCORE', 'LIMIT', 0, 64)
  return listed.err and {} or listed
end
