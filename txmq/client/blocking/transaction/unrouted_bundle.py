"""Messages of a transaction over a cluster, until its end routes them to brokers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.unrouted import UnroutedSends, in_order
from txmq.model.message import Receipt


class UnroutedBundle(UnroutedSends[BrokerBundle], BrokerBundle):
    """Sends of a transaction over a cluster. Nothing is stored from here."""

    def __init__(
        self,
        cores: Sequence[BlockingCore],
        routing: Routing,
        token: UUID,
        bundle_of: Callable[[BlockingCore], BrokerBundle],
    ) -> None:
        """`bundle_of` returns or makes the transaction's bundle of a broker."""
        super().__init__(cores[0], token)
        self._begin(cores, routing, bundle_of)

    def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends; see `Transaction.receipts`."""
        return in_order(
            found for placed in self._placed for found in placed.receipts(placed.bundle.receipts())
        )
