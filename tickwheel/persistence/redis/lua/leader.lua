-- What every script of the lease begins with. KEYS: leader, scratch, wheel, standbys.
local LEADER, SCRATCH, WHEEL, STANDBYS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local found = redis.call('GET', LEADER)
local function mine(owner)
  return found and string.sub(found, 1, #owner + 1) == owner .. '|'
end
local server, replication = redis.call('INFO', 'server'), redis.call('INFO', 'replication')
local UP_S = tonumber(string.match(server, 'uptime_in_seconds:(%d+)'))
-- This life of this server in this role: one that is started or promoted has another name. Empty:
-- the server does not say.
local HERE = ''
do
  local run = string.match(server, 'run_id:(%w+)')
  local line = string.match(replication, 'master_replid:(%w+)')
  if run and line then HERE = run .. '/' .. line end
end
-- The owner has the lease at this server: it was not lost on the way here, if it is found to be over.
local function note_here()
  local w = redis.call('HMGET', WHEEL, 'incarnation', 'leased_at')
  if w[1] and w[2] ~= HERE then redis.call('HSET', WHEEL, 'leased_at', HERE) end
end
-- Who said within the time to live that it stands by. Seconds are whole: one more than that. This
-- is for people, and never in the way of the lease: without the right to it nobody is listed.
local function standing_by(now_s, ttl_ms)
  local from_s = now_s - math.ceil(ttl_ms / 1000) - 1
  local listed = redis.pcall('ZRANGE', STANDBYS, from_s, now_s, 'BYSCORE', 'LIMIT', 0, 64)
  return listed.err and {} or listed
end
