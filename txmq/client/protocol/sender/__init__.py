"""Sending without I/O: accumulator, batches, frames in flight, routing."""
