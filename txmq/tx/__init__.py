"""Transactions: the rules (group, check-back) and the PostgreSQL side of them."""
