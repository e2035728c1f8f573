"""Columns, sent with the Twisted face: many pieces under way at once, in producing
sessions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import deferLater

from txmq.client.blocking.sender.delivery import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Piece,
    Stored,
    cut,
    receipt_of,
)
from txmq.client.blocking.sender.producer import StoredBatch, stored_batch
from txmq.client.protocol.sender.rows import Rows
from txmq.client.twisted.core import Core
from txmq.errors import StaleTopic, Throttled, TxmqError
from txmq.wire.headers import Opcode, send_header

PIECES_AHEAD = 32  # of one call under way: the broker remembers the receipts of 256


async def send_columns(
    core: Core, topic: str, rows: Rows, partition: int | None
) -> list[StoredBatch]:
    """What `send_many` does."""
    await core.shape(topic)
    todo = list(cut(core.topics, topic, rows, partition, range(len(rows))))
    stored: list[StoredBatch] = []
    pause = FIRST_PAUSE_S
    while todo:
        done, error = await _send_pieces(core, todo[:PIECES_AHEAD])
        stored += map(stored_batch, done)
        del todo[: len(done)]
        if isinstance(error, Throttled) and pause < LONGEST_PAUSE_S:
            await deferLater(core.reactor, pause)
            pause *= 2
        elif isinstance(error, StaleTopic):
            await core.refresh(topic)
            todo = [
                new
                for old in todo
                for new in cut(core.topics, topic, old.rows, old.asked, old.places)
            ]
        elif error is not None:
            if stored:  # sent again as a whole, these would be there twice
                error.outcome = "unknown"
            raise error
    return stored


async def _send_pieces(
    core: Core, pieces: Sequence[Piece]
) -> tuple[list[Stored], TxmqError | None]:
    """One producing session: what is stored, and why the rest, if any, is not, or not
    known to be.
    """
    producer, sequence = uuid4().bytes, 0
    replies: list[Deferred[bytes]] = []
    sequences: list[int] = []
    for piece in pieces:
        header = send_header(piece.topic, piece.partition, piece.epoch)
        batch = piece.rows.encode(producer, sequence, core.topics.compression)
        replies.append(Deferred.fromCoroutine(core.carried(Opcode.SEND, (header, batch))))
        sequences.append(sequence)
        sequence += len(piece.rows)
    stored: list[Stored] = []
    answers: list[tuple[bool, Any]] = await DeferredList(replies, consumeErrors=True)
    for piece, first, (is_there, answer) in zip(pieces, sequences, answers, strict=True):
        if not is_there:  # nor is any behind it: a session has no gaps
            return stored, answer.value
        stored.append(Stored(piece, f"{producer.hex()}-", first, receipt_of(answer)))
    return stored, None
