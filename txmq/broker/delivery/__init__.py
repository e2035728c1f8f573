"""Consumers served: fetches, requests that wait for messages, sessions of members."""
