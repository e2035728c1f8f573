"""Frames: round trips in pieces of every size, and every kind of damage."""

from __future__ import annotations

import struct
from collections import Counter
from threading import get_ident
from typing import ClassVar, Self

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.model import limits
from txmq.wire import frames as module
from txmq.wire.frames import Frame, FrameDecoder, encode_frame, frame_buffers

FRAMES = [
    Frame(2, 0, 1, b""),
    Frame(16, 0, 2, b"payload"),
    Frame(16, 7, 0xFFFFFFFF, bytes(range(40))),
]
STREAM = b"".join(encode_frame(f.opcode, f.correlation, f.payload, status=f.status) for f in FRAMES)
LEAST = 12


def decode(*pieces: bytes, limit: int = limits.FRAME) -> list[Frame]:
    decoder = FrameDecoder(limit)
    return [frame for piece in pieces for frame in decoder.feed(piece)]


def frame_of_length(length: int) -> bytes:
    return encode_frame(1, 1, bytes(length - LEAST))


@given(st.lists(our.frames))
def test_frames_are_read_back(frames: list[Frame]) -> None:
    stream = b"".join(
        encode_frame(f.opcode, f.correlation, f.payload, status=f.status) for f in frames
    )
    assert decode(stream) == frames


def test_a_frame_has_the_bytes_of_the_format() -> None:
    rest = struct.pack("<BBHI", 1, 17, 513, 0x01020304) + b"abc"
    expected = struct.pack("<II", len(rest) + 4, google_crc32c.value(rest)) + rest
    assert encode_frame(17, 0x01020304, b"abc", status=513) == expected


def test_a_payload_in_pieces_is_that_payload() -> None:
    whole = encode_frame(19, 5, b"one two three")
    assert encode_frame(19, 5, [b"one ", b"", b"two", b" three"]) == whole
    pieces = frame_buffers(19, 5, [b"one ", b"two three"])
    assert b"".join(pieces) == whole
    assert pieces[-2:] == [b"one ", b"two three"]


def test_every_split_in_three_gives_the_same_frames() -> None:
    for first in range(len(STREAM) + 1):
        for second in range(first, len(STREAM) + 1):
            assert decode(STREAM[:first], STREAM[first:second], STREAM[second:]) == FRAMES


@given(st.lists(our.frames, max_size=8), st.lists(st.integers(1, 50), min_size=1))
def test_any_pieces_give_the_same_frames(frames: list[Frame], sizes: list[int]) -> None:
    stream = b"".join(
        encode_frame(f.opcode, f.correlation, f.payload, status=f.status) for f in frames
    )
    pieces: list[bytes] = []
    at = 0
    while at < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[at : at + size])
        at += size
    assert decode(*pieces) == frames


def test_a_frame_is_given_as_soon_as_its_last_byte_is_there() -> None:
    decoder = FrameDecoder()
    data = encode_frame(16, 1, b"payload")
    for at in range(len(data) - 1):
        assert decoder.feed(data[at : at + 1]) == []
        assert decoder.pending == at + 1
    assert decoder.feed(data[-1:]) == [Frame(16, 0, 1, b"payload")]
    assert decoder.pending == 0


def test_every_flipped_bit_is_noticed_or_waits_for_more() -> None:
    data = encode_frame(16, 9, b"some payload")
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        decoder = FrameDecoder(limits.FRAME)
        try:
            frames = decoder.feed(bytes(damaged))
        except RemoteProtocolError:
            continue
        # the length grew: then it ends with the connection, or with a wrong checksum
        assert frames == []
        (length,) = struct.unpack_from("<I", damaged)
        assert bit < 32
        assert length > len(data) - 4


def test_no_truncated_frame_is_given() -> None:
    data = encode_frame(16, 9, b"some payload")
    for end in range(len(data)):
        decoder = FrameDecoder()
        assert decoder.feed(data[:end]) == []
        assert decoder.pending == end


def test_ten_thousand_empty_frames_are_ten_thousand_frames() -> None:
    assert len(decode(encode_frame(2, 0) * 10_000)) == 10_000


class Counting(bytearray):
    """A buffer that counts the bytes that are put into such buffers, by thread: others
    of this process may have connections.
    """

    added: ClassVar[Counter[int]] = Counter()

    def __iadd__(self, data: bytes) -> Self:  # type: ignore[misc, override]  # nothing else is added here
        Counting.added[get_ident()] += len(data)
        super().__iadd__(data)
        return self


def test_a_frame_that_drips_in_is_copied_once_however_small_the_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "bytearray", Counting, raising=False)
    payload = bytes(range(256)) * 512
    data = encode_frame(16, 1, payload)
    for size, copied in ((1, len(data)), (7, len(data)), (1_000, len(data)), (100_000, 16)):
        decoder, before = FrameDecoder(limits.FRAME), Counting.added[get_ident()]
        found = [
            frame
            for at in range(0, len(data), size)
            for frame in decoder.feed(data[at : at + size])
        ]
        assert found == [Frame(16, 0, 1, payload)]
        assert Counting.added[get_ident()] - before == copied
        assert decoder.pending == 0


def test_the_length_is_limited_exactly() -> None:
    for limit in (limits.FRAME_BEFORE_HELLO, 100):
        assert len(decode(frame_of_length(limit - 1) + frame_of_length(limit), limit=limit)) == 2
        with pytest.raises(RemoteProtocolError, match=f"{limit + 1} bytes"):
            decode(frame_of_length(limit + 1), limit=limit)


@pytest.mark.parametrize("length", [0, 1, 11, 4097, 1 << 31, 0xFFFFFFFF])
def test_an_impossible_length_is_refused_with_its_fourth_byte(length: int) -> None:
    decoder = FrameDecoder()
    start = struct.pack("<I", length)
    assert decoder.feed(start[:3]) == []
    with pytest.raises(RemoteProtocolError, match=str(length)):
        decoder.feed(start[3:])


def test_the_limit_rises_after_the_hello() -> None:
    decoder = FrameDecoder()
    decoder.limit = limits.FRAME
    assert len(decoder.feed(frame_of_length(limits.FRAME))) == 1
    with pytest.raises(RemoteProtocolError):
        decoder.feed(struct.pack("<I", limits.FRAME + 1))


def test_a_refused_stream_stays_refused() -> None:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError) as first:
        decoder.feed(bytes(4))
    with pytest.raises(RemoteProtocolError) as second:
        decoder.feed(encode_frame(2, 0))
    assert second.value is first.value


def test_another_version_is_named() -> None:
    data = bytearray(encode_frame(2, 0))
    data[8] = 2
    with pytest.raises(RemoteProtocolError, match="version 2, not 1"):
        decode(bytes(data))


@pytest.mark.parametrize(
    ("start", "protocol"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP"),
        (b"POST /api/v1/topics HTTP/1.1\r\n", "HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03", "TLS"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "TLS"),
    ],
)
def test_other_protocols_are_named(start: bytes, protocol: str) -> None:
    for pieces in ([start], [start[:2], start[2:]], [start[i : i + 1] for i in range(len(start))]):
        with pytest.raises(
            RemoteProtocolError, match=f"wrong protocol on the port: the peer speaks {protocol}"
        ):
            decode(*pieces, limit=limits.FRAME_BEFORE_HELLO)


@given(st.binary(min_size=4))
def test_noise_is_no_frame(noise: bytes) -> None:
    try:
        assert decode(noise) == []
    except RemoteProtocolError:
        return


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_a_stream_of_one_byte_repeated_is_refused(byte: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(byte * 100)


def test_a_frame_over_the_limit_is_not_encoded() -> None:
    half = bytes(limits.FRAME // 2)
    with pytest.raises(LocalProtocolError, match="exceeds the limit"):
        encode_frame(16, 1, [half, half])
