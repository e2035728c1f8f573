"""Seeds of a spooling producer with a broker that comes and goes: nothing lost, nothing
doubled, order per key. Each planted bug must be found.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.recover.spool.disks import batch, store
from tests.recover.spool.spool_world import TOPIC, Connection, Producer, SpoolWorld
from tests.recover.spool.test_disk_faults import no_sync
from txmq.client.protocol.sender.spool_drain import SpoolDrain
from txmq.core.topics import sends
from txmq.core.topics.topics import CreateTopic, GrowTopic
from txmq.model.keys import partition_of
from txmq.recover.local.spool import Spool

SEEDS = range(*map(int, os.environ.get("TXMQ_SEEDS", "1:61").split(":")))


def run_seeds(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += SpoolWorld(seed).run()
    return counts


def test_every_seed_of_a_spool_loses_and_doubles_nothing() -> None:
    counts = run_seeds(SEEDS)
    if len(SEEDS) >= 60:
        least = {"published": 2_000, "power cuts": 50, "restarts": 50, "copies": 10}
        assert {name: counts[name] for name in least if counts[name] < least[name]} == {}
        assert counts["forgotten"] > 20
        assert counts["lost connections"] > 50


def test_a_copy_that_is_drained_first_doubles_nothing_without_receipts() -> None:
    world = SpoolWorld(1)
    partition = partition_of("k0", world.producer.topics.refresh(TOPIC).partitions)
    for number in range(300):  # the broker remembers the receipts of 256
        one = batch(number, body := world.next_body("k0"), key="k0")
        store(world.producer.chain.own, one._replace(partition=partition))
        world.acked(TOPIC, [body])
    copy = Producer(world, world.producer.disk.copy())
    original, world.producer = world.producer, copy
    world.drain_all()
    world.producer = original
    world.drain_all()
    world.check()


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_copy_that_has_put_a_batch_aside_and_its_original_send_the_same(refused: int) -> None:
    world = SpoolWorld(1)
    world.producer.topics.refresh(TOPIC)
    for number in range(4):
        one = batch(number, body := world.next_body("k0"), key="k0")
        topic = "new" if number == refused else TOPIC
        store(world.producer.chain.own, one._replace(partition=0, epoch=0, topic=topic))
        if topic == TOPIC:
            world.acked(TOPIC, [body])
    original, copy = world.producer, Producer(world, world.producer.disk.copy())
    world.producer = copy
    world.drain_all()
    assert copy.chain.refused == 1
    world.broker.driver.do(CreateTopic("new", 1))
    world.producer = original
    world.drain_all()
    world.check()
    # Behind the last one, nothing has told the broker to skip it.
    assert original.chain.refused == (refused != 3)


def test_what_a_copy_left_undone_of_a_batch_is_sent() -> None:
    world = SpoolWorld(1)
    known = world.producer.topics.refresh(TOPIC)
    partition = partition_of("k0", known.partitions)
    for sequence in (0, 3):
        bodies = [world.next_body("k0") for _ in range(3)]
        one = batch(sequence, *bodies, key="k0")
        store(world.producer.chain.own, one._replace(partition=partition, epoch=known.epoch))
        world.acked(TOPIC, bodies)
    copy = Producer(world, world.producer.disk.copy())
    copy.connection = Connection(most=1)
    world.broker.driver.do(GrowTopic(TOPIC, 5))
    while not world.broker.published:
        copy.step()
        copy.exchange()
    world.drain_all()
    world.check()
    assert world.producer.chain.refused == 0


def test_a_row_that_counts_as_its_batch_loses_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a batch of which a copy has sent a row counts as stored."""
    monkeypatch.setattr(sends, "_refuse_partly_stored", lambda _header, _last: None)
    with pytest.raises(AssertionError, match="lost"):
        test_what_a_copy_left_undone_of_a_batch_is_sent()


def mark_before_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: a batch is noted as drained when it is sent."""
    true = SpoolDrain.next_writes

    def marking(self: SpoolDrain, conversation: object) -> list[bytes]:
        writes = true(self, conversation)  # type: ignore[arg-type]
        if writes:
            self._spool.mark_drained(self._read_to, 0)
        return writes

    monkeypatch.setattr(SpoolDrain, "next_writes", marking)


def new_session_for_a_doubtful_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: a doubtful batch of a forgotten session is sent without a search."""
    monkeypatch.setattr(
        SpoolDrain,
        "settle",
        lambda self, *, stored, true=SpoolDrain.settle: true(self, stored=stored and False),
    )


def no_fsync_of_the_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: the spool is not synced."""
    no_sync(monkeypatch)


def a_split_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: a split batch is sent as a whole again, after a restart, to a broker that
    does not tell how much of it is there.
    """
    monkeypatch.setattr(sends, "_refuse_partly_stored", lambda _header, _last: None)
    monkeypatch.setattr(Spool, "split", lambda _self, _batch: None)


def sessions_overtake_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: a session is sent before the receipts of the one before are there."""
    true = SpoolDrain._is_ready

    def ready(self: SpoolDrain, entry: Any, *, alone: bool) -> bool:
        self._session = entry.batch.session
        return true(self, entry, alone=alone)

    monkeypatch.setattr(SpoolDrain, "_is_ready", ready)


@pytest.mark.parametrize(
    "plant",
    [
        mark_before_sent,
        new_session_for_a_doubtful_batch,
        no_fsync_of_the_spool,
        a_split_is_not_noted,
        sessions_overtake_one_another,
    ],
)
def test_a_planted_bug_of_the_spool_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_seeds(range(1, 200))
