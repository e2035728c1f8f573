"""Tests of txmq.broker.engine."""
