"""Tests of txmq.broker, by its folders."""
