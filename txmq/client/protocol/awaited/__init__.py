"""Coroutines that asyncio and the blocking face share: see `txmq.faces`."""
