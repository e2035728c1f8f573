"""In which order messages that wait here are handed out.

Concurrent and broadcast groups: as they arrived. Ordered groups: a message waits until the one of its key before it is
done with (`KeyLanes`), or, where whole batches are taken, until the batch of its partition before it is (`SpotLanes`).

Rows may stop being READY behind a queue's back, when they are given back or delivered anew: queues skip them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from txmq.client.consuming.parcels import READY, Parcel
from txmq.wire.headers import Acked

Taken = tuple[Parcel, int]  # and an offset in it
Spot = tuple[str, int]


class Line(Protocol):
    """A queue of single messages. Whoever takes one marks it STARTED."""

    def put(self, parcel: Parcel) -> None:
        """Its READY rows wait from now on."""

    def take(self, most: int) -> list[Taken]:
        """At most so many that may be handed out together, in the order in which they are to be processed."""

    def take_one(self) -> Taken | None:
        """As `take`, for the one case that is hot."""

    def settled(self, done: Acked, count: int) -> None:
        """`count` messages of this range were taken and are done with."""


class BatchLine(Protocol):
    """A queue of parcels. Whoever takes one marks its READY rows STARTED."""

    def put(self, parcel: Parcel) -> None:
        """Its READY rows wait from now on."""

    def take_parcel(self) -> Parcel | None:
        """One whose READY rows may be handed out."""

    def settled(self, done: Acked, count: int) -> None:
        """`count` messages of this range were taken and are done with."""


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


class _Lane:
    """The messages of one key: those that wait, and how many of them are in the user's hands."""

    __slots__ = ("busy", "key", "queued", "waiting")

    def __init__(self, key: tuple[str, int] | None) -> None:
        self.key = key
        self.waiting: list[Taken] = []  # no deque: most have one message, and a deque is made in ten times the time
        self.busy = 0
        self.queued = False  # for its next message to be taken

    def next(self) -> Taken | None:
        """Takes its first message that is still READY."""
        while self.waiting:
            parcel, offset = self.waiting.pop(0)
            if parcel.states[offset - parcel.start] == READY:
                return parcel, offset
        return None


class KeyLanes:
    """Keys side by side, the messages of one key one after the other. Those without a key wait for nobody."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._free: deque[_Lane] = deque()
        self._in_hand: dict[tuple[str, int, int], _Lane] = {}

    def put(self, parcel: Parcel) -> None:
        topic, lanes, states = parcel.topic, self._lanes, parcel.states
        for row, key_hash in enumerate(parcel.hashes()):
            if states[row] != READY:
                continue
            if key_hash is None:
                lane = _Lane(None)
            elif (found := lanes.get((topic, key_hash))) is not None:
                lane = found
            else:
                lane = lanes[topic, key_hash] = _Lane((topic, key_hash))
            lane.waiting.append((parcel, parcel.start + row))
            if not (lane.busy or lane.queued):
                lane.queued = True
                self._free.append(lane)

    def take(self, most: int) -> list[Taken]:
        taken: list[Taken] = []
        while self._free and len(taken) < most:
            lane = self._free.popleft()
            lane.queued = False
            while len(taken) < most and (found := lane.next()) is not None:
                parcel, offset = found
                self._in_hand[parcel.topic, parcel.partition, offset] = lane
                lane.busy += 1
                taken.append(found)
            if not (lane.busy or lane.waiting):
                self._forget(lane)
        return taken

    def take_one(self) -> Taken | None:
        found = self.take(1)
        return found[0] if found else None

    def settled(self, done: Acked, count: int) -> None:
        if count == 1 and done[3] - done[2] == 1:
            self._let_go(done[:3])
            return
        for offset in _offsets(done, count, self._in_hand):
            self._let_go((done.topic, done.partition, offset))

    def _let_go(self, place: tuple[str, int, int]) -> None:
        lane = self._in_hand.pop(place, None)
        if lane is None:
            return
        lane.busy -= 1
        if lane.busy:
            return
        if not lane.waiting:
            self._forget(lane)
        elif not lane.queued:
            lane.queued = True
            self._free.append(lane)

    def _forget(self, lane: _Lane) -> None:
        if lane.key is not None:
            self._lanes.pop(lane.key, None)


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


def _offsets(done: Acked, count: int, in_hand: dict[tuple[str, int, int], _Lane]) -> Iterable[int]:
    """The offsets of the range that may be in hand; a wide range is not gone through one by one."""
    if done.end - done.start <= max(count, 1) * 4:
        return range(done.start, done.end)
    spot = done[:2]
    return [offset for *place, offset in in_hand if tuple(place) == spot and done.start <= offset < done.end]
