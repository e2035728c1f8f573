"""Yardstick: a minimal blocking server that answers every framed request at once.

    python -m tests.bench.raw.echo ANSWERS

A frame is a little-endian u32 length and that many bytes. `answer(frame)` of the module
ANSWERS makes each reply: `tests.bench.raw.fixed_answer` for a bare client,
`tests.bench.raw.txmq_answer` for a txmq client.
"""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

Answer = Callable[[bytes], bytes]


def replies(data: bytes, answer: Answer) -> tuple[bytes, bytes]:
    """Return replies to the whole frames in `data`, and the bytes left over."""
    out = b""
    while len(data) >= 4 and len(data) >= (end := 4 + int.from_bytes(data[:4], "little")):
        out += answer(data[:end])
        data = data[end:]
    return out, data


def talk(connection: socket.socket, answer: Answer) -> None:
    """Answer one connection until the peer closes it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rest = b""
    with connection, suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            out, rest = replies(rest + data, answer)
            connection.sendall(out)


def main(answers: str) -> None:
    """Serve with a thread per connection, until terminated."""
    answer: Answer = importlib.import_module(answers).answer
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            threading.Thread(target=talk, args=(listener.accept()[0], answer), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
