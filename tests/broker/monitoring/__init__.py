"""Tests of txmq.broker.monitoring."""
