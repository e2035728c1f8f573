"""Transactions on asyncio that their broker decides as it stores them.

`txmq.client.protocol.awaited.local` has the steps.
"""

from __future__ import annotations

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.protocol.awaited.local import LocalSteps, SealedBundle


class LocalBundle(SealedBundle[AioCore], AioBundle):
    """A bundle whose seal decides it."""


class LocalTransaction(Transaction, LocalSteps[AioBundle, AioCore]):
    """Messages and acks that become visible together at the end of the block.

    If the block raises, nothing is stored.
    """

    _bundle_type = LocalBundle
