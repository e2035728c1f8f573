"""Chunks as a broker sends them, made without a broker."""

from __future__ import annotations

from collections.abc import Sequence

from txmq.batch import Codec, encode
from txmq.model.message import Message
from txmq.wire.chunks import Chunk

PRODUCER = bytes(range(16))


def chunk(
    messages: Sequence[Message],
    base_offset: int = 0,
    *,
    codec: Codec = Codec.NONE,
    sequence: int = 0,
) -> Chunk:
    """Return a chunk with all rows of a batch of these messages."""
    batch = encode(
        messages, producer_id=PRODUCER, epoch=0, sequence=sequence, born_at=1_000_000, codec=codec
    )
    return Chunk("orders", 3, base_offset, 2_000_000, 4_096, 1, 0, -1, 0, len(messages), batch)
