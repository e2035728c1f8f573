"""Fault 140: bits flip in the index of a broker that is stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import txmq
from txmq import Message, connect
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S, wait_until

MESSAGES = 400


def flip(file: Path, rng: random.Random) -> None:
    """Flip three bits in pages that are used: those that are not zero."""
    data = bytearray(file.read_bytes())
    used = [page for page in range(0, len(data), 4_096) if any(data[page : page + 4_096])]
    for _ in range(3):
        data[rng.choice(used) + rng.randrange(4_096)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@pytest.mark.timeout(300)
def test_a_broker_makes_a_damaged_index_anew_and_has_everything(tmp_path: Path) -> None:
    bodies = [b"%d" % number for number in range(MESSAGES)]
    with OwnBroker(tmp_path) as broker:
        with connect(broker.url, service="tests", timeout=PATIENCE_S) as client:
            for start in range(0, MESSAGES, 4):
                client.send_batch("t", [Message(body, "k") for body in bodies[start : start + 4]])
            with client.consumer("g", ["t"]) as consumer:
                for message in consumer.receive_many(10, PATIENCE_S):
                    consumer.ack(message, wait=True)
            settled = client.call("group.show", group="g")["unsettled"]
        for seed in range(8):
            broker.stop()
            flip(broker.data / "index" / "data.mdb", random.Random(seed))
            broker.start()
            with connect(broker.url, service="tests", timeout=PATIENCE_S) as client:
                assert client.call("group.show", group="g")["unsettled"] == settled
                with client.reader("r", ["t"], txmq.FileOffsets(tmp_path / str(seed))) as reader:
                    messages = [reader.receive(PATIENCE_S) for _ in bodies]
                    read = [message.body for message in messages if message is not None]
                assert sorted(read) == sorted(bodies)
        wait_until(lambda: "recover.index_rebuilt" in broker.log, what="an index made anew")
        broker.stop()
        index = broker.data / "index" / "data.mdb"
        index.write_bytes(bytes(index.stat().st_size))
        broker.start()
        with connect(broker.url, service="tests", timeout=PATIENCE_S) as client:
            alarms = client.call("broker.alarms")["alarms"]
        assert "index.rebuilt" in {alarm["name"] for alarm in alarms}
