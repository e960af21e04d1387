-- Writes a node's entry, and returns all nodes.
-- KEYS: nodes, until, placed, drained, route, scratch.
-- ARGV: shards, ttl, name, run, record ('': remove the node), a dead run that can be replaced, maximum
-- number of nodes, and for each shard that the node leads: shard, claim.
local NODES, UNTIL, PLACED, DRAINED, ROUTE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local name, run = ARGV[3], ARGV[4]
local function epoch_of(claim) return claim and tonumber(string.match(claim, '^%d+')) or 0 end
redis.call('DEL', KEYS[6])
redis.call('HSETNX', ROUTE, 'shards', ARGV[1])
local shards = redis.call('HGET', ROUTE, 'shards')
if shards ~= ARGV[1] then return {shards} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSETNX', ROUTE, 'version', time[1])  -- above the versions of a registry that was lost
local ends = redis.call('HGETALL', UNTIL)
for i = 1, #ends, 2 do
  if tonumber(ends[i + 1]) <= now_ms then
    redis.call('HDEL', UNTIL, ends[i])
    redis.call('HDEL', NODES, ends[i])
  end
end
local found = redis.call('HGET', NODES, name)
local whose = found and string.match(found, '^[^|]*') or ''
if not found and ARGV[5] ~= '' and redis.call('HLEN', NODES) >= tonumber(ARGV[7]) then
  return {shards, redis.call('HLEN', NODES)}
end
local is_mine = whose == '' or whose == run or whose == ARGV[6]
if is_mine and ARGV[5] == '' then
  redis.call('HDEL', UNTIL, name)
  redis.call('HDEL', NODES, name)
elseif is_mine then
  redis.call('HSET', NODES, name, run .. '|' .. ARGV[5])
  redis.call('HSET', UNTIL, name, string.format('%.0f', now_ms + ARGV[2]))
  for i = 8, #ARGV, 2 do
    local before = redis.call('HGET', ROUTE, ARGV[i])
    -- The claim of a deposed leader changes nothing.
    if before ~= ARGV[i + 1] and epoch_of(ARGV[i + 1]) >= epoch_of(before) then
      redis.call('HSET', ROUTE, ARGV[i], ARGV[i + 1])
      redis.call('HINCRBY', ROUTE, 'version', 1)
    end
  end
end
return {shards, now_ms, is_mine and 1 or 0, redis.call('HGET', ROUTE, 'version'),
  redis.call('HGETALL', NODES), redis.call('HGETALL', UNTIL),
  redis.call('HGETALL', PLACED), redis.call('HGETALL', DRAINED)}
