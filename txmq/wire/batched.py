"""Batched requests: several in one frame (SENDS, GROUPS, DECISIONS), and their replies
(docs/FORMATS.md 2.1).

    request: u32 n | n × u32 length | n payloads
    reply:   u32 n | n × u32 length | n × u16 status | n payloads, in the same order

The payloads are those of single SENDs, GROUPs or DECIDEs. Each request has a reply of
its own. A status other than 0 rejects that request and says nothing of the others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

from txmq.errors import RemoteProtocolError
from txmq.wire.payload_reader import PayloadReader

MAX_REQUESTS = 1_024  # in one frame, which the broker processes in one reactor turn

COUNT = struct.Struct("<I")


class BatchedReply(NamedTuple):
    """The reply to one request of a frame."""

    status: int
    payload: bytes


def pack_requests(payloads: Sequence[bytes]) -> list[bytes]:
    """Return the payload of a frame with these requests, as buffers."""
    return [_request(len(payloads)).pack(len(payloads), *map(len, payloads)), *payloads]


def unpack_requests(payload: bytes) -> list[bytes]:
    """Return the requests in a frame, at least one. Raises RemoteProtocolError."""
    reader = PayloadReader(payload)
    lengths = reader.fields(_request(_count(reader)))[1:]
    return _cut(reader, lengths)


def pack_replies(replies: Sequence[BatchedReply]) -> list[bytes]:
    """Return the payload of a frame with these replies, as buffers."""
    statuses, payloads = zip(*replies, strict=True)
    n = len(replies)
    return [_reply(n).pack(n, *map(len, payloads), *statuses), *payloads]


def unpack_replies(payload: bytes, count: int = 0) -> list[BatchedReply]:
    """Return the replies in a frame, in the order of the requests.

    Raises RemoteProtocolError, also where there are not `count`; 0 = any number.
    """
    reader = PayloadReader(payload)
    n = _count(reader)
    if count and n != count:
        raise RemoteProtocolError(f"{n} replies to {count} requests")
    fields = reader.fields(_reply(n))
    payloads = _cut(reader, fields[1 : n + 1])
    return list(starmap(BatchedReply, zip(fields[n + 1 :], payloads, strict=True)))


@lru_cache(maxsize=MAX_REQUESTS)
def _request(n: int) -> struct.Struct:
    return struct.Struct(f"<I{n}I")


@lru_cache(maxsize=MAX_REQUESTS)
def _reply(n: int) -> struct.Struct:
    return struct.Struct(f"<I{n}I{n}H")


def _count(reader: PayloadReader) -> int:
    """Return the number of requests; the reader stays where it is."""
    (n,) = reader.fields(COUNT)
    if not 0 < n <= MAX_REQUESTS:
        raise RemoteProtocolError(f"{n} requests in one frame; 1 to {MAX_REQUESTS} are possible")
    reader.at = 0
    return int(n)


def _cut(reader: PayloadReader, lengths: Sequence[int]) -> list[bytes]:
    """Return the rest of the payload, cut by these lengths."""
    payload, ends = reader.payload, list(accumulate(lengths, initial=reader.at))
    reader.read(ends[-1] - reader.at)
    reader.end()
    return [payload[start:end] for start, end in pairwise(ends)]
