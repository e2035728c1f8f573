"""Transactions without I/O: buffered messages, tokens, entries of the database
outbox.
"""
