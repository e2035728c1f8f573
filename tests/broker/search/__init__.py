"""Tests of txmq.broker.search."""
