"""Sends made of piles: cut to size, sent to their partition, numbered within one
producing session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import uuid4

from txmq.batch.cells import too_large
from txmq.client.protocol.sender.accumulator import IN_TURN, PendingBatch, Place
from txmq.client.protocol.sender.promise import Promise
from txmq.client.protocol.sender.rows import (
    PIECE_BYTES,
    PIECE_ROWS,
    Messages,
    at_most,
    cuts,
    weight,
)
from txmq.client.protocol.sender.topics import Shape, Topics
from txmq.errors import LocalProtocolError, TxmqError
from txmq.model.message import Receipt
from txmq.wire.headers import send_header
from txmq.wire.hello import Limits


@dataclass(slots=True)
class Flight:
    """A send with the messages of a pile. `doubtful`: an earlier attempt may have been
    stored.
    """

    pile: PendingBatch
    prefix: str  # of the message ids
    sequence: int
    payload: tuple[bytes, bytes]  # header and batch
    doubtful: bool = False
    refusal: TxmqError | None = None

    @property
    def futures(self) -> list[Promise[Receipt]]:
        """Of its messages."""
        return self.pile.futures

    @property
    def time(self) -> float:
        """When the youngest of its messages was put in."""
        return self.pile.times[-1]


class Loader:
    """Piles in the order in which they shall go out. `fail` is told of those that
    cannot.
    """

    def __init__(self, topics: Topics, fail: Callable[[PendingBatch, TxmqError], None]) -> None:
        self._topics, self._fail = topics, fail
        self.queue: deque[PendingBatch] = deque()
        self.renew()

    def renew(self) -> None:
        """Begins a new producing session, for everything from here on."""
        self._producer_id = uuid4().bytes
        self._prefix = f"{self._producer_id.hex()}-"
        self._sequence = 0

    def put_back(self, piles: Iterable[PendingBatch]) -> None:
        """These go before all others, in their order."""
        self.queue.extendleft(reversed(list(piles)))

    def next(self, limits: Limits) -> Flight | None:
        """The next send, None when there is nothing to make one of."""
        while self.queue:
            pile = self._cut(self.queue.popleft())
            if pile is not None:
                self.queue.appendleft(pile)  # an interrupt must not lose it
                flight = self._encode(pile, limits.message)
                self.queue.popleft()
                if flight is not None:
                    return flight
        return None

    def _cut(self, pile: PendingBatch) -> PendingBatch | None:
        """The first part of a pile that fits in a frame and goes to one partition; the
        rest goes back.
        """
        place, shape = pile.place, self._topics.known(pile.place.topic)
        if (
            place.partition == IN_TURN
        ):  # without a shape the topic is gone, which the broker shall tell
            chosen = self._topics.turn(shape) if shape else 0
            pile.place = Place(
                place.topic, chosen, shape.epoch if shape else place.epoch, asked=False
            )
        elif shape and place.epoch != shape.epoch:
            self._reroute(pile, shape)
            return None
        most = at_most(pile.messages, PIECE_ROWS)
        if pile.weight <= PIECE_BYTES and len(pile.messages) <= most:
            return pile
        first, *rest = (pile.slice_rows(*ends) for ends in cuts(list(map(weight, pile.messages)), most))
        self.put_back(rest)
        return first

    def _reroute(self, pile: PendingBatch, shape: Shape) -> None:
        """The topic has grown since: keys may belong to other partitions now."""
        place, places = pile.place, dict[int, list[int]]()
        for at, message in enumerate(pile.messages):
            try:
                partition = (
                    place.partition if place.asked else self._topics.choose(shape, message.key)
                )
            except Exception as error:  # a partitioner is the user's code
                hint = "it is called with topic, key and the number of partitions, and answers one of them"
                refused = LocalProtocolError(
                    f"the partitioner raised {type(error).__name__}", hint=hint
                )
                self._fail(pile.slice_rows(at, at + 1), refused)
            else:
                places.setdefault(partition, []).append(at)
        self.put_back(
            pile.pick(Place(place.topic, partition, shape.epoch, place.asked), chosen)
            for partition, chosen in places.items()
        )

    def _encode(self, pile: PendingBatch, most: int) -> Flight | None:
        try:
            rows = Messages(pile.messages, pile.births)
            if pile.weight > most and (largest := rows.largest()) > most:
                raise too_large("message", largest, most)
            batch = rows.encode(self._producer_id, self._sequence, self._topics.compression)
        except TxmqError as error:
            self._fail(pile, error)
            return None
        topic, partition, epoch, _asked = pile.place
        flight = Flight(
            pile, self._prefix, self._sequence, (send_header(topic, partition, epoch), batch)
        )
        self._sequence += len(pile.messages)
        return flight
