"""Tests of the log: writes, recovery, damage, repair."""
