"""The client: `protocol` has no I/O, `blocking` and `twisted` are its two faces, with the same nouns in each."""

from txmq.client.blocking.client import Client, connect

__all__ = ["Client", "connect"]
