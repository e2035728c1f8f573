"""Several requests in one frame: SENDS, GROUPS and DECISIONS, and their replies
(docs/FORMATS.md 2.1).

    request: u32 n | n × u32 length | n payloads, each as in a SEND, GROUP or DECIDE of its own
    reply:   u32 n | n × u32 length | n × u16 status | n payloads, each as in a reply of its own, in the same order

Each is answered for itself: a status that is not 0 is that request's no, and says
nothing of the others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

from txmq.errors import RemoteProtocolError
from txmq.wire.reader import Reader

FEATURE = "together"  # in the features of a broker that takes groups and decisions so,
SENDS = "sends"  # and of one that takes sends so
MOST = 1_024  # requests in one frame: what it comes to is worked out in one go

COUNT = struct.Struct("<I")


class Answer(NamedTuple):
    """The reply to one of them."""

    status: int
    payload: bytes


def pack_requests(payloads: Sequence[bytes]) -> list[bytes]:
    """The payload of a frame with these requests, in pieces."""
    return [_request(len(payloads)).pack(len(payloads), *map(len, payloads)), *payloads]


def unpack_requests(payload: bytes) -> list[bytes]:
    """The requests in a frame, at least one. Raises RemoteProtocolError."""
    reader = Reader(payload)
    lengths = reader.fields(_request(_count(reader)))[1:]
    return _taken(reader, lengths)


def pack_answers(answers: Sequence[Answer]) -> list[bytes]:
    """The payload of the reply, in pieces."""
    statuses, payloads = zip(*answers, strict=True)
    n = len(answers)
    return [_reply(n).pack(n, *map(len, payloads), *statuses), *payloads]


def unpack_answers(payload: bytes, count: int = 0) -> list[Answer]:
    """The replies in a reply, in the order of the requests, of which there were
    `count`; 0 = it does not matter.

    Raises RemoteProtocolError.
    """
    reader = Reader(payload)
    n = _count(reader)
    if count and n != count:
        raise RemoteProtocolError(f"{n} answers to {count} requests")
    fields = reader.fields(_reply(n))
    payloads = _taken(reader, fields[1 : n + 1])
    return list(starmap(Answer, zip(fields[n + 1 :], payloads, strict=True)))


@lru_cache(maxsize=MOST)
def _request(n: int) -> struct.Struct:
    return struct.Struct(f"<I{n}I")


@lru_cache(maxsize=MOST)
def _reply(n: int) -> struct.Struct:
    return struct.Struct(f"<I{n}I{n}H")


def _count(reader: Reader) -> int:
    """How many there are; the reader does not move on."""
    (n,) = reader.fields(COUNT)
    if not 0 < n <= MOST:
        raise RemoteProtocolError(f"{n} requests in one frame; 1 to {MOST} are possible")
    reader.at = 0
    return int(n)


def _taken(reader: Reader, lengths: Sequence[int]) -> list[bytes]:
    """All that is left, cut into pieces of these lengths."""
    payload, ends = reader.payload, list(accumulate(lengths, initial=reader.at))
    reader.take(ends[-1] - reader.at)
    reader.end()
    return [payload[start:end] for start, end in pairwise(ends)]
