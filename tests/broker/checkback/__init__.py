"""Tests of txmq.broker.checkback."""
