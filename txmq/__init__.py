"""txmq: transactional messaging for Python services that keep their data in PostgreSQL.

The names that users import; the client itself is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from txmq import errors
from txmq.model.message import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    Decision,
    Message,
    Receipt,
    ReceivedMessage,
    delay_level,
)
from txmq.model.retry import RetryPolicy

if TYPE_CHECKING:
    from txmq.client.blocking.client import Client, connect
    from txmq.client.blocking.cluster import Cluster
    from txmq.client.protocol.consumer.fetched import ReceivedBatch
    from txmq.client.protocol.offsets import FileOffsets, OffsetStore
    from txmq.tx.postgres.emit import emit

__version__ = "0.1.0"

__all__ = [
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "Client",
    "Cluster",
    "Decision",
    "FileOffsets",
    "Message",
    "OffsetStore",
    "Receipt",
    "ReceivedBatch",
    "ReceivedMessage",
    "RetryPolicy",
    "connect",
    "delay_level",
    "emit",
    "errors",
]

_LAZY = {
    "Client": "txmq.client.blocking.client",
    "Cluster": "txmq.client.blocking.cluster",
    "FileOffsets": "txmq.client.protocol.offsets",
    "OffsetStore": "txmq.client.protocol.offsets",
    "ReceivedBatch": "txmq.client.protocol.consumer.fetched",
    "connect": "txmq.client.blocking.client",
    "emit": "txmq.tx.postgres.emit",
}


def __getattr__(name: str) -> object:
    """`txmq.connect` and its like cost an import of the client when first asked for;
    `txmq.twisted` one of Twisted.
    """
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "twisted":
        return import_module("txmq.twisted")
    raise AttributeError(f"module 'txmq' has no attribute {name!r}")
