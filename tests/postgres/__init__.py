"""Tests of txmq.tx.postgres and of the servers they run on, with a real PostgreSQL."""
