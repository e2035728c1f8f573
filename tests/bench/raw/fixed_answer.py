"""The answer for a bare client: the same 32 bytes for every frame."""

from __future__ import annotations

import struct

REPLY = struct.pack("<I", 28) + bytes(28)


def answer(_frame: bytes) -> bytes:
    """Return the reply to any frame."""
    return REPLY
