"""The client without I/O: conversations, batching, members of consumer groups,
transactions.
"""
