"""Order tickets: the order of undecided transactions, key by key.

A half message has no offset yet, but a place in the order of its keys. Its ticket is
the log position at which it was stored, and a row of table `holds` (topic, partition,
key hash, ticket) says that the ticket holds the key. A committed transaction is
published once no earlier ticket holds any of its keys. A plain batch that meets a held
key takes a ticket too, and waits as a committed transaction does.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.delays import Delay
from txmq.core.events.transactions import Released
from txmq.core.state import log_pins, visibility
from txmq.core.topics import delayed, lost_batches
from txmq.core.topics.delayed import DelayedMessage
from txmq.model.message import duration_of, resolve_time
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

MAX_TICKET = 2**64 - 1
# Keys that one decision may examine for publications; the rest is for the backlog.
MAX_KEYS_PER_RELEASE = 256
OrderKey = tuple[int, int, int]  # topic id, partition, key hash
Holder = tuple[int, bytes | None]  # ticket and token of a transaction; no token = a queued batch


class UnplacedBatch(NamedTuple):
    """A stored batch without offsets: part of a transaction's row, or a row of table
    `queued`.

    A batch with a `delay` gets no offsets when its transaction is published, only -1:
    from then on its single message waits for its time.
    """

    topic_id: int
    partition: int
    position: int
    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    tag_filter: int
    hashes: tuple[int, ...]
    delay: Delay | None = None


def unplaced_batch(row: Iterable[Any], start: int = 0) -> UnplacedBatch:
    """Return the batch of a row, or of an event whose attachment begins at `start`."""
    topic_id, partition, position, length, count, tag_filter, hashes, delay = row
    return UnplacedBatch(
        *(topic_id, partition, start + position, length, count, tag_filter, hashes),
        None if delay is None else Delay(*delay),
    )


def unplaced_batches(rows: Iterable[Iterable[Any]], start: int = 0) -> tuple[UnplacedBatch, ...]:
    """Return the batches of rows, or of an event whose attachment begins at `start`."""
    return tuple([unplaced_batch(row, start) for row in rows])


def without_keys(batches: Iterable[UnplacedBatch]) -> tuple[UnplacedBatch, ...]:
    """Return published batches without their keys: nothing orders them any more."""
    return tuple([batch._replace(hashes=()) if batch.hashes else batch for batch in batches])


class Publishable(NamedTuple):
    """A committed transaction, or a queued batch (no token), that wants offsets.

    A `large` transaction comes without its batches: it is published piece by piece.
    """

    ticket: int
    token: bytes | None
    batches: tuple[UnplacedBatch, ...]
    large: bool = False


def keys_of(batches: Iterable[UnplacedBatch]) -> Iterable[OrderKey]:
    """Return every key of the batches once."""
    return dict.fromkeys([(b.topic_id, b.partition, h) for b in batches for h in b.hashes])


def hold_keys(
    state: State, ticket: int, token: bytes | None, batches: Iterable[UnplacedBatch]
) -> dict[TopicPartition, int]:
    """Apply: let a ticket hold every key of the batches.

    Return by partition how many keys it did not hold before.
    """
    table, row = state.tables[t.HOLDS], (token,)
    added: dict[TopicPartition, int] = {}
    for tp, key in _rows(ticket, batches):
        if table.get(key) is None:
            table.put(key, row)
            added[tp] = added.get(tp, 0) + 1
    for tp, count in added.items():
        state.held_keys[tp] += count
    return added


def release_keys(
    state: State, ticket: int, batches: Iterable[UnplacedBatch]
) -> dict[TopicPartition, int]:
    """Apply: release every key of the batches that a ticket holds.

    Return by partition how many keys it held.
    """
    table = state.tables[t.HOLDS]
    released: dict[TopicPartition, int] = {}
    for tp, key in _rows(ticket, batches):
        if table.get(key) is not None:
            table.delete(key)
            released[tp] = released.get(tp, 0) + 1
    for tp, count in released.items():
        state.held_keys[tp] -= count
        if not state.held_keys[tp]:
            del state.held_keys[tp]
    return released


def _rows(ticket: int, batches: Iterable[UnplacedBatch]) -> Iterator[tuple[TopicPartition, bytes]]:
    # Packed by hand: a part of a bundle has thousands of keys.
    end = ticket.to_bytes(8, "big")
    for batch in batches:
        tp = TopicPartition(batch.topic_id, batch.partition)
        begin = t.PARTITION_KEY.pack(*tp)
        for key in batch.hashes:
            yield tp, begin + (key + t.SIGN).to_bytes(8, "big") + end


def any_held(state: State, topic_id: int, partition: int, hashes: Iterable[int]) -> bool:
    """Return whether any ticket holds one of these keys."""
    return any(next(holders(state, (topic_id, partition, key)), None) for key in hashes)


def meets_held_key(state: State, batches: Iterable[UnplacedBatch]) -> bool:
    """Return whether any ticket holds a key of the batches.

    Then a bundle that takes its place in the order only now has to wait.
    """
    return bool(state.held_keys) and any(
        state.held_keys[tp] and any_held(state, *tp, batch.hashes)
        for batch in batches
        for tp in (TopicPartition(batch.topic_id, batch.partition),)
    )


def next_holder(state: State, key: OrderKey, ticket: int) -> Holder | None:
    """Return the first holder of a key apart from `ticket`."""
    return next((holder for holder in holders(state, key) if holder[0] != ticket), None)


def holders(state: State, key: OrderKey) -> Iterator[Holder]:
    """Yield all holders of a key, the earliest first."""
    topic_id, partition, key_hash = key
    first = t.HOLD_KEY.pack(topic_id, partition, key_hash + t.SIGN, 0)
    for row_key, (token,) in state.tables[t.HOLDS].range(
        first, first[:-8] + MAX_TICKET.to_bytes(8, "big")
    ):
        yield t.HOLD_KEY.unpack(row_key)[3], token


class ReleasePlan:
    """The publications that a decision makes possible, in their order, with offsets.

    The plan reads the state and does not change it. Tickets that may be free as well,
    but are large or too many, are left to the backlog.
    """

    def __init__(
        self, state: State, find: Callable[[int, bytes | None], Publishable | None]
    ) -> None:
        """`find` returns the unit behind a ticket and token if it is committed."""
        self._state, self._find = state, find
        self._left = MAX_KEYS_PER_RELEASE
        self._published: set[int] = set()
        self._later: dict[int, bytes | None] = {}
        self._drained = 0  # of `_later`
        self._ends: dict[TopicPartition, int] = {}
        self._gone: set[tuple[OrderKey, int]] = set()
        self._next: list[tuple[int, bytes]] = []
        self._released: list[Released] = []

    def publish_if_free(self, unit: Publishable) -> bool:
        """Publish a unit if no earlier ticket holds its keys, then units that waited
        for it.

        Return False if it has to wait.
        """
        followers = self._followers_if_free(unit)
        if followers is None:
            return False
        self._publish(unit, followers)
        self._cascade()
        return True

    def publish_unordered(self, unit: Publishable) -> None:
        """Publish a unit that holds no keys and meets no held key."""
        self._publish(unit, {})

    def withdraw(self, unit: Publishable) -> None:
        """Drop a unit that will never be published; publish units that waited for
        it.
        """
        followers: dict[OrderKey, Holder | None] = {}
        for key in keys_of(unit.batches):
            others = (holder for holder in self._holders(key) if holder[0] != unit.ticket)
            followers[key] = next(others, None)
        self._release_keys(unit.ticket, followers)
        self._cascade()

    def consider(self, ticket: int, token: bytes | None) -> None:
        """Publish a unit if it is committed and free, then units that waited for it."""
        heappush(self._next, (ticket, token or b""))
        self._cascade()

    def drain(self) -> tuple[tuple[Released, ...], tuple[Holder, ...]]:
        """Return the publications, and the holders for the backlog, since the last
        call.
        """
        released, self._released = tuple(self._released), []
        if len(self._later) == self._drained:
            return released, ()
        later = sorted(islice(self._later.items(), self._drained, None))
        self._drained = len(self._later)
        return released, tuple(later)

    @property
    def exhausted(self) -> bool:
        """Return whether the plan has examined as many keys as it may."""
        return self._left <= 0

    def _holders(self, key: OrderKey) -> Iterator[Holder]:
        return (h for h in holders(self._state, key) if (key, h[0]) not in self._gone)

    def _followers_if_free(self, unit: Publishable) -> dict[OrderKey, Holder | None] | None:
        """Return the next holder of each key; None if an earlier one holds any of
        them.
        """
        followers: dict[OrderKey, Holder | None] = {}
        for key in keys_of(unit.batches):
            found = self._holders(key)
            first = next(found, None)
            if first is not None and first[0] != unit.ticket:
                return None
            followers[key] = None if first is None else next(found, None)
        return followers

    def _publish(self, unit: Publishable, followers: dict[OrderKey, Holder | None]) -> None:
        offsets = []
        for batch in unit.batches:
            tp = TopicPartition(batch.topic_id, batch.partition)
            if batch.delay is not None:
                offsets.append(-1)
                continue
            base = self._ends.get(tp)
            if base is None:
                base = self._state.topics_by_id[batch.topic_id].end_offsets[batch.partition]
            offsets.append(base)
            self._ends[tp] = base + batch.count
        self._released.append(Released(unit.token, unit.ticket, tuple(offsets)))
        self._published.add(unit.ticket)
        self._release_keys(unit.ticket, followers)

    def _release_keys(self, ticket: int, followers: dict[OrderKey, Holder | None]) -> None:
        for key, holder in followers.items():
            self._gone.add((key, ticket))
            if holder is not None:
                heappush(self._next, (holder[0], holder[1] or b""))

    def _cascade(self) -> None:
        # In the order of tickets: every replica of the log then plans the same.
        while self._next:
            ticket, token = heappop(self._next)
            while self._next and self._next[0][0] == ticket:
                heappop(self._next)
            if ticket in self._published or ticket in self._later:
                continue
            unit = self._find(ticket, token or None)
            if unit is None:
                self._left -= 1
            elif unit.large or self._left <= 0:
                self._later[ticket] = token or None
            else:
                self._left -= 1 + sum(len(batch.hashes) for batch in unit.batches)
                followers = self._followers_if_free(unit)
                if followers is not None:
                    self._publish(unit, followers)


def publish(
    state: State, unit: Publishable, offsets: tuple[int, ...], context: RecordContext
) -> None:
    """Apply: make stored batches visible by index entries that point at them.

    Readers may see them once the record at `context` is durable, and no visibility
    barrier stops them. Their time of storing becomes that of the publication, so that
    times grow with offsets.
    """
    placed = [
        (batch, base)
        for batch, base in zip(unit.batches, offsets, strict=True)
        if batch.delay is None
    ]
    if state.barriers:
        visibility.extend(
            state,
            ((TopicPartition(batch.topic_id, batch.partition), base) for batch, base in placed),
        )
    for batch, base in placed:
        topic = state.topics_by_id[batch.topic_id]
        lost_batches.move_end(state, topic, batch.partition, base, batch.count, context)
        publish_batch(state, batch, base, context)
    for batch in unit.batches:
        if batch.delay is not None and unit.token is not None:
            delay_message(state, unit.token, batch, batch.delay, context)


def delay_message(
    state: State, token: bytes, batch: UnplacedBatch, delay: Delay, context: RecordContext
) -> None:
    """Apply: let a message of a transaction that is published now wait for its time.

    A delay given as a duration counts from now on.
    """
    carried, sequence, key_hash = delay
    due = max(context.stored_at, resolve_time(carried, context.stored_at))
    tp = TopicPartition(batch.topic_id, batch.partition)
    delayed.put(
        state,
        due,
        batch.position,
        DelayedMessage(
            *(*tp, batch.length, batch.tag_filter, key_hash, token, sequence),
            duration=duration_of(carried),
        ),
    )


def publish_batch(state: State, batch: UnplacedBatch, base: int, context: RecordContext) -> None:
    """Apply: add the index entry of one batch."""
    state.topics_with_new_entries.add(batch.topic_id)
    topic = state.topics_by_id[batch.topic_id]
    length = 0 if lost_batches.is_given_up(state, batch.position) else batch.length
    topic.partition_bytes[batch.partition] += length
    state.dirty_topics.add(batch.topic_id)
    topic.published_bytes += length
    if length and batch.position < context.end - log_pins.SLACK_BYTES:
        log_pins.put(
            state, batch.position, log_pins.PUBLISHED_BATCH, batch.topic_id, batch.partition, base
        )
    state.entries.put(
        t.ENTRY_KEY.pack(batch.topic_id, batch.partition, base),
        t.BatchEntry(
            batch.position,
            length,
            batch.count,
            context.stored_at,
            batch.tag_filter if length else 0,
            context.end,
        ),
    )
