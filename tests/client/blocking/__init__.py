"""Tests of the blocking client, against a scripted broker and the real one."""
