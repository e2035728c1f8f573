"""Yardstick: send one framed 1 KiB request at a time over a blocking socket, and wait
for the 32-byte reply.

    python -m tests.bench.raw.echo_client HOST:PORT COUNT

Prints {"p50_us", "p99_us"}.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

from tests.bench.raw.latency import latency_us

REQUEST = struct.pack("<I", 12 + 1024) + bytes(12) + os.urandom(1024)
REPLY_BYTES = 32


def round_trips(connection: socket.socket, count: int) -> list[float]:
    """Return the seconds from each request to the end of its reply."""
    clock, sendall, recv = time.perf_counter, connection.sendall, connection.recv
    took = []
    for _ in range(count):
        began = clock()
        sendall(REQUEST)
        missing = REPLY_BYTES
        while missing:
            data = recv(missing)
            if not data:
                raise ConnectionError("the server left before it answered")
            missing -= len(data)
        took.append(clock() - began)
    return took


def main(address: str, count: int) -> None:
    """Measure and print."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(json.dumps(latency_us(round_trips(connection, count))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
