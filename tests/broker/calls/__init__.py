"""Tests of txmq.broker.calls."""
