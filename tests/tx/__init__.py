"""Tests of the rules of transactions, which need neither a disk nor a database."""
