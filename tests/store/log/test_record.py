"""Encoding and decoding of records, with every kind of fault."""

from __future__ import annotations

from pathlib import Path
from struct import pack_into

import pytest
from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st

from txmq.store.log.record import (
    HEADER_SIZE,
    LOST,
    MAX_BODY,
    Record,
    RecordFault,
    decode,
    encode_start,
    needed_size,
    record_size,
    split_body,
    start_size,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "record-v1.bin"
I64 = st.integers(-(2**63), 2**63 - 1)
POSITION = 4160


def encode(position: int, head: bytes, attachment: bytes = b"", *, kind: int = 7) -> bytes:
    start = encode_start(kind, position, 3, position - 96, 1_700_000_000_000_001, head, attachment)
    return start + attachment + bytes(-len(attachment) % 8)


def resealed(data: bytes) -> bytes:
    """Return the record with a checksum that fits its bytes."""
    length = int.from_bytes(data[12:16], "little")
    sealed = bytearray(data)
    pack_into("<I", sealed, 4, value(data[8 : HEADER_SIZE + length]))
    return bytes(sealed)


@given(
    kind=st.integers(0, 255),
    position=st.integers(0, 2**60 - 1).map(lambda n: n * 8),
    epoch=st.integers(0, 2**32 - 1),
    durable_before=I64,
    stored_at=I64,
    head=st.binary(max_size=40),
    attachment=st.binary(max_size=40),
)
def test_every_field_comes_back(
    kind: int,
    position: int,
    epoch: int,
    durable_before: int,
    stored_at: int,
    head: bytes,
    attachment: bytes,
) -> None:
    start = encode_start(kind, position, epoch, durable_before, stored_at, head, attachment)
    data = b"before" + start + attachment + bytes(-len(attachment) % 8) + b"after"
    record = decode(data, 6, position)
    assert isinstance(record, Record)
    assert record[:5] == (kind, position, epoch, durable_before, stored_at)
    assert record.end - record.position == len(data) - len(b"beforeafter")
    body = split_body(record)
    assert (bytes(body.head), bytes(body.attachment)) == (head, attachment)
    assert data[6 + body.attachment_position - position :].startswith(attachment)


def test_records_and_attachments_begin_at_multiples_of_eight() -> None:
    for length in range(20):
        assert start_size(length) % 8 == 0
        assert start_size(length) == len(encode(0, bytes(length)))
        assert record_size(length) % 8 == 0


def test_the_format_is_the_one_in_the_golden_file() -> None:
    data = GOLDEN.read_bytes()
    record = decode(data, 0, POSITION)
    assert isinstance(record, Record)
    assert record[:5] == (7, POSITION, 3, 4064, 1_700_000_000_000_001)
    body = split_body(record)
    assert (bytes(body.head), bytes(body.attachment), body.attachment_position) == (
        b"head",
        b"attachment",
        4216,
    )
    assert encode(POSITION, b"head", b"attachment") == data


def test_no_flipped_bit_passes() -> None:
    data = encode(POSITION, b"head", b"attached")
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(decode(bytes(flipped), 0, POSITION), RecordFault)


def test_a_record_cut_anywhere_is_short() -> None:
    data = encode(POSITION, b"head", b"attachment")
    for length in range(len(data)):
        assert decode(data[:length], 0, POSITION) is RecordFault.SHORT
        assert needed_size(data[:length], 0) in {HEADER_SIZE, len(data)}
    assert needed_size(data[:HEADER_SIZE], 0) == len(data)


def test_a_record_of_another_position_is_refused() -> None:
    assert decode(encode(POSITION + 8, b""), 0, POSITION) is RecordFault.MISPLACED


def test_zeros_and_other_bytes_are_distinguished() -> None:
    assert decode(bytes(100), 0, POSITION) is RecordFault.EMPTY
    assert decode(bytes(47) + b"x", 0, POSITION) is RecordFault.MAGIC


def test_another_version_is_refused_only_if_its_checksum_holds() -> None:
    data = bytearray(encode(POSITION, b"head"))
    data[8] = 2
    assert decode(bytes(data), 0, POSITION) is RecordFault.CHECKSUM
    assert decode(resealed(bytes(data)), 0, POSITION) is RecordFault.VERSION


def test_a_length_beyond_the_limit_needs_no_read() -> None:
    data = bytearray(encode(POSITION, b"head"))
    pack_into("<I", data, 12, MAX_BODY + 1)
    assert decode(bytes(data), 0, POSITION) is RecordFault.LENGTH


def test_a_head_longer_than_its_body_is_an_error() -> None:
    data = bytearray(encode(POSITION, b"head"))
    pack_into("<I", data, HEADER_SIZE, 1000)
    record = decode(resealed(bytes(data)), 0, POSITION)
    assert isinstance(record, Record)
    with pytest.raises(ValueError, match="head of 1000 bytes"):
        split_body(record)


def test_the_kind_of_lost_spans_is_no_event() -> None:
    from txmq.core.events.base import EVENTS

    assert LOST not in EVENTS
