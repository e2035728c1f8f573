"""Tests of the client without I/O."""
