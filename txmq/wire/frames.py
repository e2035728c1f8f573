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

from txmq import limits
from txmq.errors import LocalProtocolError, RemoteProtocolError

VERSION = 1
LENGTH = Struct("<I")
PREFIX = Struct("<II")
FIELDS = Struct("<BBHI")  # the checksum begins here
HEADER = Struct("<IIBBHI")
LEAST = HEADER.size - LENGTH.size

HTTP = frozenset({b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC", b"HTTP"})
TLS = frozenset({b"\x15\x03", b"\x16\x03"})  # an alert and a handshake


class Frame(NamedTuple):
    """A request or a reply. `status` is 0 in every request; a broker refuses one with flags."""

    opcode: int
    status: int
    correlation: int
    payload: bytes


def encode_frame(opcode: int, correlation: int, payload: bytes | Sequence[bytes] = b"", *, status: int = 0) -> bytes:
    """The bytes of a frame; a payload in pieces is joined here, once. LocalProtocolError where it is over the limit."""
    return b"".join(frame_pieces(opcode, correlation, payload, status=status))


def frame_pieces(
    opcode: int, correlation: int, payload: bytes | Sequence[bytes] = b"", *, status: int = 0
) -> list[bytes]:
    """As `encode_frame`, in pieces for a transport that takes several at once: a large payload is not copied."""
    pieces = [payload] if isinstance(payload, bytes) else payload
    length = LEAST + sum(map(len, pieces))
    if length > limits.FRAME:
        hint = f"the limit is {limits.FRAME}: send it in parts"
        raise LocalProtocolError(f"a frame of {length} bytes", hint=hint)
    fields = FIELDS.pack(VERSION, opcode, status, correlation)
    return [PREFIX.pack(length, reduce(extend, pieces, value(fields))), fields, *pieces]


class FrameDecoder:
    """Takes bytes as they come and gives the frames they complete.

    Every byte is copied at most twice, whatever pieces it comes in: once into the frame that has begun, once out of it.
    After a RemoteProtocolError the connection is of no use, and the same error is raised again.
    """

    def __init__(self, limit: int = limits.FRAME_BEFORE_HELLO) -> None:
        self.limit = limit  # of a frame's length; raised once the hello is answered
        self._begun = bytearray()  # of one frame, never more
        self._error: RemoteProtocolError | None = None

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._begun)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises RemoteProtocolError as soon as no frame can come of it."""
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
        if self._begun:
            at = self._continue(data, frames)
        while (end := self._end(data, at)) is not None and end <= len(data):
            frames.append(_parse(data, at, end))
            at = end
        if at < len(data):
            self._begun += data[at:]
        return frames

    def _continue(self, data: bytes, frames: list[Frame]) -> int:
        """Add to the frame that has begun; how many bytes of `data` it took."""
        taken = 0
        if len(self._begun) < LENGTH.size:
            taken = LENGTH.size - len(self._begun)
            self._begun += data[:taken]
        end = self._end(self._begun, 0)
        if end is None:
            return len(data)
        more = end - len(self._begun)
        self._begun += data[taken : taken + more]
        if len(self._begun) == end:
            whole, self._begun = self._begun, bytearray()
            frames.append(_parse(memoryview(whole), 0, end))
        return taken + more

    def _end(self, data: bytes | bytearray, at: int) -> int | None:
        """Where the frame ends that begins there, None while its length is not known."""
        if len(data) - at < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(data, at)
        if not LEAST <= length <= self.limit:
            raise _foreign(bytes(data[at : at + LENGTH.size]), length, self.limit)
        return at + LENGTH.size + int(length)


def _parse(data: bytes | memoryview, at: int, end: int) -> Frame:
    _, checksum, version, opcode, status, correlation = HEADER.unpack_from(data, at)
    if version != VERSION:
        hint = "client and broker must speak a common version"
        raise RemoteProtocolError(f"a frame of version {version}, not {VERSION}", hint=hint)
    payload = bytes(data[at + HEADER.size : end])
    if extend(value(bytes(data[at + PREFIX.size : at + HEADER.size])), payload) != checksum:
        raise RemoteProtocolError("a frame with a wrong checksum")
    return Frame(opcode, status, correlation, payload)


def _foreign(start: bytes, length: int, limit: int) -> RemoteProtocolError:
    """What may stand on the other side, if these are its first bytes."""
    hint = "check host and port: HTTP and the console have a port of their own"
    if start in HTTP:
        return RemoteProtocolError("wrong protocol on the port: the peer speaks HTTP", hint=hint)
    if start[:2] in TLS:
        return RemoteProtocolError("wrong protocol on the port: the peer speaks TLS", hint="this port is without TLS")
    return RemoteProtocolError(f"a frame of {length} bytes; {LEAST} to {limit} are possible here")
