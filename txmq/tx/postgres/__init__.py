"""The PostgreSQL side of transactions, with blocking psycopg2 throughout.

`tokens` writes the row that proves a commit, `commit` makes sure of the commit, and
`resolver` reads the proof later, or makes it impossible. `prepared` has the branches of
two-phase commits. `inbox` applies a message once, `inbox_compaction` keeps its table
small. `outbox` keeps messages while their broker is away. `schema` and `partitions`
maintain the tables, `identity` tells databases apart, `session` opens connections,
`errors` translates psycopg2's errors.
"""
