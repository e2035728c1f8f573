"""Tests of txmq.broker.delivery."""
