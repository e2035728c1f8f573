"""The PostgreSQL side of a transaction, blocking psycopg2 throughout: the reactor calls
it in threads.

`tokens` writes the row that proves a commit and `commit` makes sure of the commit;
`resolver` later reads the proof, or makes it impossible. `prepared` has the branches of
two-phase commits. `inbox` applies a message once, `folding` keeps its memory small.
`schema` and `partitions` look after the tables, `identity` knows which database this
is, `session` opens connections, `translate` names errors.
"""
