"""The client. `protocol` has no I/O; `blocking`, `aio` and `twisted` are its faces.

All faces use the same nouns: sender, consumer, reader, transaction, inbox, cluster.
"""
