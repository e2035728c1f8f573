"""The index: the state tables in LMDB, a cache of snapshot and log."""

from txmq.errors.extras import require

require("broker", "lmdb", "sortedcontainers")
