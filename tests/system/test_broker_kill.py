"""A broker that is killed, restarted or drained while producers of all kinds send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.reporting import Report
from tests.system.load import load
from tests.system.send_history import SendHistory, find_faults
from tests.system.topic_reader import observing, read_topic, topic_rows
from txmq import connect
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy, a start takes seconds
TOPIC = "orders"
KILLS = 10
RECOVERIES_CUT = 5
# Small, so that a run passes many ends of segments and many snapshots.
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


def wait_for_receipts(history: SendHistory, more: int) -> None:
    """Wait until so many more messages are acknowledged."""
    wanted = len(history.acknowledged) + more
    wait_until(lambda: len(history.acknowledged) >= wanted, what=f"{more} receipts")


def check(broker: OwnBroker, history: SendHistory) -> None:
    with connect(broker.url) as client:
        topic = topic_rows(read_topic(client, TOPIC))
    assert find_faults(history, topic) == []


def recovery_begun(broker: OwnBroker) -> Callable[[], bool]:
    """Return a condition: the process that starts next has begun to read its log."""
    seen = broker.log.count("RECOVERING")
    return lambda: broker.log.count("RECOVERING") > seen


def test_a_broker_killed_under_load_keeps_all_acknowledged_messages(
    broker: OwnBroker, report: Report
) -> None:
    history, random, kills = SendHistory(), Random(1), 0
    with observing(broker.url, TOPIC, history.observe), load(broker.url, TOPIC, history):
        for _ in range(KILLS):
            wait_for_receipts(history, random.randint(1, 400))
            broker.kill()  # raises if it was not alive
            kills += 1
            broker.start()
        wait_for_receipts(history, 100)
    check(broker, history)
    assert history.unknown, "no send is in doubt, so no kill has met one"
    report({"kills": kills, **history.counts()})


def test_a_broker_killed_in_its_recovery_recovers(broker: OwnBroker, report: Report) -> None:
    history, cut = SendHistory(), 0
    with observing(broker.url, TOPIC, history.observe), load(broker.url, TOPIC, history):
        wait_for_receipts(history, 1_000)
        broker.kill()
        for _ in range(RECOVERIES_CUT):
            begun = recovery_begun(broker)
            broker.launch()
            wait_until(begun, what="a recovery has begun")
            broker.kill()
            cut += "ready" not in broker.process.out.read_text()
        broker.start()
        wait_for_receipts(history, 100)
    check(broker, history)
    report({"recoveries cut": cut, **history.counts()})


def test_sigterm_under_load_drains(broker: OwnBroker, report: Report) -> None:
    history = SendHistory()
    with observing(broker.url, TOPIC, history.observe), load(broker.url, TOPIC, history):
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
    check(broker, history)
    assert "recover.torn_tail" not in broker.log
    report(history.counts())


def test_a_second_broker_is_refused_and_the_first_serves_on(
    broker: OwnBroker, tmp_path: Path
) -> None:
    broker.restart()
    arguments = ("broker", "--create-topics", "--data", str(broker.data), "--listen", "127.0.0.1:0")
    with running(tmp_path / "second", *arguments) as second, connect(broker.url) as client:
        assert second.status() == 1
        assert str(broker.data) in second.err.read_text()
        assert client.send(TOPIC, b"still serving", key="k").offset == 0
