-- The beginning of every script of the lease. KEYS: leader, scratch, wheel, standbys.
local LEADER, SCRATCH, WHEEL, STANDBYS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local found = redis.call('GET', LEADER)
local function mine(owner)
  return found and string.sub(found, 1, #owner + 1) == owner .. '|'
end
local server, replication = redis.call('INFO', 'server'), redis.call('INFO', 'replication')
local UP_S = tonumber(string.match(server, 'uptime_in_seconds:(%d+)'))
-- Identifies this run of the server in this role: a start or promotion changes it. Empty: unknown.
local HERE = ''
do
  local run = string.match(server, 'run_id:(%w+)')
  local line = string.match(replication, 'master_replid:(%w+)')
  if run and line then HERE = run .. '/' .. line end
end
-- Records that the owner has the lease at this server. If the lease is missing later, it has ended and
-- was not lost in a failover.
local function note_here()
  local w = redis.call('HMGET', WHEEL, 'incarnation', 'leased_at')
  if w[1] and w[2] ~= HERE then redis.call('HSET', WHEEL, 'leased_at', HERE) end
end
-- Returns the standbys seen within the time to live, plus one second because of rounding. The list is
-- information for people. It must not disturb the lease: without the right to read it, it is empty.
local function standing_by(now_s, ttl_ms)
  local from_s = now_s - math.ceil(ttl_ms / 1000) - 1
  local listed = redis.pcall('ZRANGE', STANDBYS, from_s, now_s, 'BYSCORE', 'LIMIT', 0, 64)
  return listed.err and {} or listed
end
