"""Send messages of 8 KiB as fast as the client takes them, until standard input ends.

    python -m tests.bench.clients.flood URL TOPIC

Prints `ready` at the start, and {"acked", "failed"} at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from concurrent.futures import Future

import txmq
from txmq.errors import TxmqError

BODY = os.urandom(8 << 10)
OUTSTANDING = 4_000


def main(url: str, topic: str) -> None:
    """Send, and print what became of it."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    acked = failed = 0
    with txmq.connect(url, delivery_timeout=60.0) as client:
        client.send(topic, BODY)
        acked += 1
        print("ready", flush=True)
        under_way: deque[Future[txmq.Receipt]] = deque()
        while under_way or not ended.is_set():
            if len(under_way) < OUTSTANDING and not ended.is_set():
                under_way.append(client.send_async(topic, BODY))
                continue
            try:
                under_way.popleft().result()
                acked += 1
            except TxmqError:
                failed += 1
    print(json.dumps({"acked": acked, "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
