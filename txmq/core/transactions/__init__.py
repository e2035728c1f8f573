"""The rules of transactions: groups stored, decided once, and published in the order of
their tickets.
"""
