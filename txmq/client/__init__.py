"""The client: a sans-I/O core (`conversation`) and a blocking face over plain sockets (`blocking`).

`producer` and `delivery` send and wait; `pipeline`, with `outbox` and `flights`, sends without waiting.
"""

from txmq.client.blocking import Client, connect

__all__ = ["Client", "connect"]
