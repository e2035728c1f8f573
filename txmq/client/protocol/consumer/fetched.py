"""Batches as a fetch brings them, and the messages in them as users see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any, TypeVar

from txmq.batch import BatchView, RunView, read_header
from txmq.model.keys import key_hash
from txmq.model.message import ReceivedMessage
from txmq.wire.chunks import ACCEPTED, REDELIVERY, SUSPECT, Chunk
from txmq.wire.data_requests import AckedRange

# The state of a message of a fetched batch. READY: waits to be received. OUTSTANDING:
# received by the user, neither acked nor nacked. NACKED: the broker has still to
# confirm the nack. IN_TRANSACTION: acked by a transaction that is not over. SETTLED:
# nothing is left to do. DUPLICATE: an earlier delivery of the message, in another
# batch, is OUTSTANDING, NACKED or IN_TRANSACTION.
READY, OUTSTANDING, NACKED, IN_TRANSACTION, SETTLED, DUPLICATE = range(6)
# Messages that are decoded together: where they are received in a row, and elsewhere.
DECODED_IN_A_ROW, DECODED_FIRST = 64, 8
T = TypeVar("T")


def decode_chunk(chunk: Chunk) -> BatchView | RunView:
    """Return the rows of a chunk's batches. Raises RemoteProtocolError."""
    if not chunk.further:
        return BatchView(chunk.batch)
    lengths, rows, times = zip(*chunk.further, strict=True)
    first = read_header(chunk.batch)
    return RunView(
        chunk.batch, (first.count, *rows), (first.length, *lengths), (chunk.stored_at, *times)
    )


class FetchedBatch:
    """The messages of one chunk with the state of each.

    `owner` is the member of this process that settles them. `lease` and `attempt` are
    the delivery's; `topic_id` and the group's `generation` are those that the member
    knew when it fetched. `epoch` is that of all messages; None: `epoch_at` knows each
    one's. `ready` and `unsettled` count messages. `stored_at` is the first batch's.
    `touched_at` is when a message was last received or settled, in the clock's seconds.
    `timed_from` has the start of the consume timeout for each outstanding message.
    `received_whole`: as one batch. `accepted`: the group has taken the messages before,
    so no filter passes them over. `redelivered`: they may have been processed
    before.
    """

    __slots__ = (
        *("_decoded_to", "_messages", "_next", "_rows_of_keys", "_view"),
        *("accepted", "attempt", "base", "end", "epoch"),
        "epoch_at",
        *(
            "generation",
            "later",
            "lease",
            "moved",
            "owner",
            "partition",
            "partition_name",
            "position",
        ),
        *("ready", "received_whole", "redelivered", "size", "start", "states"),
        *("stored_at", "timed_from", "topic", "topic_id", "touched_at", "unsettled"),
    )

    def __init__(
        self,
        chunk: Chunk,
        *,
        owner: object,
        epoch: int | None,
        now: float,
        topic_id: int = 0,
        generation: int = 0,
        epoch_at: Callable[[int], int] | None = None,
    ) -> None:
        self.topic, self.partition, self.base = chunk.topic, chunk.partition, chunk.base_offset
        self.partition_name = (chunk.topic, chunk.partition)
        self.start = chunk.base_offset + chunk.first_row
        self.end = self.start + chunk.rows
        self.lease, self.attempt, self.stored_at = chunk.lease_id, chunk.attempt, chunk.stored_at
        self.moved = bool(chunk.flags & REDELIVERY)
        self.redelivered = bool(chunk.flags & (REDELIVERY | SUSPECT))
        self.accepted = bool(chunk.flags & ACCEPTED)
        self.size = len(chunk.batch)
        self._view: BatchView | RunView | None = decode_chunk(chunk)
        self.owner, self.epoch, self.touched_at = owner, epoch, now
        self.topic_id, self.generation, self.epoch_at = topic_id, generation, epoch_at
        self.position: Any = None  # what an inbox knows the partition by, once it was asked
        self.states = bytearray(chunk.rows)
        self.ready = self.unsettled = chunk.rows
        self.timed_from: dict[int, float] = {}
        self.later: dict[int, int] = {}  # the generation of a message's later delivery
        self.received_whole = False
        self._messages: Iterator[DeliveredMessage] = iter(())
        self._next = self._decoded_to = -1  # offsets of the next of `_messages`, and of their end
        self._rows_of_keys: dict[int, list[int]] | None = None  # by hash, when it was asked for

    @property
    def view(self) -> BatchView | RunView:
        """The batch, until `release`."""
        assert self._view is not None, "released only when no message is ready"
        return self._view

    def release(self) -> None:
        """Drop the bytes of the batch: no message is ready any more.

        A user who keeps a message need not keep its neighbours in memory.
        """
        self._view = None
        self._messages, self._next, self._decoded_to = iter(()), -1, -1

    def key(self, offset: int) -> str | None:
        """Return the key of a message; None after `release`."""
        return None if self._view is None else self._view.keys[offset - self.base]

    def key_hash(self, offset: int) -> int | None:
        """Return the hash of a message's key; None = it has none."""
        key = self.view.keys[offset - self.base]
        return None if key is None else key_hash(key)

    def with_key(self, wanted: int, *states: int) -> list[int]:
        """Return the offsets in these states of messages whose keys have this hash.

        All keys are hashed at the first call: each message that fails asks for its key.
        """
        if self._rows_of_keys is None:
            self._rows_of_keys = {}
            first = self.start - self.base
            hashes = self.view.key_hashes()[first : first + len(self.states)]
            for row, found in enumerate(hashes):
                if found is not None:
                    self._rows_of_keys.setdefault(found, []).append(row)
        rows = self._rows_of_keys.get(wanted, ())
        return [self.start + row for row in rows if self.states[row] in states]

    def state(self, offset: int) -> int:
        """Return the state of the message at that offset."""
        return self.states[offset - self.start]

    def generation_of(self, offset: int) -> int:
        """Return the generation of the message's last delivery."""
        return self.later.get(offset, self.generation)

    def change(self, start: int, end: int, old: int, new: int) -> int:
        """Change messages of these offsets from state `old` to `new`; return their
        number.
        """
        low, high = self._rows(start, end)
        count = self.count(start, end, old)
        if count:
            self.states[low:high] = self.states[low:high].replace(bytes((old,)), bytes((new,)))
            self.ready += count * ((new == READY) - (old == READY))
            self.unsettled -= count if new == SETTLED else 0
        return count

    def count(self, start: int, end: int, state: int) -> int:
        """Return the number of messages of these offsets in that state."""
        low, high = self._rows(start, end)
        return self.states.count(state, low, high) if low < high else 0

    def _rows(self, start: int, end: int) -> tuple[int, int]:
        return max(start, self.start) - self.start, min(end, self.end) - self.start

    def deliver(self, offset: int, now: float) -> DeliveredMessage:
        """Return the message at that offset, which was READY and is OUTSTANDING now."""
        if offset != self._next or offset == self._decoded_to:
            ahead = DECODED_IN_A_ROW if offset == self._next else DECODED_FIRST
            self._decoded_to = min(self.end, offset + ahead)
            self._messages = build_messages(self, self.view, offset, self._decoded_to)
        message = next(self._messages)
        message.fetched = self
        self._next = offset + 1
        self.states[offset - self.start] = OUTSTANDING
        self.ready -= 1
        self.touched_at = now
        return message

    def settle(self, offset: int, now: float) -> bool:
        """Settle the message at that offset; return whether it was outstanding."""
        row = offset - self.start
        if self.states[row] != OUTSTANDING:
            return False
        self.states[row] = SETTLED
        self.unsettled -= 1
        self.touched_at = now
        return True

    def ranges(self, state: int) -> Iterator[AckedRange]:
        """Return the ranges of offsets in that state."""
        at, own = 0, bytes((state,))
        while (low := self.states.find(state, at)) >= 0:
            at = len(self.states) - len(self.states[low:].lstrip(own))
            yield AckedRange(self.topic, self.partition, self.start + low, self.start + at)

    def offsets(self, state: int) -> Sequence[int]:
        """Return the offsets in that state."""
        if self.states.count(state) == len(self.states):
            return range(self.start, self.end)
        return [self.start + row for row, present in enumerate(self.states) if present == state]


class DeliveredMessage(ReceivedMessage):
    """A message with the batch that it was fetched in.

    `value`: of a typed topic, the body as its model reads it.
    """

    fetched: FetchedBatch
    value: Any = None

    @property
    def in_hand(self) -> bool:
        """True if the message is outstanding: neither acked nor nacked.

        Any thread may ask: this reads one byte.
        """
        return self.fetched.state(self.offset) == OUTSTANDING

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message alone: its delivery belongs to the consumer in this
        process.
        """
        return ReceivedMessage, tuple(self._replace(headers=dict(self.headers)))


class ReceivedBatch:
    """Messages that were delivered together, as columns.

    Each column is a sequence with an element for each message, decoded at first use.
    The messages may have been stored one by one; `stored_at` is the first one's.
    """

    def __init__(self, fetched: FetchedBatch, offsets: Sequence[int]) -> None:
        self._view = fetched.view
        self.fetched = fetched  # for the consumer's own use
        self.offsets = offsets
        self.topic, self.partition = fetched.topic, fetched.partition
        self.attempt, self.stored_at = fetched.attempt, fetched.stored_at
        self.values: Sequence[Any] = ()  # of a typed topic: the bodies as its model reads them

    def keep(self, offsets: Sequence[int], values: Sequence[Any]) -> None:
        """Keep the messages at these offsets, which have these values."""
        ranged = range(offsets[0], offsets[-1] + 1)
        self.offsets = ranged if len(ranged) == len(offsets) else offsets
        self.values = values

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def bodies(self) -> Sequence[bytes]:
        return self._selected(self._view.bodies)

    @cached_property
    def keys(self) -> Sequence[str | None]:
        return self._selected(self._view.keys)

    @cached_property
    def tags(self) -> Sequence[str | None]:
        return self._selected(self._view.tags)

    @cached_property
    def headers(self) -> Sequence[Mapping[str, str]]:
        return self._selected(self._view.headers)

    @cached_property
    def message_ids(self) -> Sequence[str]:
        return self._selected(self._view.message_ids)

    @cached_property
    def born_at(self) -> Sequence[int]:
        return self._selected(self._view.born_at)

    def messages(self) -> list[DeliveredMessage]:
        """Return the messages one by one; each can be acked and nacked alone."""
        first, last = self.offsets[0], self.offsets[-1]
        messages = list(build_messages(self.fetched, self._view, first, last + 1))
        for message in messages:
            message.fetched = self.fetched
        if not isinstance(self.offsets, range):
            messages = [messages[offset - first] for offset in self.offsets]
        for message, value in zip(messages, self.values, strict=False):
            message.value = value
        return messages

    def _selected(self, column: list[T]) -> Sequence[T]:
        base, offsets = self.fetched.base, self.offsets
        if isinstance(offsets, range):
            return column[offsets.start - base : offsets.stop - base]
        return [column[offset - base] for offset in offsets]


def owner_of(delivered: object) -> object | None:
    """Return the member that a message or batch was delivered to; None for others."""
    return getattr(getattr(delivered, "fetched", None), "owner", None)


def build_messages(
    fetched: FetchedBatch, view: BatchView | RunView, start: int, end: int
) -> Iterator[DeliveredMessage]:
    """Return the messages of these offsets, each made on demand, and yet without
    `fetched`.

    Only the tuple itself is made for each message: most consumers receive one message
    after the other, and all of them.
    """
    low, high = start - fetched.base, end - fetched.base
    rows = zip(
        *(
            repeat(fetched.topic),
            repeat(fetched.partition),
            range(start, end),
            view.keys[low:high],
            view.tags[low:high],
        ),
        *(
            view.headers[low:high],
            view.bodies[low:high],
            view.message_ids[low:high],
            repeat(fetched.attempt),
        ),
        *(
            view.born_at[low:high],
            view.stored_at[low:high] if isinstance(view, RunView) else repeat(fetched.stored_at),
        ),
        strict=False,
    )
    return map(partial(tuple.__new__, DeliveredMessage), rows)
