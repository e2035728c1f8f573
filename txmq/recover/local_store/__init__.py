"""The consumer's local store (docs/decisions/0090-local-recovery.md)."""

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
