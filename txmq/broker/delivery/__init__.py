"""Consumers served: fetches that wait for messages, and members that send
heartbeats.
"""
