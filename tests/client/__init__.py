"""Tests of the client: against a scripted broker on a real socket, and against the real
one.
"""
