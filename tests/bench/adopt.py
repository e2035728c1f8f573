"""The adoption of a consumer's local store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import txmq
from tests.bench.brokers import broker
from tests.bench.rows import Row, Run, at_most, benchmark, row
from tests.cli.peer import Peer, peer

MESSAGES, PER_CALL, LIMIT_S = 100_000, 1_000, 10.0
STORE = {"group": "bench", "store": "5" * 32}


@benchmark("recover.adopt", "the adoption of a store whose consumer is gone")
def adopt(run: Run) -> Iterator[Row]:
    with broker(run) as server, peer(server.address) as connection:
        connection.call("topic.create", name="bench", partitions=1)
        with txmq.connect(server.address) as client:
            for number in range(MESSAGES):
                client.send_async("bench", b"m", key=f"k{number}")
            client.flush()
        keep_all(connection)
        began = time.monotonic()
        assert connection.call("recover.adopt", **STORE)["messages"] == MESSAGES
        while connection.call("recover.list")["stores"]:
            time.sleep(0.01)
        took = time.monotonic() - began
        assert connection.call("group.show", group="bench")["retrying"] == MESSAGES
    what = f"until the {MESSAGES:,} messages of a consumer's store, of as many keys, are due"
    yield row("recover.adopt", what, "s", took, goal=at_most(LIMIT_S))


def keep_all(connection: Peer) -> None:
    """Have a member of an ordered group keep all messages in its store, and leave."""
    joined = connection.call(
        "consumer.join", group="bench", member="m", instance="m", topics=["bench"],
        start="first", mode="ordered", session_ms=3_600_000, lease_ms=3_600_000,
    )  # fmt: skip
    claim = {"group": "bench", "member": "m", "generation": joined["generation"]}
    topic_id, kept = joined["topics"]["bench"], 0
    while kept < MESSAGES:
        chunks = connection.fetch(**claim, wait_ms=0, most=PER_CALL)
        offsets = [
            chunk.base_offset + row
            for chunk in chunks
            for row in range(chunk.first_row, chunk.first_row + chunk.rows)
        ]
        entries = [["bench", topic_id, 0, offset, "stored", 1, 0, None, 0, 0] for offset in offsets]
        reply = connection.call("consumer.stored", **claim, store=STORE["store"], entries=entries)
        assert set(reply["verdicts"]) <= {"kept"}
        kept += len(offsets)
    connection.call("consumer.leave", group="bench", member="m", instance="m")
