"""Yardstick: keep the sink busy with a number of outstanding 1 KiB requests over one
blocking socket.

    python -m tests.bench.raw.sink_client HOST:PORT COUNT OUTSTANDING

Prints {"per_s"}.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

from google_crc32c import value as crc32c

REPLY_BYTES = 16


def request(correlation: int) -> bytes:
    checked = bytes(4) + struct.pack("<I", correlation) + os.urandom(1024)
    return struct.pack("<II", 4 + len(checked), crc32c(checked)) + checked


def drive(connection: socket.socket, count: int, outstanding: int) -> float:
    """Return the seconds for `count` requests with `outstanding` of them unanswered."""
    requests = b"".join(map(request, range(outstanding)))
    size, ring = len(requests) // outstanding, memoryview(requests * 2)
    began, sent, received = time.perf_counter(), 0, 0
    while received < count * REPLY_BYTES:
        more = min(received // REPLY_BYTES + outstanding, count) - sent
        first = sent % outstanding * size
        connection.sendall(ring[first : first + more * size])
        sent += more
        if not (data := connection.recv(1 << 16)):
            raise ConnectionError("the sink closed the connection before it answered")
        received += len(data)
    return time.perf_counter() - began


def main(address: str, count: int, outstanding: int) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(json.dumps({"per_s": count / drive(connection, count, outstanding)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
