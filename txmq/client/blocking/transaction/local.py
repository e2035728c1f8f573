"""Transactions that their broker decides as it stores them.

`txmq.client.protocol.awaited.local` has the steps.
"""

from __future__ import annotations

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.awaited.local import LocalSteps, SealedBundle


class LocalBundle(SealedBundle[BlockingCore], BrokerBundle):
    """A bundle whose seal decides it."""


class LocalTransaction(Transaction, LocalSteps[BrokerBundle, BlockingCore]):
    """Messages and acks that become visible together at the end of the block.

    If the block raises, nothing is stored.
    """

    _bundle_type = LocalBundle
