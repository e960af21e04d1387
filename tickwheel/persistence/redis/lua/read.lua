-- incarnation, last, bytes at which to stop, ids …
local refused = blind(ARGV[1], ARGV[2])
if refused then return refused end
local tasks, rows, size, max = {}, {}, 0, tonumber(ARGV[3])
local touched = redis.call('EXISTS', TOUCHED) == 1
for k = 4, #ARGV do
  local id = ARGV[k]
  local record = redis.call('HGET', TASK, id)
  tasks[#tasks + 1] = record
  if record then
    size = size + #record
    local groups = touched and redis.call('HGET', TOUCHED, id)
    if groups then
      for group in string.gmatch(groups, '([^\n]*)\n') do
        local member = id .. '/' .. group
        rows[#rows + 1] = member
        rows[#rows + 1] = redis.call('HGET', PROGRESS, member)
        rows[#rows + 1] = redis.call('HGET', DEAD_RECORD, member)
      end
    end
    if size > max then break end
  end
end
return {'ok', tasks, rows}
