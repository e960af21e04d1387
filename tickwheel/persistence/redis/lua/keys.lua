-- The beginning of every script of a shard: the keys by name, and the first write.
local WHEEL, STORE, TASK, PREPARE, PROGRESS, TOUCHED, DEAD, DEAD_RECORD =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local RECORDS, ENDINGS, SCRATCH, TOPICS = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local FIRST_PART = 13  -- the parts of a batch follow the keys of the shard
local STEP = 1000
-- The first write. Redis refuses it if it accepts no writes, or without memory unless 'must'.
local function begin(must)
  if must then redis.call('DEL', SCRATCH) else redis.call('SETRANGE', SCRATCH, 0, '') end
end
