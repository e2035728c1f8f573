"""Files of producers and consumers for what waits on their disks
(docs/decisions/0090-local-stores.md).

`database` is a file with its owner and its group commit, `damage` its opening. `store`
is the consumer's local store: `folder` is its place, `rows` has its tables, `view` and
`export` read it beside its owner, and `handed_out` marks what handlers have.
`spool` is a producer's spool, of `batches`; `spools` finds those below a directory.
"""

from txmq.recover.local.export import Export, read_export
from txmq.recover.local.folder import store_path
from txmq.recover.local.store import LocalStore
from txmq.recover.local.values import (
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
from txmq.recover.local.view import existing_identity, export, scan, stores_below, summary

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
    "read_export",
    "scan",
    "store_path",
    "stores_below",
    "summary",
)
