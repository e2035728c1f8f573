"""Check-backs: outcomes of transactions, requested from databases and checkers."""
