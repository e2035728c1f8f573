"""Chunks: round trips, alignment for Arrow, refusal of inconsistent ones."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.batch import encode_columns, verify
from txmq.client.protocol.consumer.fetched import decode_chunk
from txmq.errors import RemoteProtocolError
from txmq.wire.chunks import Chunk, chunk_size, pack_chunks, unpack_chunks

BATCH = encode_columns([b"one", b"two"], producer_id=bytes(16), epoch=0, sequence=0, born_at=0)
CHUNK = Chunk("orders", 3, 100, 5_000, 9_000, 1, 0, -1, 0, 2, BATCH)


def payload_of(*chunks: Chunk, generation: int = 0, next_offset: int = -1) -> bytes:
    return b"".join(pack_chunks(chunks, generation=generation, next_offset=next_offset))


@given(st.lists(our.chunks(), max_size=4), our.U32, st.integers(-1, 1 << 62))
def test_chunks_are_read_back(chunks: list[Chunk], generation: int, next_offset: int) -> None:
    found = unpack_chunks(payload_of(*chunks, generation=generation, next_offset=next_offset))
    assert found == (generation, next_offset, tuple(chunks))
    for chunk in found.chunks:
        verify(chunk.batch)


@given(st.lists(our.chunks(), min_size=1, max_size=4))
def test_every_batch_stands_at_a_multiple_of_eight(chunks: list[Chunk]) -> None:
    at = 0
    for piece in pack_chunks(chunks):
        if piece.startswith(b"TXB1"):
            assert at % 8 == 0
        at += len(piece)
    assert at == 16 + sum(chunk_size(chunk.topic, len(chunk.batch)) for chunk in chunks)


def test_a_chunk_has_the_bytes_of_the_format() -> None:
    expected = struct.pack("<IIq", 1, 7, 102)
    expected += struct.pack("<qqqIHHq", 100, 5_000, 9_000, 3, 1, 0, -1) + b"\x06orders" + b"\0"
    expected += struct.pack("<IIII", len(BATCH), 0, 2, 0) + BATCH
    assert payload_of(CHUNK, generation=7, next_offset=102) == expected


def test_batches_are_passed_on_without_a_copy() -> None:
    assert any(piece is BATCH for piece in pack_chunks([CHUNK]))


def test_every_truncation_and_every_addition_is_refused() -> None:
    whole = payload_of(CHUNK, CHUNK)
    for end in range(len(whole)):
        with pytest.raises(RemoteProtocolError):
            unpack_chunks(whole[:end])
    with pytest.raises(RemoteProtocolError, match="too many"):
        unpack_chunks(whole + b"\0")


@pytest.mark.parametrize(
    "chunk",
    [
        CHUNK._replace(rows=0),
        CHUNK._replace(rows=3),
        CHUNK._replace(first_row=1),
        CHUNK._replace(first_row=2, rows=1),
        CHUNK._replace(first_row=0xFFFFFFFF, rows=1),
        CHUNK._replace(rows=0xFFFFFFFF),
        CHUNK._replace(base_offset=-1),
        CHUNK._replace(stored_at=-1),
        CHUNK._replace(position=-1),
        CHUNK._replace(lease_id=-2),
        CHUNK._replace(flags=16),
        CHUNK._replace(topic="../x"),
        CHUNK._replace(batch=b""),
        CHUNK._replace(batch=BATCH[:-8]),
        CHUNK._replace(batch=BATCH + bytes(8)),
        CHUNK._replace(batch=b"TXB2" + BATCH[4:]),
        CHUNK._replace(batch=BATCH[:12] + b"\0\0\0\x80" + BATCH[16:]),
    ],
)
def test_impossible_chunks_are_refused(chunk: Chunk) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_chunks(payload_of(chunk))


@pytest.mark.parametrize(("count", "next_offset"), [(0xFFFFFFFF, -1), (2, -1), (0, -1), (1, -2)])
def test_inconsistent_heads_are_refused(count: int, next_offset: int) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_chunks(struct.pack("<IIq", count, 0, next_offset) + payload_of(CHUNK)[16:])


def test_missing_batches_are_noticed() -> None:
    whole = bytearray(payload_of(CHUNK))
    whole[-len(BATCH) - 4] = 1
    with pytest.raises(RemoteProtocolError):
        unpack_chunks(bytes(whole))


RUN = CHUNK._replace(
    rows=5, batch=BATCH * 3, further=((len(BATCH), 2, 6_000), (len(BATCH), 2, 7_000))
)


def test_a_run_has_the_bytes_of_the_format() -> None:
    expected = struct.pack("<IIII", len(BATCH) * 3, 0, 5, 2)
    expected += struct.pack("<IIqIIq", len(BATCH), 2, 6_000, len(BATCH), 2, 7_000) + BATCH * 3
    assert payload_of(RUN).endswith(expected)
    assert unpack_chunks(payload_of(RUN)).chunks == (RUN,)


@pytest.mark.parametrize(
    "chunk",
    [
        RUN._replace(rows=7),
        RUN._replace(first_row=2),
        RUN._replace(further=RUN.further[:1]),
        RUN._replace(further=(*RUN.further, (0, 1, 0))),
        RUN._replace(further=(*RUN.further, (0, 0, 0))),
        RUN._replace(further=((len(BATCH) - 8, 2, 6_000), (len(BATCH) + 8, 2, 1))),
        RUN._replace(batch=BATCH * 2),
    ],
)
def test_impossible_runs_are_refused(chunk: Chunk) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_chunk(*unpack_chunks(payload_of(chunk)).chunks)


@pytest.mark.parametrize("at", [0, 8, 9, 10, 11, 12, 16])
def test_a_run_of_other_batches_than_listed_is_refused(at: int) -> None:
    other = BATCH[:at] + bytes([BATCH[at] ^ 0xE8]) + BATCH[at + 1 :]
    with pytest.raises(RemoteProtocolError):
        decode_chunk(RUN._replace(batch=BATCH + other + BATCH))


@given(st.binary(max_size=200))
def test_noise_is_refused_or_empty(noise: bytes) -> None:
    try:
        assert unpack_chunks(noise).chunks == ()
    except RemoteProtocolError:
        return
