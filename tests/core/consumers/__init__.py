"""Tests of the rules of consumer groups."""
