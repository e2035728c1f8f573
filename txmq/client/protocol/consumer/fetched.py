"""What a fetch brought, and the messages in it as users see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any, TypeVar

from txmq.batch import BatchView, RunView, read_header
from txmq.model.message import ReceivedMessage
from txmq.wire.chunks import MOVED, Chunk
from txmq.wire.headers import Acked

# What became of a row: nobody has taken it; it is in the user's hands; nacked, which
# the broker has still to confirm; acked by a transaction that is not over; done with;
# any of these three in another parcel, of an earlier delivery.
READY, STARTED, NACKED, LENT, DONE, TWIN = range(6)
MANY, FEW = (
    64,
    8,
)  # messages that are begun together, where they are taken one after the other, and where not
T = TypeVar("T")


def view_of(chunk: Chunk) -> BatchView | RunView:
    """The rows of a chunk's batches. Raises RemoteProtocolError."""
    if not chunk.further:
        return BatchView(chunk.batch)
    lengths, rows, times = zip(*chunk.further, strict=True)
    first = read_header(chunk.batch)
    return RunView(
        chunk.batch, (first.count, *rows), (first.length, *lengths), (chunk.stored_at, *times)
    )


class Parcel:
    """The rows of one chunk, and what became of each. `owner` is the consumer that its
    messages are acked to.

    `stored_at` is the first batch's. `epoch` is the group's when it came; `touched_at`
    when a row was last taken or settled, in the clock's seconds; `since` when rows in
    hand were first seen to be. `whole`: taken as one batch.
    """

    __slots__ = (
        *(
            "_made_to",
            "_messages",
            "_next",
            "_view",
            "attempt",
            "base",
            "end",
            "epoch",
            "lease",
            "left",
            "moved",
        ),
        *(
            "owner",
            "partition",
            "ready",
            "since",
            "size",
            "spot",
            "start",
            "states",
            "stored_at",
            "topic",
        ),
        *("touched_at", "whole"),
    )

    def __init__(self, chunk: Chunk, *, owner: object, epoch: int, now: float) -> None:
        self.topic, self.partition, self.base = chunk.topic, chunk.partition, chunk.base_offset
        self.spot = (chunk.topic, chunk.partition)
        self.start = chunk.base_offset + chunk.first_row
        self.end = self.start + chunk.rows
        self.lease, self.attempt, self.stored_at = chunk.lease_id, chunk.attempt, chunk.stored_at
        self.moved = bool(chunk.flags & MOVED)
        self.size = len(chunk.batch)
        self._view: BatchView | RunView | None = view_of(chunk)
        self.owner, self.epoch, self.touched_at = owner, epoch, now
        self.states = bytearray(chunk.rows)
        self.ready = self.left = chunk.rows
        self.since: dict[int, float] = {}
        self.whole = False
        self._messages: Iterator[DeliveredMessage] = iter(())
        self._next = (
            self._made_to
        ) = -1  # the offset of the next of these, and the one behind their last

    @property
    def view(self) -> BatchView | RunView:
        """The batch, until `release`."""
        assert self._view is not None, "released only when no row is left to take"
        return self._view

    def release(self) -> None:
        """Lets go of the batch: every row was taken, and whoever keeps a message need
        not keep its neighbours.
        """
        self._view = None
        self._messages, self._next, self._made_to = iter(()), -1, -1

    def key(self, offset: int) -> str | None:
        """The key of a message; None after `release`."""
        return None if self._view is None else self._view.keys[offset - self.base]

    def hashes(self) -> Sequence[int | None]:
        """The hash of each row's key."""
        first = self.start - self.base
        return self.view.hashes()[first : first + len(self.states)]

    def state(self, offset: int) -> int:
        """What became of the message at that offset."""
        return self.states[offset - self.start]

    def change(self, start: int, end: int, old: int, new: int) -> int:
        """Rows of these offsets that are in state `old` go to `new`; returns how many
        they are.
        """
        low, high = max(start, self.start) - self.start, min(end, self.end) - self.start
        if low >= high:
            return 0
        count = self.states.count(old, low, high)
        if count:
            self.states[low:high] = self.states[low:high].replace(bytes((old,)), bytes((new,)))
            self.ready -= count if old == READY else 0
            self.left -= count if new == DONE else 0
        return count

    def take(self, offset: int, now: float) -> DeliveredMessage:
        """The message at that offset, which was READY, goes to the user."""
        if offset != self._next or offset == self._made_to:
            self._made_to = min(self.end, offset + (MANY if offset == self._next else FEW))
            self._messages = delivered_messages(self, self.view, offset, self._made_to)
        message = next(self._messages)
        message.parcel = self
        self._next = offset + 1
        self.states[offset - self.start] = STARTED
        self.ready -= 1
        self.touched_at = now
        return message

    def finish(self, offset: int, now: float) -> bool:
        """The message at that offset is done with, if it was in the user's hands;
        whether it was.
        """
        row = offset - self.start
        if self.states[row] != STARTED:
            return False
        self.states[row] = DONE
        self.left -= 1
        self.touched_at = now
        return True

    def runs(self, state: int) -> Iterator[Acked]:
        """The ranges of offsets in that state."""
        at, own = 0, bytes((state,))
        while (low := self.states.find(state, at)) >= 0:
            at = len(self.states) - len(self.states[low:].lstrip(own))
            yield Acked(self.topic, self.partition, self.start + low, self.start + at)

    def offsets(self, state: int) -> Sequence[int]:
        """The offsets in that state."""
        if self.states.count(state) == len(self.states):
            return range(self.start, self.end)
        return [self.start + row for row, found in enumerate(self.states) if found == state]


class DeliveredMessage(ReceivedMessage):
    """A message that knows which delivery it came with."""

    parcel: Parcel

    @property
    def in_hand(self) -> bool:
        """Whether it is in the user's hands, neither acked nor nacked. For any thread:
        this is one look at one byte.
        """
        return self.parcel.state(self.offset) == STARTED

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process is the message alone: the delivery belongs to the
        consumer in this one.
        """
        return ReceivedMessage, tuple(self._replace(headers=dict(self.headers)))


class ReceivedBatch:
    """Messages that came together, as columns: sequences with an element for each,
    decoded at first use.

    They may have been stored one by one; `stored_at` is when the first of them was.
    """

    def __init__(self, parcel: Parcel, offsets: Sequence[int]) -> None:
        self._view = parcel.view
        self.parcel = parcel
        self.offsets = offsets
        self.topic, self.partition = parcel.topic, parcel.partition
        self.attempt, self.stored_at = parcel.attempt, parcel.stored_at

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def bodies(self) -> Sequence[bytes]:
        return self._pick(self._view.bodies)

    @cached_property
    def keys(self) -> Sequence[str | None]:
        return self._pick(self._view.keys)

    @cached_property
    def tags(self) -> Sequence[str | None]:
        return self._pick(self._view.tags)

    @cached_property
    def headers(self) -> Sequence[Mapping[str, str]]:
        return self._pick(self._view.headers)

    @cached_property
    def message_ids(self) -> Sequence[str]:
        return self._pick(self._view.message_ids)

    @cached_property
    def born_at(self) -> Sequence[int]:
        return self._pick(self._view.born_at)

    def messages(self) -> list[ReceivedMessage]:
        """The same one by one; each can be acked and nacked alone."""
        first, last = self.offsets[0], self.offsets[-1]
        messages = list(delivered_messages(self.parcel, self._view, first, last + 1))
        for message in messages:
            message.parcel = self.parcel
        if isinstance(self.offsets, range):
            return [*messages]
        return [messages[offset - first] for offset in self.offsets]

    def _pick(self, column: list[T]) -> Sequence[T]:
        base, offsets = self.parcel.base, self.offsets
        if isinstance(offsets, range):
            return column[offsets.start - base : offsets.stop - base]
        return [column[offset - base] for offset in offsets]


def delivered_messages(
    parcel: Parcel, view: BatchView | RunView, start: int, end: int
) -> Iterator[DeliveredMessage]:
    """The messages of these offsets, each made when it is asked for, and yet without
    its parcel.

    Only the tuple itself is made for each: most consumers take one message after the
    other, and all of them.
    """
    low, high = start - parcel.base, end - parcel.base
    rows = zip(
        *(
            repeat(parcel.topic),
            repeat(parcel.partition),
            range(start, end),
            view.keys[low:high],
            view.tags[low:high],
        ),
        *(
            view.headers[low:high],
            view.bodies[low:high],
            view.message_ids[low:high],
            repeat(parcel.attempt),
        ),
        *(
            view.born_at[low:high],
            view.stored_at[low:high] if isinstance(view, RunView) else repeat(parcel.stored_at),
        ),
        strict=False,
    )
    return map(partial(tuple.__new__, DeliveredMessage), rows)
