"""Tests of a shared log: its records, its rules, the node that runs them."""
