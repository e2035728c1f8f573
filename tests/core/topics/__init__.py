"""Tests of the rules of topics, plain sends and delayed messages."""
