"""Tests of the client on the reactor of Twisted."""
