"""Segment headers and names."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from tests.store.simfs import SimFS
from txmq.errors import UnsupportedFormat
from txmq.store.log.segment import (
    HEADER_SIZE,
    SegmentHeader,
    create_segment,
    decode_segment_header,
    encode_segment_header,
    list_segments,
    read_log_id,
    segment_path,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "segment-v1.bin"
HEADER = SegmentHeader(UUID("00112233-4455-6677-8899-aabbccddeeff"), 1 << 30, 1_700_000_000_000_001)


def test_the_format_is_the_one_in_the_golden_file() -> None:
    data = GOLDEN.read_bytes()
    assert len(data) == HEADER_SIZE
    assert decode_segment_header(data, "golden") == HEADER
    assert encode_segment_header(HEADER) == data


def test_a_damaged_header_is_none_and_a_later_version_is_refused() -> None:
    data = encode_segment_header(HEADER)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        if 12 * 8 < bit < 16 * 8:
            with pytest.raises(UnsupportedFormat):
                decode_segment_header(bytes(flipped), "log/x.seg")
        else:
            assert decode_segment_header(bytes(flipped), "log/x.seg") is None


def test_a_header_cut_off_is_none() -> None:
    data = encode_segment_header(HEADER)
    assert [decode_segment_header(data[:length], "x") for length in range(HEADER_SIZE)] == [
        None
    ] * HEADER_SIZE


def test_segments_are_listed_in_order_without_other_files() -> None:
    fs = SimFS()
    fs.makedirs("/d/log")
    for first in (3 << 30, 0, 1 << 30):
        create_segment(fs, "/d", HEADER._replace(first=first))
    for name in ("00000000000000000000.seg.torn-64", "1.seg", "0000000000000000000x.seg", "notes"):
        fs.create(f"/d/log/{name}")
    segments = list_segments(fs, "/d")
    assert [segment.first for segment in segments] == [0, 1 << 30, 3 << 30]
    assert [segment.path for segment in segments] == [
        segment_path("/d", first) for first in (0, 1 << 30, 3 << 30)
    ]
    assert {segment.size for segment in segments} == {HEADER_SIZE}
    assert read_log_id(fs, "/d") == HEADER.log_id


def test_there_is_no_log_id_without_a_log() -> None:
    assert read_log_id(SimFS(), "/nowhere") is None
