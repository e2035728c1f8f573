"""Frames: what every request and reply is wrapped in.

0 u32 length of what follows | 4 u32 crc32c of 8.. | 8 u8 version | 9 u8 opcode | 10 u16 flags of a request (0) or
status of a reply (0 = OK) | 12 u32 correlation, chosen by the client | 16 payload
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
FIELDS = Struct("<BBHI")  # the checksum begins here
HEADER = Struct("<IIBBHI")
LEAST = HEADER.size - LENGTH.size
LARGE_PART = 4_096  # bytes of a payload that are worth an object of their own

HTTP = frozenset(
    {b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC", b"HTTP"}
)
TLS = frozenset({b"\x15\x03", b"\x16\x03"})  # an alert and a handshake


class Frame(NamedTuple):
    """A request or a reply. `status` is 0 in every request; a broker refuses one with
    flags.
    """

    opcode: int
    status: int
    correlation: int
    payload: bytes


def encode_frame(
    opcode: int, correlation: int, payload: bytes | Sequence[bytes] = b"", *, status: int = 0
) -> bytes:
    """The bytes of a frame; a payload in pieces is joined here, once.
    LocalProtocolError where it is over the limit.
    """
    return b"".join(frame_pieces(opcode, correlation, payload, status=status))


def frame_pieces(
    opcode: int, correlation: int, payload: bytes | Sequence[bytes] = b"", *, status: int = 0
) -> list[bytes]:
    """As `encode_frame`, in pieces for a transport that takes several at once: a large
    payload is not copied.
    """
    pieces = [payload] if isinstance(payload, bytes) else payload
    length = LEAST + sum(map(len, pieces))
    if length > limits.FRAME:
        hint = f"the limit is {limits.FRAME}: send it in parts"
        raise LocalProtocolError(f"a frame of {length} bytes", hint=hint)
    fields = FIELDS.pack(VERSION, opcode, status, correlation)
    return [PREFIX.pack(length, reduce(extend, pieces, value(fields))), fields, *pieces]


class FrameDecoder:
    """Takes bytes as they come and gives the frames they complete.

    Every byte is copied once, into its frame; only small pieces of one that comes in
    many are copied once more. After a RemoteProtocolError the connection is of no use,
    and the same error is raised again.
    """

    def __init__(self, limit: int = limits.FRAME_BEFORE_HELLO) -> None:
        self.limit = limit  # of a frame's length; raised once the hello is answered
        self._head = bytearray()  # of the one frame that has begun
        self._parts: list[memoryview | bytearray] = []  # of its payload
        self._held = 0
        self._error: RemoteProtocolError | None = None

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._head) + self._held

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises RemoteProtocolError as soon as no
        frame can come of it.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._feed(data)
        except RemoteProtocolError as error:
            self._error = error
            raise

    def _feed(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        at = 0
        if self._head:
            at = self._continue(data, frames)
        while (end := self._end(data, at)) is not None and end <= len(data):
            frames.append(_checked(data[at : at + HEADER.size], data[at + HEADER.size : end]))
            at = end
        if at < len(data):
            payload = at + HEADER.size
            self._head += data[at:payload]
            self._hold(memoryview(data)[payload:])
        return frames

    def _continue(self, data: bytes, frames: list[Frame]) -> int:
        """Add to the frame that has begun; how many bytes of `data` it took."""
        taken = min(HEADER.size - len(self._head), len(data))
        self._head += data[:taken]
        end = self._end(self._head, 0)
        if end is None or len(self._head) < HEADER.size:
            return taken
        more = memoryview(data)[taken : taken + end - self.pending]
        self._hold(more)
        if self.pending == end:
            head, parts = bytes(self._head), self._parts
            self._head, self._parts, self._held = bytearray(), [], 0
            frames.append(_checked(head, b"".join(parts)))
        return taken + len(more)

    def _hold(self, part: memoryview) -> None:
        """Keeps a part of a payload: as it came, but for small ones, which would take
        more room than they have.
        """
        self._held += len(part)
        if len(part) >= LARGE_PART:
            self._parts.append(part)
            return
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, bytearray):
            last = bytearray()
            self._parts.append(last)
        last += part

    def _end(self, data: bytes | bytearray, at: int) -> int | None:
        """Where the frame ends that begins there, None while its length is not
        known.
        """
        if len(data) - at < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(data, at)
        if not LEAST <= length <= self.limit:
            raise _foreign(bytes(data[at : at + LENGTH.size]), length, self.limit)
        return at + LENGTH.size + int(length)


def _checked(head: bytes, payload: bytes) -> Frame:
    _, checksum, version, opcode, status, correlation = HEADER.unpack(head)
    if version != VERSION:
        hint = "client and broker must speak a common version"
        raise RemoteProtocolError(f"a frame of version {version}, not {VERSION}", hint=hint)
    if extend(value(head[PREFIX.size :]), payload) != checksum:
        raise RemoteProtocolError("a frame with a wrong checksum")
    return Frame(opcode, status, correlation, payload)


def _foreign(start: bytes, length: int, limit: int) -> RemoteProtocolError:
    """What may stand on the other side, if these are its first bytes."""
    hint = "check host and port: HTTP and the console have a port of their own"
    if start in HTTP:
        return RemoteProtocolError("wrong protocol on the port: the peer speaks HTTP", hint=hint)
    if start[:2] in TLS:
        return RemoteProtocolError(
            "wrong protocol on the port: the peer speaks TLS", hint="this port is without TLS"
        )
    return RemoteProtocolError(f"a frame of {length} bytes; {LEAST} to {limit} are possible here")
