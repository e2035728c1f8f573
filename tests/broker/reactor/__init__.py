"""Tests of txmq.broker.reactor."""
