"""Binary requests, and rows of a database's outbox, turned into commands of the
core.
"""
