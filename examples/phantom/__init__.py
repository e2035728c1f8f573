"""The hook that lies: a message of rows that do not exist.

    python -m examples.phantom DSN URL      # what `txmq dev` prints

One statement fails and its error is swallowed. PostgreSQL answers ROLLBACK to COMMIT,
no row is stored, and the frameworks call their hooks for a commit all the same.
"""
