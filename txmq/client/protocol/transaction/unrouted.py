"""Messages of a transaction over a cluster, until its end routes them to brokers.

`tx.send` only notes a message. At the end of the block the cluster's map of partitions
names the broker of each message that has a key or a partition. The other messages
follow them, so that a transaction has as few brokers as possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from txmq.client.protocol.sender.routing import Describe, Routing
from txmq.client.protocol.transaction.acks import ack_owner_of
from txmq.client.protocol.transaction.broker_split import (
    BrokerSends,
    split_by_broker,
    topics_to_look_up,
)
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.bundle import Bundle, BundleCore
from txmq.errors import BrokerUnavailable, LocalProtocolError, TxmqError
from txmq.model.message import Receipt

B = TypeVar("B", bound=Bundle[Any])


class Placed(NamedTuple, Generic[B]):
    """Messages that a bundle got: its `start`-th message and those behind it."""

    bundle: B
    start: int
    indexes: Sequence[int]

    def receipts(self, receipts: Sequence[Receipt]) -> Iterator[tuple[int, Receipt]]:
        """Return the receipts by the indexes of the messages, given the bundle's."""
        return zip(self.indexes, receipts[self.start :], strict=False)


class UnroutedSends(Generic[B]):
    """The part of an unrouted bundle that is the same in all faces."""

    buffer: Buffer

    def _begin(
        self,
        cores: Sequence[BundleCore],
        routing: Routing,
        bundle_of: Callable[[Any], B],
    ) -> None:
        """`bundle_of` returns or makes the transaction's bundle of a broker's core."""
        self.cores = cores
        self._routing = routing
        self._bundle_of = bundle_of
        self._placed: list[Placed[B]] = []
        self._turn: int | None = None  # the broker chosen for messages that any may get

    def ack(self, delivered: object) -> None:
        """Ack at the broker of the consumer that delivered the message or batch."""
        owner = ack_owner_of(delivered)
        for core in self.cores:
            known = core.known_log_id
            if getattr(owner, "core", None) is core or (known and known == owner.log_id):
                self._bundle_of(core).ack(delivered)
                return
        raise LocalProtocolError(
            "the message is of none of the cluster's brokers",
            hint="ack what a consumer of this cluster delivered, or use tx.at(client).ack(...)",
        )

    async def look_up(self, describe: Describe) -> None:
        """Have the partitions that `place` needs looked up."""
        for topic in topics_to_look_up(self.buffer.items, self._routing):
            await self._routing.look_up(topic, describe)

    def place(self, bundles: Sequence[B]) -> None:
        """Give each message to the bundle of its broker.

        `bundles` are those that the transaction has already. Raises BrokerUnavailable
        where the partitions of a topic cannot be looked up, and LocalProtocolError
        where one broker has to decide alone and the messages belong to several.
        """
        if self.buffer.actions:
            raise LocalProtocolError(
                "an action belongs to one broker", hint="use tx.at(client).act(...)"
            )
        by_broker = split_by_broker(self.buffer.items, self._routing)
        anywhere = by_broker.pop(None, None)
        if anywhere is not None:
            chosen = self._broker_for_any(by_broker, bundles)
            by_broker[chosen] = anywhere.merge(by_broker.get(chosen, BrokerSends()))
        for broker, sends in by_broker.items():
            assert broker is not None, "those for any broker have one by now"
            bundle = self._bundle_of(self.cores[broker])
            start = bundle.buffer.message_count
            bundle.buffer.items += sends.sends
            self._placed.append(Placed(bundle, start, sends.indexes))
        self.buffer.clear()

    def avoid_after(self, error: TxmqError) -> None:
        """Leave the broker that was chosen in turn alone for a while if it is away."""
        if self._turn is not None and isinstance(error, BrokerUnavailable):
            self._routing.avoid(self._turn, error, time.monotonic())

    def _broker_for_any(self, chosen: dict[int | None, BrokerSends], bundles: Sequence[B]) -> int:
        unrouted: object = self
        for broker, core in enumerate(self.cores):
            if any(bundle.core is core for bundle in bundles if bundle is not unrouted):
                return broker
        for other in chosen:
            if other is not None:
                return other
        self._turn = self._routing.brokers_in_turn(time.monotonic())[0]
        return self._turn


def in_order(found: Iterable[tuple[int, Receipt]]) -> list[Receipt]:
    """Return receipts in the order of the sends."""
    return [receipt for _index, receipt in sorted(found)]
