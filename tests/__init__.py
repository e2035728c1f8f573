"""Tests of txmq; one file per module or behaviour."""
