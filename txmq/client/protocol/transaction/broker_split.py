"""The sends of a transaction, split by the brokers of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from txmq.client.protocol.sender.routing import Routing, SendRoute
from txmq.client.protocol.transaction.buffer import BufferedSend
from txmq.model.message import Message


@dataclass(slots=True)
class BrokerSends:
    """Sends for one broker in order, with the places of their messages among all."""

    sends: list[BufferedSend] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)

    def add(self, send: BufferedSend, indexes: Sequence[int]) -> None:
        """Append a send whose messages have these places."""
        self.sends.append(send)
        self.indexes.extend(indexes)

    def merge(self, other: BrokerSends) -> BrokerSends:
        """Return the sends of both in the order in which the user sent them."""
        merged = BrokerSends()
        pieces = [*self.pieces(), *other.pieces()]
        for send, indexes in sorted(pieces, key=lambda piece: piece[1][0]):
            merged.add(send, indexes)
        return merged

    def pieces(self) -> Iterator[tuple[BufferedSend, Sequence[int]]]:
        """Yield each send with the places of its messages."""
        start = 0
        for send in self.sends:
            end = start + send.message_count
            yield send, self.indexes[start:end]
            start = end


def topics_to_look_up(sends: Iterable[BufferedSend], routing: Routing) -> set[str]:
    """Return the topics whose partitions have to be known before the sends are
    routed.
    """
    return {
        send.topic
        for send in sends
        if any(
            routing.map.needs_lookup(send.topic, key, send.requested_partition)
            for key in _keys(send)
        )
    }


def split_by_broker(
    sends: Iterable[BufferedSend], routing: Routing
) -> dict[int | None, BrokerSends]:
    """Return the sends of each broker, with the partition there; None = any broker.

    Raises LocalProtocolError for a partition that does not exist, and
    BrokerUnavailable where a topic's partitions cannot be looked up.
    """
    found: dict[int | None, BrokerSends] = {}
    start = 0
    for send in sends:
        for route, rows in _routes(send, routing).items():
            broker, partition = route or (None, None)
            content = send.content
            if not isinstance(content, Message) and len(rows) < len(content):
                content = content.select(rows)
            found.setdefault(broker, BrokerSends()).add(
                send._replace(content=content, requested_partition=partition),
                [start + row for row in rows],
            )
        start += send.message_count
    return found


def _routes(send: BufferedSend, routing: Routing) -> dict[SendRoute | None, list[int]]:
    return routing.rows_by_route(send.topic, _keys(send), send.requested_partition)


def _keys(send: BufferedSend) -> Sequence[str | None]:
    if isinstance(send.content, Message):
        return [send.content.key]
    return send.content.row_keys() or [None] * len(send.content)
