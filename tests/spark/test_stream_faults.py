"""Faults that a stream meets when it goes on, with a broker process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from tests.client.blocking.test_restored_log import Site
from tests.spark.consuming import let_die
from tests.spark.damaging import damage
from tests.spark.stream_driver import StreamDriver, texts
from txmq.client.protocol import conversation
from txmq.errors import LogChanged, TopicReplaced
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.offset_ranges import DataLoss


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """A broker that looks at retention often."""
    with OwnBroker(tmp_path_factory.mktemp("broker"), "[retention]\nevery_s = 0.1\n") as own:
        yield own


def send(own: OwnBroker, topic: str, *numbers: int) -> None:
    with txmq.connect(own.url, timeout=PATIENCE_S) as client:
        client.send_many(topic, texts(*numbers), partition=0)


def create(own: OwnBroker, topic: str) -> None:
    with txmq.connect(own.url, timeout=PATIENCE_S) as client:
        client.call("topic.create", name=topic, partitions=1)


def pass_retention(own: OwnBroker, topic: str, first: int) -> None:
    with txmq.connect(own.url, timeout=PATIENCE_S) as client:
        client.call("topic.alter", name=topic, retention_ms=1)
        wait_until(
            lambda: client.call("topic.show", name=topic)["firsts"] == [first],
            what="all messages are too old",
        )
        client.call("topic.alter", name=topic, retention_ms=0)


def test_a_planned_batch_outlives_the_broker(own: OwnBroker, topic: str) -> None:
    create(own, topic)
    send(own, topic, 0, 1)
    with StreamDriver(url=own.url, topic=topic) as driver:
        start, end = driver.progress, driver.plan()
        own.restart()
        assert driver.run(start, end) == texts(0, 1)
        send(own, topic, 2)
        own.restart()
        assert driver.step() == texts(0, 1, 2)


def test_what_retention_removed_before_it_was_read_is_an_error_or_counted(
    own: OwnBroker, topic: str
) -> None:
    create(own, topic)
    send(own, topic, *range(4))
    lenient = {"url": own.url, "topic": topic, "failOnDataLoss": "false"}
    with StreamDriver(url=own.url, topic=topic, maxOffsetsPerTrigger="2") as driver:
        assert driver.step() == texts(0, 1)
        start, end = driver.progress, driver.plan()
        tasks = driver.reader.partitions(json.loads(start), json.loads(end))
        pass_retention(own, topic, 4)
        send(own, topic, 4)
        lost = f"{topic}/0: retention has removed offsets 2 to 3"
        with pytest.raises(DataLoss, match=lost):
            list(driver.reader.read(tasks[0]))
        with pytest.raises(DataLoss, match=lost):
            driver.run(start, end)
        with pytest.raises(DataLoss, match=lost):
            driver.step()
        driver.restart(**lenient)
        # The task of a batch that was planned before skips what it cannot have ...
        assert list(driver.reader.read(tasks[0])) == []
        # ... and a batch that is planned again leaves its count to the next one.
        assert driver.run(start, end) == []
        driver.progress = end
        assert driver.step() == texts(4)
        assert json.loads(driver.progress)["skipped"] == {f"{topic}/0": 2}
        assert driver.step() == []


def test_a_topic_made_again_is_not_read_as_the_one_before(own: OwnBroker, topic: str) -> None:
    create(own, topic)
    send(own, topic, 0, 1)
    with StreamDriver(url=own.url, topic=topic) as driver:
        start, end = driver.progress, driver.plan()
        tasks = driver.reader.partitions(json.loads(start), json.loads(end))
        with txmq.connect(own.url, timeout=PATIENCE_S) as client:
            client.call("topic.delete", name=topic)
            with pytest.raises(DataLoss, match="it was deleted"):
                driver.plan()
        create(own, topic)
        send(own, topic, 7, 8, 9)
        with pytest.raises(TopicReplaced):
            list(driver.reader.read(tasks[0]))
        with pytest.raises(DataLoss, match="deleted and made again"):
            driver.run(start, end)
        driver.restart(url=own.url, topic=topic, failOnDataLoss="false")
        assert driver.step() == texts(7, 8, 9)


def test_another_log_is_refused_or_read_from_its_beginning(tmp_path: Path, topic: str) -> None:
    with OwnBroker(tmp_path) as own:
        create(own, topic)
        send(own, topic, 0, 1, 2)
        with StreamDriver(url=own.url, topic=topic) as driver:
            assert driver.step() == texts(0, 1, 2)
            before, tasks = driver.batches[0]
            planned = driver.reader.partitions(json.loads(before), json.loads(tasks))
            own.kill()
            shutil.rmtree(own.data)
            own.start()
            create(own, topic)
            send(own, topic, 5)
            with pytest.raises(LogChanged):  # the query that runs
                driver.plan()
            driver.restart()  # and the one that goes on at its checkpoint
            with pytest.raises(DataLoss, match="the stream has read log"):
                driver.plan()
            with pytest.raises(LogChanged, match="the read was planned in log"):
                list(driver.reader.read(planned[0]))
            driver.restart(url=own.url, topic=topic, failOnDataLoss="false")
            assert driver.step() == texts(5)
            assert driver.step() == []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A broker that can be backed up and restored."""
    made = Site(tmp_path)
    yield made
    made.broker.stop()


def test_a_restored_log_is_read_on_by_a_stream_that_was_behind_it(
    site: Site, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = site.broker.url
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        client.call("topic.create", name=topic, partitions=1)
        client.send_many(topic, texts(0, 1))
        site.back_up()
        client.send_many(topic, texts(2, 3))
    limited = {"url": url, "topic": topic, "maxOffsetsPerTrigger": "1"}
    with StreamDriver(**limited) as behind, StreamDriver(url=url, topic=topic) as ahead:
        assert behind.step() == texts(0)
        assert ahead.step() == texts(0, 1, 2, 3)
        planned = (behind.progress, behind.plan())
        site.restore()
        for name in ("_newest_epochs", "_incarnations"):  # the application starts again
            monkeypatch.setattr(conversation, name, {})
        behind.restart()
        ahead.restart()
        with txmq.connect(url, timeout=PATIENCE_S) as client:
            client.send_many(topic, texts(7, 8, 9))
        assert behind.run(*planned) == texts(1)
        assert [behind.step() for _ in range(4)] == [texts(n) for n in (1, 7, 8, 9)]
        lost = "restored from a backup: it ended at offset 2, and the stream had read up to 4"
        with pytest.raises(DataLoss, match=lost):
            ahead.plan()
        ahead.restart(url=url, topic=topic, failOnDataLoss="false")
        assert ahead.step() == texts(7, 8, 9)
        assert ahead.step() == []


def test_a_letter_whose_message_is_damaged_is_read_without_its_body(
    own: OwnBroker, topic: str
) -> None:
    create(own, topic)
    bodies = [b"first", b"rotten-" + topic.encode(), b"last"]
    with txmq.connect(own.url, timeout=PATIENCE_S) as client:
        for body in bodies:
            client.send(topic, body)
        let_die(client, topic, topic, bodies, "concurrent")
    damage(own.data, bodies[1])
    with BrokerLink(own.url) as link:
        found = list(link.letters(topic, bodies=True))
    assert ["body" in letter for letter in found] == [True, False, True]
    assert "damaged" in found[1]
