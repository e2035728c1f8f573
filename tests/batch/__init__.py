"""Tests of batches: encoding, verification, reading."""
