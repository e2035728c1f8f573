"""Tokens: unique names of transactions and of producer sessions."""

from __future__ import annotations

import os
import time
from uuid import UUID

from txmq.errors import LocalProtocolError

VERSION, VARIANT = 7 << 76, 2 << 62


def new_token() -> UUID:
    """Return a new UUIDv7, which sorts by its time (docs/FORMATS.md 1)."""
    random = int.from_bytes(os.urandom(10), "big")
    low = random & ~(0xF << 76) & ~(3 << 62)
    return UUID(int=(time.time_ns() // 1_000_000) << 80 | VERSION | VARIANT | low)


def first_token_at(micros: int) -> UUID:
    """Return the lowest token of a time in microseconds since the epoch."""
    return UUID(int=micros // 1_000 << 80)


def parse_token(token: UUID | bytes | str) -> UUID:
    """Return a token given as 16 bytes, or as text with or without hyphens.

    Raises LocalProtocolError.
    """
    if isinstance(token, UUID):
        return token
    try:
        return UUID(bytes=token) if isinstance(token, bytes) else UUID(token)
    except ValueError:
        raise LocalProtocolError(
            f"Invalid token {token!r:.80}",
            hint="give a UUID, its 16 bytes or its 32 hexadecimal digits",
        ) from None
