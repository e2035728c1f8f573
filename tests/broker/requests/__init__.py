"""Tests of txmq.broker.requests."""
