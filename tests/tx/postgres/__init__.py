"""Tests of txmq.tx.postgres with a real PostgreSQL server."""
