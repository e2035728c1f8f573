"""What a member has fetched and not yet settled: what waits here, and what is in the
user's hands.

A message may come again while it is here: its lease ran out, or the broker lost it with
the power. One that was not taken yet is then taken from the newer delivery. One in the
user's hands stays what it is, the newer delivery's row is its TWIN and is settled with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from txmq.batch import rows_tagged
from txmq.client.protocol.consumer.fetched import (
    DONE,
    LENT,
    NACKED,
    READY,
    STARTED,
    TWIN,
    DeliveredMessage,
    Parcel,
    ReceivedBatch,
)
from txmq.client.protocol.consumer.key_queues import (
    Arrivals,
    BatchLine,
    KeyLanes,
    Line,
    Spot,
    SpotLanes,
)
from txmq.errors import LocalProtocolError
from txmq.model.keys import key_hash
from txmq.selector import Selector
from txmq.wire.headers import Acked

IN_HAND = (STARTED, NACKED, LENT)


class _Shelf:
    """The parcels of one partition with anything left in them. `top`: nothing here is
    at or above this offset.
    """

    __slots__ = ("overlapping", "parcels", "top")

    def __init__(self) -> None:
        self.parcels: dict[Parcel, None] = {}
        self.top = 0
        self.overlapping = False  # whether one offset may be in several of them


class Holdings:
    """The state of all messages here. Not thread-safe."""

    def __init__(
        self, *, ordered: bool, tags: frozenset[str] | None = None, selector: Selector | None = None
    ) -> None:
        self._ordered, self._tags, self._selector = ordered, tags, selector
        self._shelves: dict[Spot, _Shelf] = {}
        self._new: list[
            Parcel
        ] = []  # not in a line yet: how they line up is known when the first is taken
        self._line: Line | None = None
        self._batches: BatchLine | None = None
        self.ready = self.ready_bytes = 0  # what waits to be taken

    def add(self, parcel: Parcel) -> list[Acked]:
        """Takes in what was fetched. Returns what nobody here wants, by tags and
        selector.
        """
        shelf = self._shelves.setdefault(parcel.spot, _Shelf())
        self.ready += parcel.ready
        self.ready_bytes += parcel.size
        if parcel.start < shelf.top:
            self._overlap(shelf, parcel)
        shelf.parcels[parcel] = None
        shelf.top = max(shelf.top, parcel.end)
        unwanted = list(self._unwanted(parcel))
        for _topic, _partition, start, end in unwanted:
            self._leave(parcel, start, end, DONE)
        if parcel.ready:
            self._new.append(parcel)
        else:
            self._tidy(parcel)
        return unwanted

    def _unwanted(self, parcel: Parcel) -> Iterator[Acked]:
        if self._tags is None and self._selector is None:
            return
        at = parcel.start
        for offset in self._wanted(parcel):
            if at < offset:
                yield Acked(*parcel.spot, at, offset)
            at = offset + 1
        if at < parcel.end:
            yield Acked(*parcel.spot, at, parcel.end)

    def _wanted(self, parcel: Parcel) -> Iterator[int]:
        view, base = parcel.view, parcel.base
        rows = range(parcel.start - base, parcel.end - base)
        tagged = (
            rows
            if self._tags is None
            else (row for row in rows_tagged(view, self._tags) if row in rows)
        )
        for row in tagged:
            key, tag = view.keys[row], view.tags[row]
            if self._selector is None or self._selector.matches(
                view.headers[row], key=key, tag=tag, topic=parcel.topic
            ):
                yield base + row

    def _overlap(self, shelf: _Shelf, parcel: Parcel) -> None:
        for other in list(shelf.parcels):
            if other.start >= parcel.end or other.end <= parcel.start:
                continue
            shelf.overlapping = True
            self._leave(other, parcel.start, parcel.end, DONE)
            for state in (*IN_HAND, TWIN):
                for _topic, _partition, start, end in list(other.runs(state)):
                    self._leave(parcel, start, end, TWIN)
            self._tidy(other)

    def take(self, most: int = 1, *, now: float) -> list[DeliveredMessage]:
        """At most so many messages; more than one of a key only for whoever processes
        them in this order.
        """
        line = self._line if self._line is not None and not self._new else self._single_line()
        return [self._taken(parcel, offset, now) for parcel, offset in line.take(most)]

    def take_one(self, *, now: float) -> DeliveredMessage | None:
        """As `take`, for the one case that is hot."""
        line = self._line if self._line is not None and not self._new else self._single_line()
        found = line.take_one()
        if found is None:
            return None
        parcel, offset = found
        return self._taken(parcel, offset, now)

    def _taken(self, parcel: Parcel, offset: int, now: float) -> DeliveredMessage:
        message = parcel.take(offset, now)
        self.ready -= 1
        if not parcel.ready:
            self._exhausted(parcel)
        return message

    def take_batch(self, *, now: float) -> ReceivedBatch | None:
        """The messages of one delivery that wait here."""
        parcel = self._batch_line().take_parcel()
        if parcel is None:
            return None
        batch = ReceivedBatch(parcel, parcel.offsets(READY))
        parcel.touched_at, parcel.whole = now, True
        self._leave(parcel, parcel.start, parcel.end, STARTED)
        return batch

    def _single_line(self) -> Line:
        if self._line is None:
            if self._batches is not None:
                raise _mixed()
            if self._ordered:
                self._line = KeyLanes()
            else:
                self._line = self._batches = Arrivals()
        self._line_up(self._line)
        return self._line

    def _batch_line(self) -> BatchLine:
        if self._batches is None:
            if self._line is not None:
                raise _mixed()
            if self._ordered:
                self._batches = SpotLanes()
            else:
                self._line = self._batches = Arrivals()
        self._line_up(self._batches)
        return self._batches

    def _line_up(self, line: Line | BatchLine) -> None:
        if self._new:
            for parcel in self._new:
                if parcel.ready:
                    line.put(parcel)
            self._new.clear()

    def settle_one(self, message: DeliveredMessage, *, now: float) -> bool:
        """The message is done with; whether it was in the user's hands.

        As `settle`, for the one case that is hot.
        """
        parcel, offset = message.parcel, message[2]
        if self._shelves[parcel.spot].overlapping:
            return self.settle(Acked(*parcel.spot, offset, offset + 1), now=now) > 0
        if not parcel.finish(offset, now):
            return False
        if not parcel.left:
            self._tidy(parcel)
        if self._ordered:
            self._taken_from().settled_one(parcel.topic, parcel.partition, offset)
        return True

    def settle(
        self, done: Acked, parcel: Parcel | None = None, *, now: float, old: int = STARTED
    ) -> int:
        """These messages are done with; returns how many of them were in state `old`.
        `parcel`: where they are.
        """
        shelf = self._shelves.get(done[:2])
        if shelf is None:
            return 0
        count = 0
        for one in (
            [parcel] if parcel is not None and not shelf.overlapping else list(shelf.parcels)
        ):
            settled = one.change(done.start, done.end, old, DONE)
            twins = one.change(done.start, done.end, TWIN, DONE)
            if settled or twins:
                one.touched_at = now
                count += settled
                self._tidy(one)
        if count:
            self._taken_from().settled(done, count)
        return count

    def _taken_from(self) -> Line | BatchLine:
        line = self._line or self._batches
        assert line is not None, "what was in hand was taken from it"
        return line

    def change(self, what: Acked, old: int, new: int) -> int:
        """Messages in hand go from one state to another; returns how many they are.
        `settle` is for those done with.
        """
        shelf = self._shelves.get(what[:2])
        parcels = shelf.parcels if shelf is not None else ()
        return sum(parcel.change(what.start, what.end, old, new) for parcel in parcels)

    def in_hand(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the user has this message, neither acked nor nacked."""
        shelf = self._shelves.get((topic, partition))
        return shelf is not None and any(
            parcel.start <= offset < parcel.end and parcel.state(offset) == STARTED
            for parcel in shelf.parcels
        )

    def taken(self) -> list[Acked]:
        """What was taken and is not done with."""
        return [run for parcel in self.parcels() for state in IN_HAND for run in parcel.runs(state)]

    def drop_ready(self, which: Callable[[Parcel], bool] | None = None) -> list[Acked]:
        """Forgets what waits here, all or of these parcels. Returns what it was, to be
        given back.
        """
        dropped: list[Acked] = []
        for parcel in [
            parcel for parcel in self.parcels() if parcel.ready and (which is None or which(parcel))
        ]:
            dropped += parcel.runs(READY)
            self._leave(parcel, parcel.start, parcel.end, DONE)
            self._tidy(parcel)
        return dropped

    def drop_key(self, topic: str, key: str, lease: int) -> list[Acked]:
        """Forgets what waits here of a key, if its lease is below this number; returns
        what it was.
        """
        wanted = key_hash(key)
        dropped = []
        for parcel in [
            parcel for parcel in self.parcels() if parcel.topic == topic and parcel.ready
        ]:
            if parcel.lease < lease:
                hashes = parcel.hashes()
                for offset in parcel.offsets(READY):
                    if hashes[offset - parcel.start] == wanted:
                        dropped.append(Acked(*parcel.spot, offset, offset + 1))
                        self._leave(parcel, offset, offset + 1, DONE)
                self._tidy(parcel)
        return dropped

    def leases(self) -> set[int]:
        """Leases that something is left of."""
        return {parcel.lease for parcel in self.parcels()}

    def prolong(self, topic: str, partition: int, offset: int, since: float) -> bool:
        """A message in hand counts as taken at that time; whether it is in hand."""
        shelf = self._shelves.get((topic, partition))
        for parcel in shelf.parcels if shelf is not None else ():
            if parcel.start <= offset < parcel.end and parcel.state(offset) == STARTED:
                parcel.since[offset] = since
                return True
        return False

    def parcels(self) -> list[Parcel]:
        """All with anything left in them."""
        return [parcel for shelf in self._shelves.values() for parcel in shelf.parcels]

    def _leave(self, parcel: Parcel, start: int, end: int, state: int) -> None:
        """Rows of these offsets no longer wait to be taken."""
        if parcel.ready:
            self.ready -= parcel.change(start, end, READY, state)
            if not parcel.ready:
                self._exhausted(parcel)

    def _exhausted(self, parcel: Parcel) -> None:
        """Nothing of the parcel waits to be taken any more."""
        self.ready_bytes -= parcel.size
        if not self._ordered:  # else the key is needed where a handler gives up
            parcel.release()

    def _tidy(self, parcel: Parcel) -> None:
        shelf = self._shelves[parcel.spot]
        if not parcel.left:
            shelf.parcels.pop(parcel, None)
            parcel.release()
        if not shelf.parcels:
            shelf.top, shelf.overlapping = 0, False


def _mixed() -> LocalProtocolError:
    return LocalProtocolError(
        "messages and batches of one ordered consumer",
        hint="take either: their order is kept in different ways",
    )
