"""In which order messages that wait here are handed out.

Concurrent and broadcast groups: as they arrived. Ordered groups: a message waits until
the one of its key before it is done with (`KeyLanes`), or, where whole batches are
taken, until the batch of its partition before it is (`SpotLanes`).

Rows may stop being READY behind a queue's back, when they are given back or delivered
anew: queues skip them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from txmq.client.protocol.consumer.fetched import READY, Parcel
from txmq.wire.headers import Acked

Taken = tuple[Parcel, int]  # and an offset in it
Spot = tuple[str, int]
Key = tuple[str, str | None]  # a topic's


class Line(Protocol):
    """A queue of single messages. Whoever takes one marks it STARTED."""

    def put(self, parcel: Parcel) -> None:
        """Its READY rows wait from now on."""

    def take(self, most: int) -> list[Taken]:
        """At most so many that may be handed out together, in the order in which they
        are to be processed.
        """

    def take_one(self) -> Taken | None:
        """As `take`, for the one case that is hot."""

    def settled(self, done: Acked, count: int) -> None:
        """`count` messages of this range were taken and are done with."""

    def settled_one(self, topic: str, partition: int, offset: int) -> None:
        """As `settled`, for the one case that is hot."""


class BatchLine(Protocol):
    """A queue of parcels. Whoever takes one marks its READY rows STARTED."""

    def put(self, parcel: Parcel) -> None:
        """Its READY rows wait from now on."""

    def take_parcel(self) -> Parcel | None:
        """One whose READY rows may be handed out."""

    def settled(self, done: Acked, count: int) -> None:
        """`count` messages of this range were taken and are done with."""

    def settled_one(self, topic: str, partition: int, offset: int) -> None:
        """As `settled`, for the one case that is hot."""


class Arrivals:
    """As they arrived; both a Line and a BatchLine."""

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self._row = 0  # rows of the first parcel before this one are not READY

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)

    def take(self, most: int) -> list[Taken]:
        taken: list[Taken] = []
        while len(taken) < most and (found := self.take_one()) is not None:
            taken.append(found)
        return taken

    def take_one(self) -> Taken | None:
        parcels = self._parcels
        while parcels:
            parcel = parcels[0]
            row = parcel.states.find(READY, self._row)
            if row >= 0:
                self._row = row + 1
                return parcel, parcel.start + row
            parcels.popleft()
            self._row = 0
        return None

    def take_parcel(self) -> Parcel | None:
        parcels = self._parcels
        while parcels:
            if parcels[0].states.find(READY, self._row) >= 0:
                return parcels[0]
            parcels.popleft()
            self._row = 0
        return None

    def settled(self, done: Acked, count: int) -> None:
        """What is done with makes no difference to the others."""

    def settled_one(self, topic: str, partition: int, offset: int) -> None:
        """What is done with makes no difference to the others."""


class _Lane:
    """The messages of one key that wait for each other, and how many of them are in the
    user's hands.
    """

    __slots__ = ("busy", "key", "waiting")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.waiting: deque[Taken] = deque()
        self.busy = 0

    def next(self) -> Taken | None:
        """Takes its first message that is still READY."""
        while self.waiting:
            parcel, offset = self.waiting.popleft()
            if parcel.states[offset - parcel.start] == READY:
                return parcel, offset
        return None


class KeyLanes:
    """Keys side by side, the messages of one key one after the other. Those without a
    key wait for nobody.

    Single messages go as they arrived, but for those that are passed over until their
    key is free; only these make a lane. Who takes several gets the messages of a key in
    a row, and leaves the other keys to the others: for that all that has arrived is
    lined up.
    """

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._lanes: dict[
            Key, _Lane | None
        ] = {}  # of keys in hand, or that wait; None: one in hand, and none waits
        self._free: deque[_Lane] = deque()  # all that have nothing in hand, but messages that wait
        self._in_hand: dict[tuple[str, int, int], Key] = {}

    def put(self, parcel: Parcel) -> None:
        self._arrivals.put(parcel)

    def take(self, most: int) -> list[Taken]:
        self._line_up()
        taken: list[Taken] = []
        while self._free and len(taken) < most:
            lane = self._free.popleft()
            while len(taken) < most and (found := lane.next()) is not None:
                taken.append(self._hold(found, lane))
            if not lane.busy:
                self._lanes.pop(lane.key, None)
        return taken

    def take_one(self) -> Taken | None:
        while self._free:
            lane = self._free.popleft()
            if (found := lane.next()) is not None:
                return self._hold(found, lane)
            self._lanes.pop(lane.key, None)
        while (found := self._arrivals.take_one()) is not None:
            parcel, offset = found
            key = (parcel.topic, parcel.view.keys[offset - parcel.base])
            if key[1] is None:
                return found
            if key not in self._lanes:
                self._lanes[key] = None
                self._in_hand[parcel.topic, parcel.partition, offset] = key
                return found
            self._lane(key).waiting.append(found)
        return None

    def settled(self, done: Acked, count: int) -> None:
        for offset in _offsets(done, count, self._in_hand):
            self.settled_one(done.topic, done.partition, offset)

    def settled_one(self, topic: str, partition: int, offset: int) -> None:
        key = self._in_hand.pop((topic, partition, offset), None)
        if key is None:
            return
        lane = self._lanes[key]
        if lane is None:
            del self._lanes[key]
            return
        lane.busy -= 1
        if lane.busy:
            return
        if lane.waiting:
            self._free.append(lane)
        else:
            del self._lanes[key]

    def _line_up(self) -> None:
        while (found := self._arrivals.take_one()) is not None:
            parcel, offset = found
            lane = self._lane((parcel.topic, parcel.view.keys[offset - parcel.base]))
            if not (lane.busy or lane.waiting):
                self._free.append(lane)
            lane.waiting.append(found)

    def _lane(self, key: Key) -> _Lane:
        """The key's lane, which is made where there is none; where it has none, one of
        the message's own.
        """
        if key[1] is None:
            return _Lane(key)
        lane = self._lanes.get(key)
        if lane is None:
            lane = _Lane(key)
            lane.busy = int(key in self._lanes)
            self._lanes[key] = lane
        return lane

    def _hold(self, found: Taken, lane: _Lane) -> Taken:
        parcel, offset = found
        lane.busy += 1
        if lane.key[1] is not None:
            self._in_hand[parcel.topic, parcel.partition, offset] = lane.key
        return found


class SpotLanes:
    """Partitions side by side, the parcels of one partition one after the other."""

    def __init__(self) -> None:
        self._waiting: dict[Spot, deque[Parcel]] = {}
        self._busy: Counter[Spot] = Counter()

    def put(self, parcel: Parcel) -> None:
        self._waiting.setdefault(parcel.spot, deque()).append(parcel)

    def take_parcel(self) -> Parcel | None:
        for spot, parcels in self._waiting.items():
            while parcels and not parcels[0].ready:
                parcels.popleft()
            if parcels and self._busy[spot] <= 0:
                parcel = parcels.popleft()
                self._waiting[spot] = self._waiting.pop(spot)  # the others first, next time
                self._busy[spot] += parcel.ready
                return parcel
        return None

    def settled(self, done: Acked, count: int) -> None:
        self._busy[done.topic, done.partition] -= count

    def settled_one(self, topic: str, partition: int, offset: int) -> None:
        self._busy[topic, partition] -= 1


def _offsets(done: Acked, count: int, in_hand: dict[tuple[str, int, int], Key]) -> Iterable[int]:
    """The offsets of the range that may be in hand; a wide range is not gone through
    one by one.
    """
    if done.end - done.start <= max(count, 1) * 4:
        return range(done.start, done.end)
    spot = done[:2]
    return [
        offset
        for *place, offset in in_hand
        if tuple(place) == spot and done.start <= offset < done.end
    ]
