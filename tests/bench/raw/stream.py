"""Yardstick: a loopback stream into a file, synced every SYNC_MS, or never with 0.

    python -m tests.bench.raw.stream FILE MIB SYNC_MS

Prints {"mb_per_s", "moved"}, measured until the last byte is in FILE (zeros), synced.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from tests.bench.raw.disk import preallocate

CHUNK = bytes(1 << 20)


def send(address: tuple[str, int], mib: int) -> None:
    with socket.create_connection(address) as connection:
        for _ in range(mib):
            connection.sendall(CHUNK)


def receive(connection: socket.socket, fd: int) -> int:
    """Move bytes from the connection to the file until its end; return their number."""
    buffer, moved = memoryview(bytearray(CHUNK)), 0
    while size := connection.recv_into(buffer):
        os.write(fd, buffer[:size])
        moved += size
    return moved


def sync_often(fd: int, every_s: float, done: threading.Event) -> None:
    while not done.wait(every_s):
        os.fdatasync(fd)


def main(path: str, mib: int, sync_ms: int) -> None:
    fd, done = preallocate(path, mib << 20), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if os.fork() == 0:
            send(listener.getsockname(), mib)
            os._exit(0)
        if sync_ms:
            threading.Thread(target=sync_often, args=(fd, sync_ms / 1000, done)).start()
        with listener.accept()[0] as connection:
            began = time.perf_counter()
            moved = receive(connection, fd)
    done.set()
    if sync_ms:
        os.fdatasync(fd)
    print(json.dumps({"mb_per_s": moved / (time.perf_counter() - began) / 1e6, "moved": moved}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
