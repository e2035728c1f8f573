CREATE TABLE about (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE message (
    id INTEGER PRIMARY KEY,        -- in the order of arrival
    partition INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    key TEXT,
    run INTEGER NOT NULL,          -- with the place: the order of a key
    state INTEGER NOT NULL,        -- 1 stored, 2 acked, 3 dead, 4 returned
    attempt INTEGER NOT NULL,
    due INTEGER NOT NULL,          -- all times are microseconds since the epoch
    first_at INTEGER NOT NULL,     -- when it came
    changed_at INTEGER NOT NULL,
    failure TEXT,                  -- [type, text, fingerprint, base, ...] in JSON
    generation INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    size INTEGER NOT NULL,
    told INTEGER NOT NULL,         -- 1: the broker knows this state
    head INTEGER NOT NULL,         -- 1: no earlier message of its key is here
    sum INTEGER NOT NULL           -- CRC32C of the columns from partition to size
);
CREATE UNIQUE INDEX by_place ON message (partition, offset);
CREATE INDEX by_due ON message (due, partition, offset) WHERE head = 1 AND state = 1;
CREATE INDEX by_key ON message (key, run, partition, offset) WHERE state <> 2;
CREATE INDEX by_untold ON message (run, partition, offset) WHERE told = 0;
CREATE TABLE content (
    id INTEGER PRIMARY KEY,        -- of the message
    message_id TEXT NOT NULL,
    tag TEXT,
    headers TEXT NOT NULL,         -- a JSON object
    born_at INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL           -- CRC32C of the columns from id to body
);
CREATE TABLE quarantined (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    line TEXT NOT NULL             -- as an export has it
);
