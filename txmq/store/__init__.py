"""Storage: the append-only log, snapshots of its state, and tables that cache both."""
