"""Tests of a broker of several nodes."""
