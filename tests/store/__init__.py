"""The log, its recovery and snapshots; the index."""
