"""Two-phase commit, check-backs and the outbox: rules, and the PostgreSQL side."""
