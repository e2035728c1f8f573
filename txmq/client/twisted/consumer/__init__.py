"""Consumers on Twisted's reactor, over the members of
`txmq.client.protocol.consumer`.
"""
