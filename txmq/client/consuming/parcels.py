"""What a fetch brought, and the messages in it as users see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from txmq.batch import BatchView, RunView, read_header
from txmq.message import ReceivedMessage
from txmq.wire.chunks import MOVED, Chunk
from txmq.wire.headers import Acked

# What became of a row: nobody has taken it; it is in the user's hands; nacked, which the broker has still to confirm;
# acked by a transaction that is not over; done with; any of these three in another parcel, of an earlier delivery.
READY, STARTED, NACKED, LENT, DONE, TWIN = range(6)
T = TypeVar("T")


def view_of(chunk: Chunk) -> BatchView | RunView:
    """The rows of a chunk's batches. Raises RemoteProtocolError."""
    if not chunk.further:
        return BatchView(chunk.batch)
    lengths, rows, times = zip(*chunk.further, strict=True)
    first = read_header(chunk.batch)
    return RunView(chunk.batch, (first.count, *rows), (first.length, *lengths), (chunk.stored_at, *times))


class Parcel:
    """The rows of one chunk, and what became of each. `owner` is the consumer that its messages are acked to.

    `stored_at` is the first batch's. `epoch` is the group's when it came; `touched_at` when a row was last taken or
    settled, in the clock's seconds; `since` when rows in hand were first seen to be. `whole`: taken as one batch.
    """

    __slots__ = (
        *("_view", "attempt", "base", "end", "epoch", "lease", "left", "moved", "owner", "partition", "ready", "size"),
        *("since", "start", "states", "stored_at", "topic", "touched_at", "whole"),
    )

    def __init__(self, chunk: Chunk, *, owner: object, epoch: int, now: float) -> None:
        self.topic, self.partition, self.base = chunk.topic, chunk.partition, chunk.base_offset
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

    @property
    def spot(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition

    @property
    def view(self) -> BatchView | RunView:
        """The batch, until `release`."""
        assert self._view is not None, "released only when no row is left to take"
        return self._view

    def release(self) -> None:
        """Lets go of the batch: every row was taken, and whoever keeps a message need not keep its neighbours."""
        self._view = None

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
        """Rows of these offsets that are in state `old` go to `new`; returns how many they are."""
        low, high = max(start, self.start) - self.start, min(end, self.end) - self.start
        if low >= high:
            return 0
        count = self.states.count(old, low, high)
        if count:
            self.states[low:high] = self.states[low:high].replace(bytes((old,)), bytes((new,)))
            self.ready -= count if old == READY else 0
            self.left -= count if new == DONE else 0
        return count

    def move(self, offset: int, old: int, new: int) -> bool:
        """As `change`, for one message; whether it was in state `old`."""
        row = offset - self.start
        if self.states[row] != old:
            return False
        self.states[row] = new
        if old == READY:
            self.ready -= 1
        if new == DONE:
            self.left -= 1
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

    def message(self, offset: int) -> DeliveredMessage:
        """The message at that offset."""
        return _message(self, self.view, offset)


class DeliveredMessage(ReceivedMessage):
    """A message that knows which delivery it came with."""

    parcel: Parcel

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process is the message alone: the delivery belongs to the consumer in this one."""
        return ReceivedMessage, tuple(self._replace(headers=dict(self.headers)))


class ReceivedBatch:
    """Messages that came together, as columns: sequences with an element for each, decoded at first use.

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
        return [_message(self.parcel, self._view, offset) for offset in self.offsets]

    def _pick(self, column: list[T]) -> Sequence[T]:
        base, offsets = self.parcel.base, self.offsets
        if isinstance(offsets, range):
            return column[offsets.start - base : offsets.stop - base]
        return [column[offset - base] for offset in offsets]


def _message(parcel: Parcel, view: BatchView | RunView, offset: int) -> DeliveredMessage:
    row = offset - parcel.base
    stored_at = view.stored_at[row] if isinstance(view, RunView) else parcel.stored_at
    message = DeliveredMessage(
        *(parcel.topic, parcel.partition, offset, view.keys[row], view.tags[row], view.headers[row], view.bodies[row]),
        *(view.message_ids[row], parcel.attempt, view.born_at[row], stored_at),
    )
    message.parcel = parcel
    return message
