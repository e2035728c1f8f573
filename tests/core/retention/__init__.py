"""Tests of retention and expiry."""
