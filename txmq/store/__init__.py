"""The disk: an append-only log, the snapshots of the state that the log folds to, and
the tables that cache both.
"""
