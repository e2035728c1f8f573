"""Sending without I/O: accumulator, batches, requests in flight, routing."""
