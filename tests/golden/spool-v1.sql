CREATE TABLE about (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE batch (
    id INTEGER PRIMARY KEY,        -- in the order of sending
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,    -- -1: not routed yet
    epoch INTEGER NOT NULL,
    explicit INTEGER NOT NULL,     -- 1: the sender named the partition
    doubtful INTEGER NOT NULL,     -- 1: it may be at the broker
    stored_at INTEGER NOT NULL,    -- all times are microseconds since the epoch
    encoded BLOB NOT NULL,         -- as it is sent (docs/FORMATS.md 3)
    sum INTEGER NOT NULL,          -- CRC32C of the columns from topic to encoded
    split INTEGER NOT NULL         -- 1: it is sent row by row
);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY,        -- in the order of sending
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,    -- -1: not routed yet
    epoch INTEGER NOT NULL,
    explicit INTEGER NOT NULL,     -- 1: the sender named the partition
    doubtful INTEGER NOT NULL,     -- 1: it may be at the broker
    stored_at INTEGER NOT NULL,    -- all times are microseconds since the epoch
    encoded BLOB NOT NULL,         -- as it is sent (docs/FORMATS.md 3)
    sum INTEGER NOT NULL,          -- CRC32C of the columns from topic to encoded
    error TEXT NOT NULL, text TEXT NOT NULL, at INTEGER NOT NULL, outcome TEXT NOT NULL
);
CREATE TABLE damaged (             -- as they were found
    id INTEGER PRIMARY KEY, topic, partition, epoch, explicit, doubtful, stored_at, encoded, sum, split
);
