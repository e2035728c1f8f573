"""Transactions without I/O: buffers, parts, requests and outbox entries."""
