"""Hostile batches: each is refused with a typed error, and accepted ones decode."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import google_crc32c
import lz4.frame
import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.batch import (
    BatchView,
    Codec,
    encode,
    encode_columns,
    encode_one,
    key_hashes,
    locate,
    read_header,
    single_row,
)
from txmq.batch import verify as verify_batch
from txmq.batch.layout import padded
from txmq.batch.verify import all_within, offsets_rise
from txmq.errors import MessageTooLarge, RemoteProtocolError
from txmq.model import limits
from txmq.model.message import Message

NOW = 1_700_000_000_000_000
ORIGIN: dict[str, Any] = {
    "producer_id": bytes(range(16)),
    "epoch": 3,
    "sequence": 1_000,
    "born_at": NOW,
}
SMALL = encode(
    [Message(b"body", "key", "tag", {"name": "text"}, NOW, NOW), Message(b"", "k2")], **ORIGIN
)
LAYOUT = locate(SMALL, read_header(SMALL))


def with_checksum(batch: bytes | bytearray) -> bytes:
    """Return the batch with a checksum that fits its contents."""
    return (
        bytes(batch[:4])
        + struct.pack("<I", google_crc32c.value(bytes(batch[8:])))
        + bytes(batch[8:])
    )


def patched(at: int, layout: str, *values: int | bytes, batch: bytes = SMALL) -> bytes:
    changed = bytearray(batch)
    struct.pack_into(layout, changed, at, *values)
    return with_checksum(changed)


def refused(
    batch: bytes, reason: str | None = None, error: type[Exception] = RemoteProtocolError
) -> None:
    with pytest.raises(error, match=reason):
        verify_batch(batch)


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(8 * len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[bit // 8] ^= 1 << bit % 8
        refused(bytes(damaged))


def test_every_truncation_and_every_addition_is_noticed() -> None:
    for end in range(len(SMALL)):
        refused(SMALL[:end])
    for more in (1, 8, 64):
        refused(SMALL + bytes(more), "in")
        refused(patched(16, "<I", len(SMALL) + more, batch=SMALL + bytes(more)))


@pytest.mark.parametrize(
    ("at", "layout", "value", "reason"),
    [
        (0, "4s", b"TXB2", "not a batch"),
        (8, "B", 2, "version 2"),
        (9, "B", 3, "codec 3"),
        (10, "<H", 32, "columns 32"),
        (10, "<H", 0xFFFF, "columns 65535"),
        (10, "<H", 0, "bodies"),
        (12, "<I", 0, "0 messages"),
        (12, "<I", 1, "batch"),
        (12, "<I", 3, "batch"),
        (12, "<I", limits.BATCH_ROWS, "batch"),
        (12, "<I", limits.BATCH_ROWS + 1, "1000001 messages"),
        (12, "<I", 1 << 31, "2147483648 messages"),
        (16, "<I", 0, "0 bytes"),
        (16, "<I", len(SMALL) - 8, "bytes"),
        (16, "<I", 0xFFFFFFF8, "4294967288 bytes"),
        (20, "<I", 3, "bodies of a batch have 4 bytes"),
        (20, "<I", limits.BATCH + 1, "uncompressed"),
        (24, "<q", -1, "born_at"),
        (24, "<q", NOW - 1, "time"),
        (24, "<q", limits.TIME + 1, "born_at"),
        (32, "<Q", 0, "tag filter"),
        (32, "<Q", (1 << 64) - 1, "tag filter"),
        (60, "<I", 1, "reserved 1"),
        (64, "<Q", limits.SEQUENCE, "sequence"),
        (64, "<Q", (1 << 64) - 1, "sequence"),
    ],
)
def test_inconsistent_headers_are_refused(
    at: int, layout: str, value: int | bytes, reason: str
) -> None:
    refused(patched(at, layout, value), reason)


def test_no_column_may_have_offsets_that_fall_or_leave_it() -> None:
    columns = [column for column in LAYOUT[:4] if column is not None]
    assert len(columns) == 4
    for column in columns:
        size = column.end - column.start
        for values in (
            (1, size, size),
            (0, size + 1, size),
            (0, -1, size),
            (0, -(1 << 31), size),
            (0, size, size - 1),
        ):
            refused(patched(column.offsets, "<3i", *values))
        for last in (-1, -(1 << 31), (1 << 31) - 1, size + 64, size + limits.BATCH):
            refused(patched(column.offsets + 8, "<i", last))


def test_no_time_may_be_negative_or_beyond_the_calendar() -> None:
    for at in LAYOUT[4:]:
        for time in (-1, -(1 << 63), limits.TIME + 1, (1 << 63) - 1):
            refused(patched(at, "<q", time), "time")


def test_one_row_over_the_limit_is_refused_however_small_the_rest() -> None:
    half = bytes(limits.MESSAGE // 2)
    batch = encode_columns([half, half, b"x", b"y"], **ORIGIN)
    offsets = locate(batch, read_header(batch)).body.offsets
    refused(
        patched(offsets + 4, "<2i", 0, limits.MESSAGE + 1, batch=batch), "4194305", MessageTooLarge
    )
    keys = encode_columns([b""] * 3, ["k" * limits.KEY, "k", "k"], **ORIGIN)
    refused(patched(72 + 4, "<i", limits.KEY + 1, batch=keys), "1024")
    tags = encode_columns([b""] * 3, None, ["t" * limits.TAG, "t", "t"], **ORIGIN)
    refused(patched(72 + 4, "<i", limits.TAG + 1, batch=tags), "127")


@pytest.mark.parametrize("key", [None, "key"])
def test_a_single_row_is_checked_like_many(key: str | None) -> None:
    batch = encode_one(Message(b"body", key), **ORIGIN)
    layout = locate(batch, read_header(batch))
    assert verify_batch(batch).count == 1
    wrong = ((1, 4), (0, -1), (4, 0), (0, limits.BATCH))
    for values in (*wrong, (0, 5), (0, 3)):
        refused(patched(layout.body.offsets, "<2i", *values, batch=batch))
    if layout.key is not None:
        for values in wrong:
            refused(patched(layout.key.offsets, "<2i", *values, batch=batch))
    for time in (-1, NOW + 1, -(1 << 63), (1 << 63) - 1):
        refused(patched(layout.born_at, "<q", time, batch=batch), "time")
    refused(patched(32, "<Q", 1, batch=batch), "tag filter")
    refused(patched(10, "<H", 0 if key else 1, batch=batch))


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_keys_and_tags_must_be_utf8(raw: bytes) -> None:
    batch = encode_columns([b""], ["12345678"], ["12345678"], **ORIGIN)
    layout = locate(batch, read_header(batch))
    for column in (layout.key, layout.tag):
        assert column is not None
        refused(patched(column.start, f"{len(raw)}s", raw, batch=batch), "UTF-8")


def test_an_offset_inside_a_character_is_refused() -> None:
    batch = encode_columns([b"", b""], ["ü", "ü"], **ORIGIN)
    refused(patched(72 + 4, "<i", 1, batch=batch), "UTF-8")


def with_headers(cell: bytes) -> bytes:
    """Return a batch of one row with that header cell."""
    room = {"room": "x" * (len(cell) + 24)}
    batch = encode([Message(b"", headers=room)], **ORIGIN)
    column = locate(batch, read_header(batch)).headers
    assert column is not None
    cut = column.start + padded(column.end - column.start)
    shorter = batch[: column.start] + cell.ljust(padded(len(cell)), b"\0") + batch[cut:]
    return patched(
        16, "<I", len(shorter), batch=patched(column.offsets + 4, "<i", len(cell), batch=shorter)
    )


@pytest.mark.parametrize(
    "headers",
    [
        [("a", "b")],
        {"a": 1},
        {"a": b"raw"},
        {"a": None},
        {"a": {"nested": "map"}},
        {"a": ["list"]},
        {1: "a"},
        {b"raw": "a"},
        {"a": msgpack.ExtType(1, b"ext")},
        {str(n): "" for n in range(limits.ALL_HEADER_PAIRS + 1)},
        "text",
        7,
        None,
    ],
)
def test_headers_must_be_a_small_map_of_text_to_text(headers: object) -> None:
    refused(with_headers(msgpack.packb(headers)), "headers")


@pytest.mark.parametrize(
    "cell",
    [
        b"\x82\xa1a\xa1b\xa1a\xa1c",  # a name twice
        b"\x81\xa1a",  # cut short
        b"\x81\xa1a\xa1b\xa1c",  # something more
        b"\x81\xa1\xff\xa1b",  # not UTF-8
        b"\xdf\xff\xff\xff\xff",  # a map of four thousand million
        b"\x81\xa1a\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\xc1",  # nothing in MessagePack
        b"\x81" * 20_000,  # maps in maps
        b"\x91" * 20_000,
    ],
)
def test_damaged_headers_are_refused(cell: bytes) -> None:
    refused(with_headers(cell), "headers")


def test_headers_over_the_limit_are_refused() -> None:
    half = {"a": "x" * (limits.HEADERS * 5 // 8)}
    batch = encode([Message(b"", headers=half), Message(b"", headers=half)], **ORIGIN)
    refused(patched(72 + 4, "<i", limits.ALL_HEADERS + 1, batch=batch), "36864")


def test_the_headers_of_these_tests_are_otherwise_valid() -> None:
    verify_batch(with_headers(msgpack.packb({"__class__": "a", "b": "\0"})))


def compressed(packed: bytes, size: int, codec: Codec) -> bytes:
    """Return a batch that says it has `size` bytes, compressed to `packed`."""
    head = (
        struct.pack("<iiII", 0, size, len(packed), 0)
        + packed
        + bytes(-len(packed) % 8)
        + struct.pack("<q", NOW)
    )
    batch = bytearray(encode_one(Message(b""), **ORIGIN)[:72]) + head
    struct.pack_into("<B", batch, 9, codec)
    struct.pack_into("<II", batch, 16, len(batch), size)
    return with_checksum(batch)


BODY = b"a body that repeats itself " * 40
ZSTD, LZ4 = zstandard.ZstdCompressor().compress(BODY), lz4.frame.compress(BODY)


def test_the_compressed_batches_of_these_tests_are_otherwise_valid() -> None:
    for packed, codec in ((ZSTD, Codec.ZSTD), (LZ4, Codec.LZ4)):
        batch = compressed(packed, len(BODY), codec)
        verify_batch(batch)
        assert BatchView(batch).bodies == [BODY]


@pytest.mark.parametrize(
    ("packed", "codec"), [(ZSTD, Codec.ZSTD), (LZ4, Codec.LZ4)], ids=["zstd", "lz4"]
)
def test_compressed_bodies_must_match_the_header(packed: bytes, codec: Codec) -> None:
    for size in (0, 1, len(BODY) - 1, len(BODY) + 1, limits.MESSAGE):
        refused(compressed(packed, size, codec), "bodies|body|size|message")
    for damaged in (
        packed[:-1],
        packed[: len(packed) // 2],
        packed + b"\0",
        packed + packed,
        b"",
        b"garbage",
        BODY,
    ):
        refused(compressed(damaged, len(BODY), codec), "bodies")


def test_a_length_of_the_compressed_bodies_beyond_the_batch_is_refused() -> None:
    batch = compressed(ZSTD, len(BODY), Codec.ZSTD)
    for size in (len(ZSTD) + 8, 0xFFFFFFFF, 0):
        refused(patched(72 + 8, "<I", size, batch=batch))
    refused(patched(72 + 12, "<I", 1, batch=batch), "reserved")


def test_zstd_without_a_content_size_is_refused() -> None:
    untold = zstandard.ZstdCompressor(write_content_size=False).compress(BODY)
    refused(compressed(untold, len(BODY), Codec.ZSTD), "another size")


def peak_of(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_takes_no_more_memory_than_it_claims() -> None:
    bomb, claim = bytes(64 << 20), 70_000
    honest = zstandard.ZstdCompressor().compress(bomb)
    lying = honest.replace(struct.pack("<I", len(bomb)), struct.pack("<I", claim), 1)
    assert zstandard.get_frame_parameters(lying).content_size == claim
    lz4_bomb = lz4.frame.compress(bomb)
    lying_lz4 = lz4.frame.compress(bomb, store_size=False)
    for packed, codec in (
        (honest, Codec.ZSTD),
        (lying, Codec.ZSTD),
        (lz4_bomb, Codec.LZ4),
        (lying_lz4, Codec.LZ4),
    ):
        batch = compressed(packed, claim, codec)
        assert peak_of(lambda batch=batch: refused(batch, "bodies")) < 2 << 20  # type: ignore[misc]


def decode(batch: bytes) -> None:
    view = BatchView(batch)
    columns = (
        view.bodies,
        view.keys,
        view.tags,
        view.headers,
        view.born_at,
        view.deliver_at,
        view.expire_at,
    )
    assert {len(column) for column in columns} == {len(view)}
    assert len(key_hashes(batch)) == len(view)
    for row in range(len(view)):
        verify_batch(single_row(batch, row))


@given(our.batches, st.data())
def test_every_verified_batch_decodes(batch: bytes, data: st.DataObject) -> None:
    changed = bytearray(batch)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(8, len(changed) - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    try:
        verify_batch(with_checksum(changed))
    except (RemoteProtocolError, MessageTooLarge):
        return
    decode(with_checksum(changed))


@given(st.integers(0, 30), st.none() | st.text(max_size=9), st.data())
def test_the_fast_check_of_single_rows_agrees_with_the_general_one(
    size: int, key: str | None, data: st.DataObject
) -> None:
    """The fast check must accept nothing that the general one refuses.

    The test disables it for the comparison.
    """
    batch = bytearray(encode_one(Message(bytes(size), key), **ORIGIN))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(
            st.integers(12, len(batch) - 8)
            | st.sampled_from((12, 16, 20, 24, 72, 76, 80, len(batch) - 8))
        )
        struct.pack_into(
            "<i",
            batch,
            at & -4,
            data.draw(st.integers(-2, 130) | st.integers(-(1 << 31), (1 << 31) - 1)),
        )
    assert outcome(with_checksum(batch)) == outcome(with_checksum(batch), simple_rows=False)


def outcome(batch: bytes, *, simple_rows: bool = True) -> object:
    """Return the header, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        if not simple_rows:
            patch.setattr(
                sys.modules["txmq.batch.verify"], "_is_simple_row", lambda _batch, _header: False
            )
        try:
            return verify_batch(batch)
        except (MessageTooLarge, RemoteProtocolError) as error:
            return str(error)


@given(st.binary(max_size=300))
def test_noise_is_no_batch(noise: bytes) -> None:
    refused(noise)
    refused(with_checksum(b"TXB1" + noise.ljust(80, b"\0")))


@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 50), min_size=1, max_size=40),
    st.integers(0, 60),
)
def test_offset_bounds_agree_with_a_loop(numbers: list[int], most: int) -> None:
    for column in (numbers, sorted(numbers), [0, *sorted(abs(n) % 50 for n in numbers)]):
        expected = column[0] == 0
        for before, after in pairwise(column):
            expected = expected and 0 <= after - before <= most
        assert offsets_rise(struct.pack(f"<{len(column)}i", *column), most) == expected


@pytest.mark.parametrize(
    "numbers",
    [(0, -1), (0, -(1 << 31)), (0, -(1 << 31) + 5), (0, 3, -(1 << 31) + 5), (-(1 << 31), 0)],
)
def test_offset_bounds_notice_every_negative_offset(numbers: tuple[int, ...]) -> None:
    assert not offsets_rise(struct.pack(f"<{len(numbers)}i", *numbers), 60)


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 50), max_size=40),
    st.integers(0, limits.TIME),
)
def test_time_bounds_agree_with_a_loop(numbers: list[int], most: int) -> None:
    for bound in (most, max(numbers, default=0), 50):
        if bound >= 0:
            expected = all(0 <= number <= bound for number in numbers)
            assert all_within(struct.pack(f"<{len(numbers)}q", *numbers), bound) == expected
