"""Tests of the producer's spool on its disk."""
