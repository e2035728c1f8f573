"""The consumer's local store (docs/decisions/0090-local-recovery.md).

`store` is one open store. `directory` is its place and its owner, `records` and
`handed_out` are what it has on disk. `state` folds the log over tables, which `index`
keeps in LMDB. `opening` recovers both, `group_commit` writes the log, and `compaction`
makes it smaller. `scan` and `export` read a store beside its owner, `replaced` moves
the store of a deleted topic aside.
"""

from txmq.recover.local_store.directory import store_path
from txmq.recover.local_store.export import Export, export, quarantined, read_export
from txmq.recover.local_store.scan import existing_identity, scan, stores_below, summary
from txmq.recover.local_store.store import LocalStore
from txmq.recover.local_store.values import (
    Change,
    Entry,
    Place,
    Scanned,
    State,
    StoredMessage,
    StoreIdentity,
    StoreLimits,
    StoreOwner,
    StoreReport,
    StoreStats,
    StoreSummary,
)

__all__ = (
    "Change",
    "Entry",
    "Export",
    "LocalStore",
    "Place",
    "Scanned",
    "State",
    "StoreIdentity",
    "StoreLimits",
    "StoreOwner",
    "StoreReport",
    "StoreStats",
    "StoreSummary",
    "StoredMessage",
    "existing_identity",
    "export",
    "quarantined",
    "read_export",
    "scan",
    "store_path",
    "stores_below",
    "summary",
)
