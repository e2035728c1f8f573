"""Transactions of the blocking client, one module for each kind of decider."""
