"""Durability: decisions are recorded, flushed, answered, and read back from the log."""
