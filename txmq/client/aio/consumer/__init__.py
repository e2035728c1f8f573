"""Consumers on asyncio, over the members of `txmq.client.protocol.consumer`."""
