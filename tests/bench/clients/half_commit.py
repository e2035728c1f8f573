"""Store half messages of 1 KiB with a checker and commit each, both with fsync.

    python -m tests.bench.clients.half_commit URL COUNT OUTSTANDING

Prints {"per_s", "p50_us", "p99_us"}. OUTSTANDING transactions are under way on one
connection. A time is from the half to the answer to its commit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from uuid import UUID

import txmq
from tests.bench.raw.latency import latency_us
from txmq.client.protocol.conversation import reply_payload
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.parts import EPOCH, split_into_parts
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import ByChecker
from txmq.model.message import COMMIT, Message
from txmq.wire.bundle import BundleDescription, pack_part
from txmq.wire.data_requests import Decide, Opcode, pack_decide

WITHIN_S = 120.0
BODY = os.urandom(1024)
DESCRIPTION = BundleDescription(ByChecker("bench"), "bench")


class HalfPipeline:
    """One connection, and the requests in flight on it."""

    def __init__(self, client: txmq.Client) -> None:
        self._topics = client._core.topics
        self._connection = client._core.open_connection(time.monotonic() + WITHIN_S)
        self._halves: dict[int, tuple[UUID, float]] = {}
        self._commits: dict[int, float] = {}
        self.took: list[float] = []

    def begin(self) -> None:
        """Store a half."""
        began, buffer, token = time.perf_counter(), Buffer(self._topics), new_token()
        buffer.add("bench", Message(BODY), time.time_ns() // 1_000, None)
        [part] = split_into_parts(token, DESCRIPTION, buffer.build(token).batches)
        self._halves[self._write(Opcode.GROUP, pack_part(part))] = token, began

    def commit_stored(self) -> int:
        """Commit the stored halves; return the number of answered commits."""
        done = len(self.took)
        for frame in self._connection.receive(time.monotonic() + WITHIN_S):
            reply_payload(frame)
            if half := self._halves.pop(frame.correlation, None):
                decide = pack_decide(Decide(COMMIT, half[0].bytes, EPOCH, "bench"))
                self._commits[self._write(Opcode.DECIDE, decide)] = half[1]
            else:
                self.took.append(time.perf_counter() - self._commits.pop(frame.correlation))
        return len(self.took) - done

    def _write(self, opcode: int, payload: list[bytes] | bytes) -> int:
        return self._connection.write(opcode, payload, time.monotonic() + WITHIN_S)

    def close(self) -> None:
        self._connection.close()


def main(url: str, count: int, outstanding: int) -> None:
    """Measure and print."""
    with txmq.connect(url, service="bench") as client:
        client.send("bench", BODY)
        run = HalfPipeline(client)
        began, begun = time.perf_counter(), min(outstanding, count)
        for _ in range(begun):
            run.begin()
        while len(run.took) < count:
            for _ in range(min(run.commit_stored(), count - begun)):
                run.begin()
                begun += 1
        per_s = count / (time.perf_counter() - began)
        run.close()
    print(json.dumps({"per_s": per_s} | latency_us(run.took)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
