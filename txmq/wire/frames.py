"""Frames of requests and replies.

at   type  field
0    u32   length of everything after this field
4    u32   CRC32C over everything from byte 8 on
8    u8    version = 1
9    u8    opcode
10   u16   flags of a request (0), or status of a reply (0 = OK)
12   u32   correlation, chosen by the client
16         payload
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from struct import Struct
from typing import NamedTuple

from google_crc32c import extend, value

from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.model import limits

VERSION = 1
LENGTH = Struct("<I")
PREFIX = Struct("<II")
FIELDS = Struct("<BBHI")  # the checksum covers from here on
HEADER = Struct("<IIBBHI")
MIN_LENGTH = HEADER.size - LENGTH.size
LARGE_BUFFER = 4_096  # bytes received at once that are not worth copying

HTTP = frozenset(
    {b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC", b"HTTP"}
)
TLS = frozenset({b"\x15\x03", b"\x16\x03"})  # an alert and a handshake


class Frame(NamedTuple):
    """A request or a reply. `status` is 0 in every request."""

    opcode: int
    status: int
    correlation: int
    payload: bytes


def encode_frame(
    opcode: int, correlation: int, payload: bytes | Sequence[bytes] = b"", *, status: int = 0
) -> bytes:
    """Return the bytes of a frame; the buffers of a payload are joined once.

    Raises LocalProtocolError beyond the limit.
    """
    return b"".join(frame_buffers(opcode, correlation, payload, status=status))


def frame_buffers(
    opcode: int, correlation: int, payload: bytes | Sequence[bytes] = b"", *, status: int = 0
) -> list[bytes]:
    """Return a frame as buffers, so that large payloads are not copied."""
    buffers = [payload] if isinstance(payload, bytes) else payload
    length = MIN_LENGTH + sum(map(len, buffers))
    if length > limits.FRAME:
        raise LocalProtocolError(
            f"a frame of {length} bytes exceeds the limit of {limits.FRAME}",
            hint="send less at once",
        )
    fields = FIELDS.pack(VERSION, opcode, status, correlation)
    return [PREFIX.pack(length, reduce(extend, buffers, value(fields))), fields, *buffers]


class FrameDecoder:
    """Decoder of a stream of bytes into frames.

    Every byte is copied once, into its frame; small parts of a frame that arrives in
    many are copied twice. `pending` is the number of bytes held of an unfinished frame,
    `expected` its size, 0 while that is not known.
    After a RemoteProtocolError the connection is useless, and the same error is raised
    again.
    """

    def __init__(self, limit: int = limits.FRAME_BEFORE_HELLO) -> None:
        self.limit = limit  # of a frame's length; raised once the hello is answered
        self._head = bytearray()  # of the unfinished frame
        self._buffers: list[memoryview | bytearray] = []  # of its payload
        self.pending = 0
        self._error: RemoteProtocolError | None = None

    @property
    def expected(self) -> int:
        return self._end(self._head, 0) or 0

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes.

        Raises RemoteProtocolError as soon as the bytes cannot become a frame.
        """
        if self._error is not None:
            raise self._error
        frames: list[Frame] = []
        try:
            at = self._continue(data, frames) if self._head else 0
            while at < len(data):
                end, payload = self._end(data, at), at + HEADER.size
                if end is None or end > len(data):
                    self._head += data[at:payload]
                    self.pending = len(self._head)
                    self._hold(memoryview(data)[payload:])
                    break
                frames.append(_checked(data[at:payload], data[payload:end]))
                at = end
        except RemoteProtocolError as error:
            self._error = error
            raise
        return frames

    def _continue(self, data: bytes, frames: list[Frame]) -> int:
        """Add to the unfinished frame, and return how many bytes of `data` it took."""
        consumed = min(HEADER.size - len(self._head), len(data))
        self._head += data[:consumed]
        self.pending += consumed
        end = self._end(self._head, 0)
        if end is None or len(self._head) < HEADER.size:
            return consumed
        rest = memoryview(data)[consumed : consumed + end - self.pending]
        self._hold(rest)
        if self.pending == end:
            head, buffers = bytes(self._head), self._buffers
            self._head, self._buffers, self.pending = bytearray(), [], 0
            frames.append(_checked(head, b"".join(buffers)))
        return consumed + len(rest)

    def _hold(self, part: memoryview) -> None:
        """Keep a part of a payload; small parts are joined."""
        self.pending += len(part)
        if len(part) >= LARGE_BUFFER:
            self._buffers.append(part)
            return
        last = self._buffers[-1] if self._buffers else None
        if not isinstance(last, bytearray):
            last = bytearray()
            self._buffers.append(last)
        last += part

    def _end(self, data: bytes | bytearray, at: int) -> int | None:
        """Return where the frame at `at` ends, None while its length is incomplete."""
        if len(data) - at < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(data, at)
        if not MIN_LENGTH <= length <= self.limit:
            raise _foreign_peer(bytes(data[at : at + LENGTH.size]), length, self.limit)
        return at + LENGTH.size + int(length)


def _checked(head: bytes, payload: bytes) -> Frame:
    _, checksum, version, opcode, status, correlation = HEADER.unpack(head)
    if version != VERSION:
        hint = "client and broker must speak a common version"
        raise RemoteProtocolError(f"a frame has version {version}, not {VERSION}", hint=hint)
    if extend(value(head[PREFIX.size :]), payload) != checksum:
        raise RemoteProtocolError("a frame has a wrong checksum")
    return Frame(opcode, status, correlation, payload)


def _foreign_peer(start: bytes, length: int, limit: int) -> RemoteProtocolError:
    """Return the error for a peer of another protocol, guessed from its first bytes."""
    hint = "check host and port: HTTP and the console have a port of their own"
    if start in HTTP:
        return RemoteProtocolError("wrong protocol on the port: the peer speaks HTTP", hint=hint)
    if start[:2] in TLS:
        return RemoteProtocolError(
            "wrong protocol on the port: the peer speaks TLS",
            hint="connect without TLS: this port does not support it",
        )
    return RemoteProtocolError(
        f"invalid frame of {length} bytes: {MIN_LENGTH} to {limit} are possible here"
    )
