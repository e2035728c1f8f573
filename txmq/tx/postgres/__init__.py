"""The PostgreSQL side of transactions.

What happens on services' connections is written once, without I/O, for the protocol of
`driver`; `drivers` has the drivers themselves, and `blocking` the rules as plain
functions. `tokens` writes the row that proves a commit, `commit` makes sure of the
commit. `prepared` has the branches of two-phase commits. `inbox` applies a message
once, `inbox_compaction` keeps its table small. `outbox` keeps messages while their
broker is away. `errors` translates drivers' errors, `identity` tells databases apart.

The tools of brokers and operators use psycopg2: `resolver` reads the proof later, or
makes it impossible, `schema` and `partitions` maintain the tables, `session` opens
connections.
"""
