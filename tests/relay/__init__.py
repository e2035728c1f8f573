"""Tests of the relay, with real databases and brokers."""
