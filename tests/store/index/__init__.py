"""Tests of the state tables in LMDB."""
