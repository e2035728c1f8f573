"""Order tickets: who waits for whom, key by key.

A half message has no offset, but a place in the order of its keys: its ticket, the log
position at which it was stored. A table row (topic, partition, key hash, ticket) says
that the key is held. What is decided may be published only when, for each of its keys,
no earlier ticket is left; a plain batch that meets a held key takes a ticket too and
waits as if it were committed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import Delay
from txmq.core.events.transactions import Released
from txmq.core.state import log_pins, visibility
from txmq.core.topics import delayed
from txmq.core.topics.delayed import Delayed
from txmq.model.message import at_time
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from txmq.core.events.base import Place
    from txmq.core.state.state import State

LAST_TICKET = 2**64 - 1
CASCADE = 256  # keys looked at for what one decision may set free; the rest is for the backlog
Spot = tuple[int, int]  # topic id, partition
Key = tuple[int, int, int]  # topic id, partition, key hash


class HeldBatch(NamedTuple):
    """A stored batch without offsets: part of a transaction's row, or a row of table
    `queued`.

    One with a `delay` gets none when its transaction is published (-1 stands for it):
    it waits for its time then.
    """

    topic_id: int
    partition: int
    position: int
    length: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    tag_filter: int
    hashes: tuple[int, ...]
    delay: Delay | None = None


def held(row: Iterable[Any], start: int = 0) -> HeldBatch:
    """A batch as it stands in a row, or in an event whose attachment begins at the
    position `start`.
    """
    topic_id, partition, position, length, count, tag_filter, hashes, *rest = row
    delay = Delay(*rest[0]) if rest and rest[0] is not None else None
    return HeldBatch(
        topic_id, partition, start + position, length, count, tag_filter, hashes, delay
    )


def all_held(rows: Iterable[Iterable[Any]], start: int = 0) -> tuple[HeldBatch, ...]:
    """As `held`, of several."""
    return tuple([held(row, start) for row in rows])


def without_keys(batch: HeldBatch) -> HeldBatch:
    """A batch that is published, and waits for nobody."""
    return batch._replace(hashes=()) if batch.hashes else batch


class Waiting(NamedTuple):
    """Something committed that wants offsets: a transaction (with its token) or a
    queued batch.

    A `large` one comes without its batches: it is published piece by piece.
    """

    ticket: int
    token: bytes | None
    batches: tuple[HeldBatch, ...]
    large: bool = False


def keys_of(batches: Iterable[HeldBatch]) -> Iterable[Key]:
    """Every key of the batches, each once."""
    return dict.fromkeys([(b.topic_id, b.partition, h) for b in batches for h in b.hashes])


def take(
    state: State, ticket: int, token: bytes | None, batches: Iterable[HeldBatch]
) -> dict[Spot, int]:
    """Apply: hold every key of the batches under this ticket; returns how many more it
    holds now by partition.
    """
    table, row = state.tables[t.HOLDS], (token,)
    taken: dict[Spot, int] = {}
    for spot, key in _rows(ticket, batches):
        if table.get(key) is None:
            table.put(key, row)
            taken[spot] = taken.get(spot, 0) + 1
    for spot, count in taken.items():
        state.holds[spot] += count
    return taken


def drop(state: State, ticket: int, batches: Iterable[HeldBatch]) -> dict[Spot, int]:
    """Apply: let go of every key held under this ticket; what never held any is fine.
    Returns how many it held.
    """
    table = state.tables[t.HOLDS]
    dropped: dict[Spot, int] = {}
    for spot, key in _rows(ticket, batches):
        if table.get(key) is not None:
            table.delete(key)
            dropped[spot] = dropped.get(spot, 0) + 1
    for spot, count in dropped.items():
        state.holds[spot] -= count
        if not state.holds[spot]:
            del state.holds[spot]
    return dropped


def _rows(ticket: int, batches: Iterable[HeldBatch]) -> Iterator[tuple[Spot, bytes]]:
    """The keys of the rows of table `holds`; put together by hand, because a part of a
    group has thousands.
    """
    end = ticket.to_bytes(8, "big")
    for batch in batches:
        spot = (batch.topic_id, batch.partition)
        begin = t.PARTITION_KEY.pack(*spot)
        for key in batch.hashes:
            yield spot, begin + (key + t.SIGN).to_bytes(8, "big") + end


def any_held(state: State, topic_id: int, partition: int, hashes: Iterable[int]) -> bool:
    """Whether one of these keys is held by anybody."""
    return any(next(tickets(state, (topic_id, partition, key)), None) for key in hashes)


def meets_a_hold(state: State, batches: Iterable[HeldBatch]) -> bool:
    """Whether something that takes its position only now would have to wait."""
    return any(
        state.holds[b.topic_id, b.partition] and any_held(state, b.topic_id, b.partition, b.hashes)
        for b in batches
    )


def next_holder(state: State, key: Key, ticket: int) -> tuple[int, bytes | None] | None:
    """(ticket, token) of the first who holds a key, but for this one."""
    return next((holder for holder in tickets(state, key) if holder[0] != ticket), None)


def tickets(state: State, key: Key) -> Iterator[tuple[int, bytes | None]]:
    """(ticket, token) of all who hold a key, the earliest first."""
    topic_id, partition, key_hash = key
    first = t.HOLD_KEY.pack(topic_id, partition, key_hash + t.SIGN, 0)
    for row_key, (token,) in state.tables[t.HOLDS].range(
        first, first[:-8] + LAST_TICKET.to_bytes(8, "big")
    ):
        yield t.HOLD_KEY.unpack(row_key)[3], token


class Release:
    """Works out what a decision sets free, without touching the state: offsets and
    order of everything published by it. `later` are those by ticket who may be free,
    too, but are large or too many.
    """

    def __init__(
        self, state: State, committed: Callable[[int, bytes | None], Waiting | None], most: int = 0
    ) -> None:
        """`committed` gives what stands behind a ticket if it is ready to be published
        but for its keys, else None.

        `most` keys are looked at for what is set free, 0 = `CASCADE`.
        """
        self._state = state
        self._left = most or CASCADE
        self._done: set[int] = set()
        self.later: dict[int, bytes | None] = {}
        self._committed = committed
        self._ends: dict[tuple[int, int], int] = {}
        self._gone: set[tuple[Key, int]] = set()
        self._next: list[tuple[int, bytes]] = []
        self._told = 0  # of `later`
        self.released: list[Released] = []

    def offer(self, waiting: Waiting) -> bool:
        """Publish this if nobody is before it on any of its keys, and then whatever
        that sets free. False = it must wait.
        """
        if not self._free(waiting):
            return False
        self._publish(waiting)
        self._cascade()
        return True

    def withdraw(self, waiting: Waiting) -> None:
        """This will never be published: whatever waited only for it is."""
        self._let_go(waiting)
        self._cascade()

    def taken(self) -> tuple[tuple[Released, ...], tuple[tuple[int, bytes | None], ...]]:
        """What was set free since this was last asked, in its order, and (ticket,
        token) of those for the backlog.
        """
        released, self.released = tuple(self.released), []
        later = (
            tuple(sorted(islice(self.later.items(), self._told, None)))
            if len(self.later) > self._told
            else ()
        )
        self._told = len(self.later)
        return released, later

    @property
    def rest(self) -> tuple[tuple[int, bytes | None], ...]:
        """(ticket, token) of those for the backlog, by ticket."""
        return tuple(sorted(self.later.items())) if self.later else ()

    @property
    def exhausted(self) -> bool:
        """Whether it has looked at as much as it may."""
        return self._left <= 0

    def consider(self, ticket: int, token: bytes | None) -> None:
        """Publish this if it is ready and free, and then whatever that sets free."""
        heappush(self._next, (ticket, token or b""))
        self._cascade()

    def publish_now(self, waiting: Waiting) -> None:
        """Publish what holds no keys and meets no holds."""
        self._publish(waiting)

    def _free(self, waiting: Waiting) -> bool:
        return all(self._first(key) in (None, waiting.ticket) for key in keys_of(waiting.batches))

    def _first(self, key: Key) -> int | None:
        holder = self._holder(key)
        return None if holder is None else holder[0]

    def _holder(self, key: Key) -> tuple[int, bytes | None] | None:
        return next((h for h in tickets(self._state, key) if (key, h[0]) not in self._gone), None)

    def _publish(self, waiting: Waiting) -> None:
        offsets = []
        for batch in waiting.batches:
            place = (batch.topic_id, batch.partition)
            if batch.delay is not None:
                offsets.append(-1)
                continue
            base = self._ends.get(place)
            if base is None:
                base = self._state.topics_by_id[batch.topic_id].ends[batch.partition]
            offsets.append(base)
            self._ends[place] = base + batch.count
        self.released.append(Released(waiting.token, waiting.ticket, tuple(offsets)))
        self._done.add(waiting.ticket)
        self._let_go(waiting)

    def _let_go(self, waiting: Waiting) -> None:
        for key in keys_of(waiting.batches):
            self._gone.add((key, waiting.ticket))
            holder = self._holder(key)
            if holder is not None:
                heappush(self._next, (holder[0], holder[1] or b""))

    def _cascade(self) -> None:
        """By ticket, so that the outcome is one and the same wherever it is worked
        out.
        """
        while self._next:
            ticket, token = heappop(self._next)
            while self._next and self._next[0][0] == ticket:
                heappop(self._next)
            if ticket in self._done or ticket in self.later:
                continue
            waiting = self._committed(ticket, token or None)
            if waiting is None:
                self._left -= 1
            elif waiting.large or self._left <= 0:
                self.later[ticket] = token or None
            else:
                self._left -= 1 + sum(len(batch.hashes) for batch in waiting.batches)
                if self._free(waiting):
                    self._publish(waiting)


def publish(state: State, waiting: Waiting, offsets: tuple[int, ...], place: Place) -> None:
    """Apply: make stored batches visible by pointing at them; readers may see them once
    the record at `place` is durable, and no gate is in their way.

    Their time of storing is that of the publication, so that times grow with offsets.
    """
    placed = [
        (batch, base)
        for batch, base in zip(waiting.batches, offsets, strict=True)
        if batch.delay is None
    ]
    if state.gates:
        visibility.spread(
            state, (((batch.topic_id, batch.partition), base) for batch, base in placed)
        )
    for batch, base in placed:
        state.topics_by_id[batch.topic_id].ends[batch.partition] = base + batch.count
        state.dirty_topics.add(batch.topic_id)
        point_at(state, batch, base, place)
    for batch in waiting.batches:
        if batch.delay is not None and waiting.token is not None:
            put_off(state, waiting.token, batch, batch.delay, place)


def put_off(state: State, token: bytes, batch: HeldBatch, delay: Delay, place: Place) -> None:
    """Apply: a message of a transaction that is published now waits for its time; spans
    count from now on.
    """
    carried, sequence, key_hash = delay
    due = max(place.stored_at, at_time(carried, place.stored_at))
    spot = (batch.topic_id, batch.partition)
    delayed.put(
        state,
        due,
        batch.position,
        Delayed(*spot, batch.length, batch.tag_filter, key_hash, token, sequence),
    )


def point_at(state: State, batch: HeldBatch, base: int, place: Place) -> None:
    """Apply: the entry of one batch."""
    state.published.add(batch.topic_id)
    topic = state.topics_by_id[batch.topic_id]
    topic.sizes[batch.partition] += batch.length
    topic.stored += batch.length
    if batch.position < place.end - log_pins.SLACK:
        log_pins.put(state, batch.position, log_pins.ENTRY, batch.topic_id, batch.partition, base)
    state.entries.put(
        t.ENTRY_KEY.pack(batch.topic_id, batch.partition, base),
        t.Entry(
            batch.position, batch.length, batch.count, place.stored_at, batch.tag_filter, place.end
        ),
    )
