"""Blocking consumers, over the members of `txmq.client.protocol.consumer`; handlers and
the inbox.
"""
