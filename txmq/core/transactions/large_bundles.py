"""Large bundles: their batches are stored apart from their row, in pieces.

A bundle of several parts, or of one part with more keys than a piece has, is never
rewritten or processed as a whole. Each record about it touches one piece: its keys are
held, its batches get their offsets, or it is dropped.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.topics import key_order
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.state import State
    from txmq.core.topics.key_order import UnplacedBatch

DELAYED = -1  # the offset of a delayed batch, which waits for its time when it is published
# Keys, or batches: 1 to 3 ms to publish where another ticket waits for each key.
KEYS_PER_PIECE = 128


class PiecePhase(IntEnum):
    """The phase of a large bundle; the numbers are in table `transactions`."""

    NONE = 0
    # Committed, of a decider whose bundles hold no keys before. Not needed where no
    # other ticket holds keys in its partitions.
    HOLDING = 1
    CHECKING = 2  # committed: looking for an earlier ticket among its keys
    PUBLISHING = 3
    DROPPING = 4  # rolled back


class LargePartition(NamedTuple):
    """The messages of a large bundle in one partition.

    `base` is the next offset to assign while the bundle is published.
    """

    topic_id: int
    partition: int
    messages: int  # that get offsets with the bundle
    held: int  # keys
    base: int = -1
    delayed: int = 0  # messages that are not among `messages`

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition, by ids."""
        return TopicPartition(self.topic_id, self.partition)


class LargeBundle(NamedTuple):
    """The field of a transaction's row that only large bundles have.

    `done` counts the pieces that are processed in this phase. `begun` is the log
    position at which the publication began, 0 before it.
    """

    pieces: int
    partitions: tuple[LargePartition, ...]
    phase: PiecePhase = PiecePhase.NONE
    done: int = 0
    begun: int = 0

    @property
    def last(self) -> bool:
        """Return whether only the last piece of the phase is left."""
        return self.done + 1 >= self.pieces


NEW = LargeBundle(0, ())


def read_large(row: Any) -> LargeBundle | None:  # noqa: ANN401  # rows are untyped
    """Return the field of a row that was read from disk."""
    if row is None:
        return None
    pieces, partitions, phase, done, *begun = row
    places = tuple(LargePartition._make(one) for one in partitions)
    return LargeBundle(pieces, places, PiecePhase(phase), done, *begun)


def cut_into_pieces(
    batches: Iterable[UnplacedBatch], most: int
) -> Iterator[tuple[UnplacedBatch, ...]]:
    """Yield pieces of at most so many keys or batches.

    A batch with more keys goes on in the next piece, without a length.
    """
    piece: list[UnplacedBatch] = []
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


def add_batches(
    state: State, token: bytes, large: LargeBundle, batches: Iterable[UnplacedBatch], most: int
) -> LargeBundle:
    """Apply: add batches to a bundle."""
    partitions = {one.topic_partition: one for one in large.partitions}
    number = large.pieces
    for number, piece in enumerate(cut_into_pieces(batches, most), large.pieces + 1):
        _put(state, token, number - 1, piece)
        for batch in piece:
            tp = TopicPartition(batch.topic_id, batch.partition)
            one = partitions.get(tp) or LargePartition(*tp, 0, 0)
            if batch.delay is None:
                partitions[tp] = one._replace(messages=one.messages + batch.count)
            else:
                partitions[tp] = one._replace(delayed=one.delayed + batch.count)
    return large._replace(pieces=number, partitions=tuple(partitions.values()))


def add_holds(large: LargeBundle, more: dict[TopicPartition, int]) -> LargeBundle:
    """Return the bundle after it has held, or released (negative), keys by
    partition.
    """
    return large._replace(
        partitions=tuple(
            one._replace(held=one.held + more.get(one.topic_partition, 0))
            for one in large.partitions
        )
    )


def get_piece(state: State, token: bytes, number: int) -> tuple[UnplacedBatch, ...]:
    """Return the batches of one piece."""
    row = state.tables[t.PIECES].get(t.PIECE_KEY.pack(token, number))
    assert row is not None, "the bundle has so many pieces"
    return key_order.unplaced_batches(row[0])


def put_published(
    state: State,
    token: bytes,
    number: int,
    batches: tuple[UnplacedBatch, ...],
    offsets: tuple[int, ...],
) -> None:
    """Apply: replace a piece by what was published where, without keys."""
    published = tuple(batch._replace(hashes=()) for batch in batches if batch.count)
    state.tables[t.PIECES].put(t.PIECE_KEY.pack(token, number), (published, offsets))


def drop_piece(state: State, token: bytes, number: int) -> None:
    """Apply: drop a piece of a bundle that was rolled back."""
    state.tables[t.PIECES].delete(t.PIECE_KEY.pack(token, number))


def every_batch(state: State, token: bytes) -> Iterator[tuple[UnplacedBatch, int | None]]:
    """Yield all batches of a large bundle, with the offsets of published ones."""
    start, stop = t.PIECE_KEY.pack(token, 0), t.PIECE_KEY.pack(token, (1 << 32) - 1)
    whole: UnplacedBatch | None = None
    at: int | None = None
    for _key, (batches, offsets) in state.tables[t.PIECES].range(start, stop):
        given = iter(offsets)
        for batch in map(key_order.unplaced_batch, batches):
            if not batch.count and whole is not None:
                whole = whole._replace(hashes=whole.hashes + batch.hashes)
                continue
            if whole is not None:
                yield whole, at
            whole, at = batch, next(given, None)
            at = None if at == DELAYED else at
    if whole is not None:
        yield whole, at


def _put(state: State, token: bytes, number: int, batches: tuple[UnplacedBatch, ...]) -> None:
    state.tables[t.PIECES].put(t.PIECE_KEY.pack(token, number), (batches, ()))
