"""Tests of the consumer's local store."""
