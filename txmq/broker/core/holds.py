"""Order tickets: who waits for whom, key by key.

A half message has no offset, but a place in the order of its keys: its ticket, the log position at which it was
stored. A table row (topic, partition, key hash, ticket) says that the key is held. What is decided may be published
only when, for each of its keys, no earlier ticket is left; a plain batch that meets a held key takes a ticket too and
waits as if it were committed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.core import tables as t
from txmq.broker.core.events import Released

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from txmq.broker.core.events import Place
    from txmq.broker.core.state import State

LAST_TICKET = 2**64 - 1
Key = tuple[int, int, int]  # topic id, partition, key hash


class HeldBatch(NamedTuple):
    """A stored batch without offsets: part of a transaction's row, or a row of table `queued`."""

    topic_id: int
    partition: int
    position: int
    length: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    tag_filter: int
    hashes: tuple[int, ...]


class Waiting(NamedTuple):
    """Something committed that wants offsets: a transaction (with its token) or a queued batch."""

    ticket: int
    token: bytes | None
    batches: tuple[HeldBatch, ...]


def keys_of(batches: Iterable[HeldBatch]) -> Iterator[Key]:
    """Every key of the batches, each once."""
    return iter(dict.fromkeys((b.topic_id, b.partition, h) for b in batches for h in b.hashes))


def take(state: State, ticket: int, token: bytes | None, batches: Iterable[HeldBatch]) -> None:
    """Apply: hold every key of the batches under this ticket."""
    table = state.tables[t.HOLDS]
    for topic_id, partition, key in keys_of(batches):
        table.put(t.HOLD_KEY.pack(topic_id, partition, key + t.SIGN, ticket), (token,))
        state.holds[topic_id, partition] += 1


def drop(state: State, ticket: int, batches: Iterable[HeldBatch]) -> None:
    """Apply: let go of every key held under this ticket; what never held any is fine."""
    table = state.tables[t.HOLDS]
    for topic_id, partition, key in keys_of(batches):
        row_key = t.HOLD_KEY.pack(topic_id, partition, key + t.SIGN, ticket)
        if table.get(row_key) is None:
            continue
        table.delete(row_key)
        state.holds[topic_id, partition] -= 1
        if not state.holds[topic_id, partition]:
            del state.holds[topic_id, partition]


def any_held(state: State, topic_id: int, partition: int, hashes: Iterable[int]) -> bool:
    """Whether one of these keys is held by anybody."""
    return any(next(tickets(state, (topic_id, partition, key)), None) for key in hashes)


def meets_a_hold(state: State, batches: Iterable[HeldBatch]) -> bool:
    """Whether something that takes its position only now would have to wait."""
    return any(
        state.holds[b.topic_id, b.partition] and any_held(state, b.topic_id, b.partition, b.hashes) for b in batches
    )


def tickets(state: State, key: Key) -> Iterator[tuple[int, bytes | None]]:
    """(ticket, token) of all who hold a key, the earliest first."""
    topic_id, partition, key_hash = key
    first = t.HOLD_KEY.pack(topic_id, partition, key_hash + t.SIGN, 0)
    for row_key, (token,) in state.tables[t.HOLDS].range(first, first[:-8] + LAST_TICKET.to_bytes(8, "big")):
        yield t.HOLD_KEY.unpack(row_key)[3], token


class Release:
    """Works out what a decision sets free, without touching the state: offsets and order of everything published by
    it.
    """

    def __init__(self, state: State, committed: Callable[[int, bytes | None], Waiting | None]) -> None:
        """`committed` gives what stands behind a ticket if it is ready to be published but for its keys, else None."""
        self._state = state
        self._committed = committed
        self._ends: dict[tuple[int, int], int] = {}
        self._gone: set[tuple[Key, int]] = set()
        self._next: list[tuple[int, bytes]] = []
        self.released: list[Released] = []

    def offer(self, waiting: Waiting) -> bool:
        """Publish this if nobody is before it on any of its keys, and then whatever that sets free. False = it must
        wait.
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
            base = self._ends.get(place)
            if base is None:
                base = self._state.topics_by_id[batch.topic_id].ends[batch.partition]
            offsets.append(base)
            self._ends[place] = base + batch.count
        self.released.append(Released(waiting.token, waiting.ticket, tuple(offsets)))
        self._let_go(waiting)

    def _let_go(self, waiting: Waiting) -> None:
        for key in keys_of(waiting.batches):
            self._gone.add((key, waiting.ticket))
            holder = self._holder(key)
            if holder is not None:
                heappush(self._next, (holder[0], holder[1] or b""))

    def _cascade(self) -> None:
        """By ticket, so that the outcome is one and the same wherever it is worked out."""
        done = {released.ticket for released in self.released}
        while self._next:
            ticket, token = heappop(self._next)
            if ticket in done:
                continue
            waiting = self._committed(ticket, token or None)
            if waiting is not None and self._free(waiting):
                done.add(ticket)
                self._publish(waiting)


def publish(state: State, waiting: Waiting, offsets: tuple[int, ...], place: Place) -> None:
    """Apply: make stored batches visible by pointing at them; readers may see them once the record at `place` is
    durable.

    Their time of storing is that of the publication, so that times grow with offsets.
    """
    for batch, base in zip(waiting.batches, offsets, strict=True):
        state.topics_by_id[batch.topic_id].ends[batch.partition] = base + batch.count
        state.dirty_topics.add(batch.topic_id)
        state.published.add(batch.topic_id)
        state.entries.put(
            t.ENTRY_KEY.pack(batch.topic_id, batch.partition, base),
            t.Entry(batch.position, batch.length, batch.count, place.stored_at, batch.tag_filter, place.end),
        )
