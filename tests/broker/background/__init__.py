"""Tests of txmq.broker.background."""
