"""Searches of all states of small worlds that run the rules of txmq.

`search` explores, `shared_log` and `half_messages` are the worlds. docs/specification
has both in Quint.
"""
