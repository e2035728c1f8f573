"""Tests of what txmq gives to the tests of services."""
