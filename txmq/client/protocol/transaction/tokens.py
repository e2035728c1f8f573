"""Names that are never given twice: tokens of transactions, ids of producing
sessions.
"""

from __future__ import annotations

import os
import time
from uuid import UUID

from txmq.errors import LocalProtocolError

VERSION, VARIANT = 7 << 76, 2 << 62


def new_token() -> UUID:
    """A UUIDv7: its first 48 bits are the time in milliseconds, so that tokens sort by
    their age (FORMATS 1).
    """
    random = int.from_bytes(os.urandom(10), "big")
    low = random & ~(0xF << 76) & ~(3 << 62)
    return UUID(int=(time.time_ns() // 1_000_000) << 80 | VERSION | VARIANT | low)


def first_token(micros: int) -> UUID:
    """What sorts before every token of that time, in microseconds since the epoch, and
    after.
    """
    return UUID(int=micros // 1_000 << 80)


def as_token(token: UUID | bytes | str) -> UUID:
    """A token in any of its forms: 16 bytes, or text with hyphens or without. Raises
    LocalProtocolError.
    """
    if isinstance(token, UUID):
        return token
    try:
        return UUID(bytes=token) if isinstance(token, bytes) else UUID(token)
    except ValueError:
        hint = "a UUID is needed, or its 16 bytes or 32 hexadecimal digits"
        raise LocalProtocolError(f"{token!r:.80} is no token", hint=hint) from None
