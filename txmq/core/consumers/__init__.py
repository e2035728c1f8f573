"""The rules of consumer groups: who reads what, what is leased, acked, tried again,
fenced, dead.
"""
