-- Returns the entry of a lock in the registry (see acquire.lua). What follows '<base>:lock:' in the key is the digest and slot.
local function entry_of(lock, registry, task, node, pid, since, fence, state)
  local digest = string.sub(lock, #registry - #':registry' + #':lock:' + 1)
  return (state or 'running') .. '\31' .. fence .. '\31' .. since .. '\31' .. pid .. '\31' .. node .. '\31' .. digest .. '\31' .. task
end
