"""Chunks as a broker would send them, made without one."""

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
    """A batch of these messages, all of its rows."""
    batch = encode(
        messages, producer_id=PRODUCER, epoch=0, sequence=sequence, born_at=1_000_000, codec=codec
    )
    return Chunk("orders", 3, base_offset, 2_000_000, 4_096, 1, 0, -1, 0, len(messages), batch)
