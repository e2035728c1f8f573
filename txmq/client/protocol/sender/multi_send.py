"""Sends that share a frame: which go out together, and what the broker's reply says of
each.

The sends of many partitions are small ones, and a frame, a record and a reply for each
would cost more than they do. Each keeps its own sequence and its own answer, so that
after a lost connection, or a refusal, it may find itself in other company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from txmq.client.blocking.sender.delivery import receipt_of, receipts_from
from txmq.client.protocol.conversation import Conversation, Payload, result
from txmq.client.protocol.sender.accumulator import Accumulator
from txmq.client.protocol.sender.batcher import Flight, Loader
from txmq.client.protocol.sender.promise import Promise
from txmq.client.protocol.sender.stats import Stats
from txmq.errors import RemoteProtocolError
from txmq.model.message import Receipt
from txmq.wire.headers import Opcode
from txmq.wire.hello import Limits, Welcome
from txmq.wire.status import OK
from txmq.wire.together import SENDS, Answer, pack_requests, unpack_answers

MOST = 128  # in one frame: half of those that may be under way
ENOUGH_BYTES = 64 << 10  # for one frame: of more, several are under way at once


def takes_convoys(welcome: Welcome | None) -> bool:
    """Whether the broker takes several sends in a frame."""
    return welcome is not None and SENDS in welcome.features


@dataclass(slots=True)
class Convoy:
    """Flights in one frame, in the order of their sequences; one alone goes out as it
    is.

    `futures` are those of all messages, in order, `weight` is that of all.
    """

    flights: list[Flight]
    futures: list[Promise[Receipt]] = field(init=False)
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.flights) == 1:
            pile = self.flights[0].pile
            self.futures, self.weight = pile.futures, pile.weight
        else:
            self.futures = [future for flight in self.flights for future in flight.pile.futures]
            self.weight = sum([flight.pile.weight for flight in self.flights])

    @property
    def opcode(self) -> int:
        """Of the frame."""
        return Opcode.SENDS if len(self.flights) > 1 else Opcode.SEND

    @property
    def payload(self) -> Payload:
        """Of the frame."""
        if len(self.flights) == 1:
            return self.flights[0].payload
        return b"".join(pack_requests([b"".join(flight.payload) for flight in self.flights]))

    @property
    def time(self) -> float:
        """When the youngest of its messages was put in."""
        return max([flight.time for flight in self.flights])

    @property
    def settled(self) -> bool:
        """Whether its messages take no more room. Their piles know it, all or none:
        they may part.
        """
        return self.flights[-1].pile.settled

    @settled.setter
    def settled(self, settled: bool) -> None:
        for flight in self.flights:
            flight.pile.settled = settled

    def answers(self, payload: bytes) -> list[Receipt] | None:
        """What its futures get; None where some are refused. Raises RemoteProtocolError
        for a reply that is none.
        """
        if len(self.flights) == 1:
            return receipts_in(self.flights[0], payload)
        found: list[Receipt] = []
        for flight, (status, own) in self.each(payload):
            if status != OK:
                return None
            found += receipts_in(flight, own)
        return found

    def each(self, payload: bytes) -> Iterator[tuple[Flight, Answer]]:
        """The flights, each with its own answer. Raises as `answers` does."""
        try:
            answers = unpack_answers(payload, len(self.flights))
        except RemoteProtocolError as error:
            error.outcome = "unknown"  # they may have been carried out
            raise
        return zip(self.flights, answers, strict=True)


class Dispatch:
    """What is to go out next: before all that is new, the sends in `again`, as they
    were.
    """

    def __init__(self, loader: Loader, outbox: Accumulator, stats: Stats) -> None:
        self._loader, self._outbox, self._stats = loader, outbox, stats
        self.again: deque[Flight] = deque()

    @property
    def empty(self) -> bool:
        """Whether nothing is there that was taken out of the outbox."""
        return not (self.again or self._loader.queue)

    def next(self, conversation: Conversation, room: int) -> Convoy | None:
        """The next frame: of up to `room` sends, while they are small and the broker
        takes them so.
        """
        most = min(MOST, room) if takes_convoys(conversation.welcome) else 1
        flights: list[Flight] = []
        size = fresh = 0
        try:
            while size < ENOUGH_BYTES and len(flights) < most and not (flights and self.empty):
                known = len(self.again)
                flight = self._next(conversation.limits)
                if flight is None:
                    break
                flights.append(flight)
                size += flight.pile.weight
                fresh += 0 if known else len(flight.pile.messages)
        except BaseException:  # an interrupt must not lose them
            self.back(flights)
            raise
        self._stats.frames += fresh > 0
        self._stats.coalesced += fresh if len(flights) > 1 or fresh > 1 else 0
        return Convoy(flights) if flights else None

    def _next(self, limits: Limits) -> Flight | None:
        if self.again:
            self._stats.resent += 1
            return self.again.popleft()
        if not self._loader.queue:  # not earlier: until they are taken, piles grow
            self._loader.queue.extend(self._outbox.take_piles(ripe=True))
        return self._loader.next(limits)

    def back(self, flights: Sequence[Flight]) -> None:
        """These go out again, before all others."""
        self.again.extendleft(reversed(flights))


def receipts_of(flight: Flight, answer: Answer) -> list[Receipt]:
    """Those of a flight's messages. Raises the error that it was refused with, if it
    was.
    """
    return receipts_in(flight, result(answer))


def receipts_in(flight: Flight, payload: bytes) -> list[Receipt]:
    """Those of a flight's messages, out of the payload of its own reply."""
    receipt, pile = receipt_of(payload), flight.pile
    topic, partition, _epoch, _asked = pile.place
    return receipts_from(
        flight.prefix, flight.sequence, topic, partition, len(pile.futures), receipt
    )
