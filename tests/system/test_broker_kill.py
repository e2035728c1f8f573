"""A broker that is killed, restarted, drained while producers of all kinds send: the
topic is what they were told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.reporting import Report
from tests.system.history import History, faults
from tests.system.load import load
from tests.system.reading import rows, watched, whole_topic
from txmq import connect
from txmq.testing.broker import OwnBroker
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy, a start takes seconds
TOPIC = "orders"
KILLS = 10
RECOVERIES_CUT = 5
# Small, so that a run goes over the ends of segments, snapshots and writes of the
# tables.
SETTINGS = """
[broker]
partitions = 4
segment_bytes = 1048576
preallocate_bytes = 262144
snapshot_bytes = 1048576

[disk]
ballast_mib = 1
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path, SETTINGS) as broker, connect(broker.url) as client:
        client.call("topic.create", name=TOPIC, partitions=4)
        yield broker


def wait_for_receipts(history: History, more: int) -> None:
    """Returns once so many more messages are acknowledged."""
    wanted = len(history.acknowledged) + more
    wait_until(lambda: len(history.acknowledged) >= wanted, 60, what=f"{more} receipts")


def judge(broker: OwnBroker, history: History) -> None:
    with connect(broker.url) as client:
        topic = rows(whole_topic(client, broker.url, TOPIC))
    assert faults(history, topic) == []


def recovering(broker: OwnBroker) -> Callable[[], bool]:
    """Whether the process started last has begun to read its log."""
    seen = broker.log.count("RECOVERING")
    return lambda: broker.log.count("RECOVERING") > seen


def test_a_broker_killed_under_load_keeps_its_word(broker: OwnBroker, report: Report) -> None:
    history, random, kills = History(), Random(1), 0
    with watched(broker.url, TOPIC, history.see), load(broker.url, TOPIC, history):
        for _ in range(KILLS):
            wait_for_receipts(history, random.randint(1, 400))
            broker.kill()  # raises if it was not alive
            kills += 1
            broker.start()
        wait_for_receipts(history, 100)
    judge(broker, history)
    assert history.unknown, "no producer was left in doubt: the kills hit nothing"
    report({"kills": kills, **history.counts()})


def test_a_broker_killed_in_its_recovery_recovers(broker: OwnBroker, report: Report) -> None:
    history, cut = History(), 0
    with watched(broker.url, TOPIC, history.see), load(broker.url, TOPIC, history):
        wait_for_receipts(history, 1_000)
        broker.kill()
        for _ in range(RECOVERIES_CUT):
            begun = recovering(broker)
            broker.launch()
            wait_until(begun, 60, what="a recovery has begun")
            broker.kill()
            cut += "ready" not in broker.process.out.read_text()
        broker.start()
        wait_for_receipts(history, 100)
    judge(broker, history)
    report({"recoveries cut": cut, **history.counts()})


def test_sigterm_under_load_drains(broker: OwnBroker, report: Report) -> None:
    history = History()
    with watched(broker.url, TOPIC, history.see), load(broker.url, TOPIC, history):
        for _ in range(2):
            wait_for_receipts(history, 200)
            assert broker.stop() == 0
            lives = [
                event["state"]
                for event in broker.process.events()
                if event["event"] == "broker.life"
            ]
            assert lives[-2:] == ["DRAINING", "CLOSED"]
            broker.start()
        wait_for_receipts(history, 200)
    judge(broker, history)
    assert "recover.torn_tail" not in broker.log
    report(history.counts())


def test_a_second_broker_is_refused_and_the_first_serves_on(
    broker: OwnBroker, tmp_path: Path
) -> None:
    broker.restart()
    arguments = ("broker", "--data", str(broker.data), "--listen", "127.0.0.1:0")
    with running(tmp_path / "second", *arguments) as second, connect(broker.url) as client:
        assert second.status() == 1
        assert str(broker.data) in second.err.read_text()
        assert client.send(TOPIC, b"still there", key="k").offset == 0
