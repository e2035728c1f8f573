"""The index: the state tables in LMDB, a cache of snapshot and log."""
