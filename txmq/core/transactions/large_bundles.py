"""Large groups: their batches are kept apart from their row, in pieces that one step
can deal with.

A group of several parts, or of one with more keys than a piece has, is never rewritten
or worked on as a whole. Each record about it touches one piece: its keys are taken, its
batches get their offsets, or it is dropped.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.topics import key_order
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.state import State
    from txmq.core.topics.key_order import HeldBatch

DELAYED = -1  # the offset of what is published with its group, but waits for its time
KEYS = 128  # of a piece, or batches: 1 to 3 ms to publish where others wait for each key


class Phase(IntEnum):
    """What is being done with a large group, piece by piece; the numbers are in table
    `transactions`.
    """

    NONE = 0
    # committed, of a kind that takes its keys only now; nothing to do if nobody has any
    # in its partitions
    TAKING = 1
    CHECKING = 2  # committed: looking for an earlier ticket among its keys
    PUBLISHING = 3
    DROPPING = 4  # rolled back


class Share(NamedTuple):
    """What a large group has in one partition. `base` is the next offset to be given
    while it is published.
    """

    topic_id: int
    partition: int
    messages: int  # that get offsets with the group
    held: int
    base: int = -1
    delayed: int = 0  # more of them


class Large(NamedTuple):
    """The part of a transaction's row that only large groups have; `done` counts the
    pieces of the present phase.
    """

    pieces: int
    shares: tuple[Share, ...]
    phase: Phase = Phase.NONE
    done: int = 0

    @property
    def last(self) -> bool:
        """Whether the piece in hand is the last one of the phase."""
        return self.done + 1 >= self.pieces


NEW = Large(0, ())


def of_row(row: tuple[object, ...] | None) -> Large | None:
    """The field as it stands in a row."""
    if row is None:
        return None
    found = Large._make(row)
    return found._replace(
        phase=Phase(found.phase), shares=tuple(Share._make(share) for share in found.shares)
    )


def cut(batches: Iterable[HeldBatch], most: int) -> Iterator[tuple[HeldBatch, ...]]:
    """Pieces of at most so many keys or batches. A batch with more keys goes on in the
    next piece, without a length.
    """
    piece: list[HeldBatch] = []
    room = most
    for batch in batches:
        rest, hashes = batch, batch.hashes
        while True:
            if room <= 0:
                yield tuple(piece)
                piece, room = [], most
            piece.append(rest._replace(hashes=hashes[:room]))
            hashes, room = hashes[room:], room - max(1, len(piece[-1].hashes))
            if not hashes:
                break
            rest = batch._replace(length=0, count=0, tag_filter=0)
    if piece:
        yield tuple(piece)


def add(state: State, token: bytes, large: Large, batches: Iterable[HeldBatch], most: int) -> Large:
    """Apply: more batches of a group."""
    shares = {share[:2]: share for share in large.shares}
    number = large.pieces
    for number, piece in enumerate(cut(batches, most), large.pieces + 1):
        _put(state, token, number - 1, piece)
        for batch in piece:
            spot = (batch.topic_id, batch.partition)
            share = shares.get(spot) or Share(*spot, 0, 0)
            if batch.delay is None:
                shares[spot] = share._replace(messages=share.messages + batch.count)
            else:
                shares[spot] = share._replace(delayed=share.delayed + batch.count)
    return large._replace(pieces=number, shares=tuple(shares.values()))


def held(large: Large, more: dict[tuple[int, int], int]) -> Large:
    """The group once it holds so many keys more, or less, in each partition."""
    return large._replace(
        shares=tuple(s._replace(held=s.held + more.get(s[:2], 0)) for s in large.shares)
    )


def piece(state: State, token: bytes, number: int) -> tuple[HeldBatch, ...]:
    """The batches of one piece."""
    row = state.tables[t.PIECES].get(t.PIECE_KEY.pack(token, number))
    assert row is not None, "it has so many pieces"
    return tuple(key_order.held(batch) for batch in row[0])


def published(
    state: State,
    token: bytes,
    number: int,
    batches: tuple[HeldBatch, ...],
    offsets: tuple[int, ...],
) -> None:
    """Apply: of a published piece is remembered what was published where, but no
    key.
    """
    lean = tuple(batch._replace(hashes=()) for batch in batches if batch.count)
    state.tables[t.PIECES].put(t.PIECE_KEY.pack(token, number), (lean, offsets))


def drop(state: State, token: bytes, number: int) -> None:
    """Apply: nothing of the piece is wanted any more."""
    state.tables[t.PIECES].delete(t.PIECE_KEY.pack(token, number))


def every_batch(state: State, token: bytes) -> Iterator[tuple[HeldBatch, int | None]]:
    """All batches of a large group, and the offsets of those that are published."""
    start, stop = t.PIECE_KEY.pack(token, 0), t.PIECE_KEY.pack(token, (1 << 32) - 1)
    whole: HeldBatch | None = None
    at: int | None = None
    for _key, (batches, offsets) in state.tables[t.PIECES].range(start, stop):
        given = iter(offsets)
        for batch in map(key_order.held, batches):
            if not batch.count and whole is not None:
                whole = whole._replace(hashes=whole.hashes + batch.hashes)
                continue
            if whole is not None:
                yield whole, at
            whole, at = batch, next(given, None)
            at = None if at == DELAYED else at
    if whole is not None:
        yield whole, at


def _put(state: State, token: bytes, number: int, batches: tuple[HeldBatch, ...]) -> None:
    state.tables[t.PIECES].put(t.PIECE_KEY.pack(token, number), (batches, ()))
