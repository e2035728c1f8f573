"""The client. `protocol` has no I/O; `blocking` and `twisted` are its two faces.

Both faces use the same nouns: sender, consumer, reader, transaction, inbox, cluster.
"""
