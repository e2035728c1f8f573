"""Tests of txmq.broker.data_directory."""
