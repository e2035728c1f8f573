"""Bytes from strangers, at everything that reads such bytes."""
