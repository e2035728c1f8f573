"""Tests of the state of the core."""
