"""The append-only log: segments, records, recovery, repair."""
