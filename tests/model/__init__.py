"""Tests of the values: keys, messages, retry policies."""
