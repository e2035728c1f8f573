"""The answers for a txmq client: a hello, receipts, and the same topic for every call.

See docs/FORMATS.md, 2. Nothing is decoded or stored.
"""

from __future__ import annotations

import json
import struct

from google_crc32c import value as crc32c

HELLO, CALL, SEND = 1, 3, 16
HEADER = struct.Struct("<BBHI")
LIMITS = {"frame": (16 << 20) + (64 << 10), "message": 4 << 20}
GREETING = {
    "version": 1,
    "broker": "bare",
    "log_id": "00000000-0000-4000-8000-000000000000",
}
TOPIC = {"name": "bench", "partitions": 8, "epoch": 1, "topic_id": 1}
PAYLOADS = {
    HELLO: json.dumps({**GREETING, "boot_epoch": 1, "limits": LIMITS, "login": None}).encode(),
    CALL: json.dumps({"topics": [TOPIC]}).encode(),
    SEND: struct.pack("<qqB", 0, 0, 0),
}


def answer(frame: bytes) -> bytes:
    """Return the reply to a request frame, with an empty payload if it is unknown."""
    version, opcode, _flags, correlation = HEADER.unpack_from(frame, 8)
    checked = HEADER.pack(version, opcode, 0, correlation) + PAYLOADS.get(opcode, b"")
    return struct.pack("<II", 4 + len(checked), crc32c(checked)) + checked
