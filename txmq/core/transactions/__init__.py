"""Rules of transactions: bundles are stored, decided once, and published in the order
of their tickets.
"""
