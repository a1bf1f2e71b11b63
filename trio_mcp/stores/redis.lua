-- The steps of a store in Redis.  Each call runs one of them as a whole: no other command comes between.
--
-- KEYS[1] is the prefix of all keys, with the hash tag that they share.  ARGV is the name of the step and its arguments.
-- A step that finds no room returns the name of the limit, in place of a number.  `redis.py` lists the keys.

local FREE, ROW, SPARE, EVENT, GRACE, SWEPT, READ = 3, 2048, 4096, 64, 3600, 500, 1000

local function key(...)
  return table.concat({KEYS[1], ...}, ':')
end

-- The name of a row.  The length makes it unambiguous.
local function name_of(kind, id)
  return #kind .. ':' .. kind .. id
end

local function has_room(growth, owner, most)
  local free = most - tonumber(redis.call('HGET', key('bytes'), 'all') or 0) - growth
  local owned = tonumber(redis.call('HGET', key('bytes'), 'of ' .. owner) or 0)
  return growth <= 0 or (free >= 0 and (owner == '' or owned == 0 or owned + growth <= FREE * free))
end

local function charge(owner, growth)
  redis.call('HINCRBY', key('bytes'), 'all', growth)
  if redis.call('HINCRBY', key('bytes'), 'of ' .. owner, growth) == 0 then
    redis.call('HDEL', key('bytes'), 'of ' .. owner)
  end
end

-- Let Redis itself remove the large part of what has expired, if no process sweeps for an hour.
local function set_ttl(large, expires)
  if tonumber(expires) == math.huge then
    redis.call('PERSIST', large)
  else
    local left = math.max(tonumber(expires) - tonumber(redis.call('TIME')[1]), 0)
    redis.call('EXPIRE', large, string.format('%.0f', math.min(left, 1e10) + GRACE))
  end
end

local function set_expiry(member, expires)
  if tonumber(expires) == math.huge then
    redis.call('ZREM', key('expiring'), member)
  else
    redis.call('ZADD', key('expiring'), expires, member)
  end
end

-- The row has been written: those that wait for changes get its number.
local function touch(name)
  local number = redis.call('INCR', key('clock'))
  redis.call('ZADD', key('changed'), number, name)
  redis.call('PUBLISH', key('changes'), number)
end

local function hold(kind, id, holder)
  if holder ~= '' then
    redis.call('SADD', key('held', #kind, kind, holder), id)
    redis.call('SADD', key('holders', kind), holder)
  end
end

local function let_go(kind, id, holder)
  if holder ~= '' and redis.call('SREM', key('held', #kind, kind, holder), id) == 1
      and redis.call('EXISTS', key('held', #kind, kind, holder)) == 0 then
    redis.call('SREM', key('holders', kind), holder)
  end
end

local function read(kind, id)
  local name = name_of(kind, id)
  local row = redis.call('HMGET', key('row', name), 'owner', 'created', 'expires', 'holder', 'version')
  local body = row[1] and redis.call('GET', key('body', name))
  if not body then
    return false
  end
  return {kind, id, body, unpack(row)}
end

local function remove(name)
  local kind, id, owner, holder, size =
    unpack(redis.call('HMGET', key('row', name), 'kind', 'id', 'owner', 'holder', 'size'))
  if not kind then
    return 0
  end
  redis.call('UNLINK', key('row', name), key('body', name))
  redis.call('ZREM', key('owned', #kind, kind, owner), id)
  redis.call('ZREM', key('expiring'), 'row ' .. name)
  redis.call('ZREM', key('changed'), name)
  redis.call('HINCRBY', key('numbers'), kind, -1)
  let_go(kind, id, holder)
  charge(owner, 0 - size)
  return 1
end

local function discard(stream)
  local owner, size = unpack(redis.call('HMGET', key('stream', stream), 'owner', 'size'))
  if not owner then
    return 0
  end
  redis.call('UNLINK', key('stream', stream), key('events', stream))
  redis.call('ZREM', key('expiring'), 'stream ' .. stream)
  charge(owner, 0 - size - ROW)
  return 1
end

local steps = {}

function steps.add(kind, id, body, owner, created, expires, holder, each, total, most)
  local name = name_of(kind, id)
  if redis.call('EXISTS', key('row', name)) == 1 then
    if redis.call('EXISTS', key('body', name)) == 1 then
      return 0
    end
    remove(name)  -- Redis has removed its body
  end
  if redis.call('ZCARD', key('owned', #kind, kind, owner)) >= tonumber(each) then
    return 'each'
  elseif tonumber(redis.call('HGET', key('numbers'), kind) or 0) >= tonumber(total) then
    return 'total'
  elseif not has_room(ROW + #body, owner, tonumber(most)) then
    return 'max_bytes'
  end
  redis.call('HSET', key('row', name), 'kind', kind, 'id', id, 'owner', owner, 'created', created,
    'expires', expires, 'holder', holder, 'version', 1, 'size', ROW + #body)
  redis.call('SET', key('body', name), body)
  set_ttl(key('body', name), expires)
  set_expiry('row ' .. name, expires)
  redis.call('ZADD', key('owned', #kind, kind, owner), created, id)
  redis.call('HINCRBY', key('numbers'), kind, 1)
  hold(kind, id, holder)
  charge(owner, ROW + #body)
  touch(name)
  return 1
end

function steps.get(kind, id)
  return read(kind, id)
end

function steps.replace(kind, id, version, body, expires, holder, most)
  local name = name_of(kind, id)
  local owner, held_by, stored, size =
    unpack(redis.call('HMGET', key('row', name), 'owner', 'holder', 'version', 'size'))
  if stored ~= version or redis.call('EXISTS', key('body', name)) == 0 then
    return 0
  end
  local growth = ROW + #body - size
  if growth > SPARE and not has_room(growth, owner, tonumber(most)) then
    return 'max_bytes'
  end
  redis.call('HSET', key('row', name), 'expires', expires, 'holder', holder, 'version', version + 1, 'size', ROW + #body)
  redis.call('SET', key('body', name), body)
  set_ttl(key('body', name), expires)
  set_expiry('row ' .. name, expires)
  if holder ~= held_by then
    let_go(kind, id, held_by)
    hold(kind, id, holder)
  end
  charge(owner, growth)
  touch(name)
  return 1
end

function steps.delete(kind, id)
  return remove(name_of(kind, id))
end

function steps.list(kind, owner, created, id, limit)
  local owned, first = key('owned', #kind, kind, owner), 0
  if tonumber(created) > -math.huge then
    -- The place after this row, which may not be there any more, or be a later one of the same name.
    local now = redis.call('ZSCORE', owned, id)
    redis.call('ZADD', owned, created, id)
    first = redis.call('ZRANK', owned, id)
    if now then
      redis.call('ZADD', owned, now, id)
      first = tonumber(now) <= tonumber(created) and first + 1 or first
    else
      redis.call('ZREM', owned, id)
    end
  end
  local rows, last = {}, first + limit - 1
  for _, each in ipairs(last < first and {} or redis.call('ZRANGE', owned, first, last)) do
    local row = read(kind, each)
    if row then
      row[3] = string.match(row[3], '^[^\n]*')  -- the first line of the body
      rows[#rows + 1] = row
    end
  end
  return rows
end

function steps.sweep(now)
  local removed = 0
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key('expiring'), '-inf', now, 'LIMIT', 0, SWEPT)) do
    local row = string.match(member, '^row (.*)$')
    removed = removed + (row and remove(row) or discard(string.sub(member, 8)))
  end
  return removed
end

function steps.lease(holder, expires)
  redis.call('ZADD', key('leases'), expires, holder)
  return 1
end

-- The ids of some rows of this holder that are not among the known ones, a text of JSON.
local function unknown(kind, holder, known, most)
  local ids, kept = {}, {}
  for _, id in ipairs(cjson.decode(known)) do
    kept[id] = true
  end
  for _, id in ipairs(redis.call('SMEMBERS', key('held', #kind, kind, holder))) do
    if not kept[id] and #ids < most then
      ids[#ids + 1] = id
    end
  end
  return ids
end

function steps.claim(kind, holder, now, limit, known)
  local claimed = {}
  local function take(other, ids)
    for _, id in ipairs(ids) do
      local name = name_of(kind, id)
      redis.call('HSET', key('row', name), 'holder', holder)
      redis.call('HINCRBY', key('row', name), 'version', 1)
      let_go(kind, id, other)
      hold(kind, id, holder)
      touch(name)
      claimed[#claimed + 1] = read(kind, id) or nil
    end
  end
  redis.call('ZREMRANGEBYSCORE', key('leases'), '-inf', now)
  if known ~= '' then  -- first, because the rows of others become its own
    take(holder, unknown(kind, holder, known, tonumber(limit)))
  end
  for _, other in ipairs(redis.call('SMEMBERS', key('holders', kind))) do
    local most = limit - #claimed
    if other ~= holder and most > 0 and not redis.call('ZSCORE', key('leases'), other) then
      take(other, redis.call('SRANDMEMBER', key('held', #kind, kind, other), most))
    end
  end
  return claimed
end

-- The rows that have changed: the number of the last change, and the names.
function steps.changes(after)
  local last, names = tonumber(after), {}
  if last < 0 then
    return {tonumber(redis.call('GET', key('clock')) or 0), names}
  end
  local found = redis.call('ZRANGEBYSCORE', key('changed'), '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, READ)
  for i = 1, #found, 2 do
    names[#names + 1], last = found[i], tonumber(found[i + 1])
  end
  return {last, names}
end

function steps.append(stream, body, owner, expires, max_bytes, most)
  local head, events = key('stream', stream), key('events', stream)
  local owned_by, number, held, until_ = unpack(redis.call('HMGET', head, 'owner', 'number', 'size', 'expires'))
  if owned_by and redis.call('EXISTS', events) == 0 then
    discard(stream)  -- Redis has removed its events
    owned_by, number, held, until_ = false, false, false, false
  end
  local begun = owned_by and 0 or ROW
  owner, number, held = owned_by or owner, (number or 0) + 1, tonumber(held or 0)
  if until_ and tonumber(until_) > tonumber(expires) then
    expires = until_
  end
  local size, first, dropped = held + EVENT + #body, '-', 0
  while size > tonumber(max_bytes) do
    local event = redis.call('XRANGE', events, first, '+', 'COUNT', 1)[1]
    if event then
      first, dropped = '(' .. event[1], tonumber(string.match(event[1], '^%d+'))
      size = size - EVENT - #event[2][2]
    else
      dropped, size = number, 0
    end
  end
  if not has_room(size - held + begun, owner, tonumber(most)) then
    return 'max_bytes'
  end
  redis.call('HSET', head, 'owner', owner, 'number', number, 'size', size, 'expires', expires)
  redis.call('XADD', events, number .. '-0', '', body)
  if dropped > 0 then
    redis.call('XTRIM', events, 'MINID', (dropped + 1) .. '-0')
  end
  set_ttl(events, expires)
  set_expiry('stream ' .. stream, expires)
  charge(owner, size - held + begun)
  redis.call('PUBLISH', key('channel', stream), '')
  return number
end

function steps.read(stream, after, limit)
  local number = redis.call('HGET', key('stream', stream), 'number')
  if not number or redis.call('EXISTS', key('events', stream)) == 0 then
    return {0}
  end
  local events = key('events', stream)
  local oldest = redis.call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
  local found = {oldest and tonumber(string.match(oldest[1], '^%d+')) or number + 1}
  for _, event in ipairs(redis.call('XRANGE', events, '(' .. after .. '-0', '+', 'COUNT', limit) or {}) do
    found[#found + 1] = {tonumber(string.match(event[1], '^%d+')), event[2][2]}
  end
  return found
end

function steps.discard(stream)
  return discard(stream)
end

function steps.send(channel, body)
  return redis.call('PUBLISH', key('channel', channel), body)
end

return steps[ARGV[1]](unpack(ARGV, 2))
