"""Evidence of a reconciliation: letters, log and tables of the same moment, and what is
missing in one of them.
"""
