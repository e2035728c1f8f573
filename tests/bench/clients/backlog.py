"""Store messages without a consumer, in batches of BATCH.

    python -m tests.bench.clients.backlog URL COUNT BYTES BATCH

Prints {"per_s"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from uuid import uuid4

import txmq
from txmq.batch import encode_columns
from txmq.wire.data_requests import Opcode, send_header

WITHIN_S = 120.0
AHEAD = 8  # frames in flight: a client keeps about as many, and a slow disk takes them
PARTITIONS = 8


def main(url: str, count: int, size: int, batch: int) -> None:
    """Measure and print."""
    bodies, producer = [os.urandom(size) for _ in range(batch)], uuid4().bytes
    with txmq.connect(url) as client:
        client.call("topic.create", name="bench", partitions=PARTITIONS)
        epoch = client._core.topics.get("bench").epoch
        connection = client._core.open_connection(time.monotonic() + WITHIN_S)
        began, under_way = time.monotonic(), list[int]()
        for sequence in range(0, count, batch):
            deadline = time.monotonic() + WITHIN_S
            columns = encode_columns(
                bodies,
                producer_id=producer,
                epoch=0,
                sequence=sequence,
                born_at=time.time_ns() // 1_000,
            )
            header = send_header("bench", sequence // batch % PARTITIONS, epoch)
            under_way.append(connection.write(Opcode.SEND, (header, columns), deadline))
            if len(under_way) == AHEAD:
                for correlation in under_way:
                    connection.read(correlation, deadline)
                under_way.clear()
        for correlation in under_way:
            connection.read(correlation, time.monotonic() + WITHIN_S)
        took = time.monotonic() - began
        connection.close()
    print(json.dumps({"per_s": count / took}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
