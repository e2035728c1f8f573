"""A client with a spool and a real broker that dies, stays away, and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.client.real import RealBroker
from tests.freezing import freeze
from txmq.client.blocking.client import Client
from txmq.client.blocking.sender.spooling import SpoolingSender
from txmq.client.protocol.sender import spool_drain
from txmq.errors import (
    BrokerUnavailable,
    DiskFull,
    RequestRejected,
    RequestTimeout,
    SpoolFull,
    StoreError,
    TxmqError,
)
from txmq.model.keys import partition_of
from txmq.recover.local.database import Database
from txmq.recover.local.spool import Spool
from txmq.recover.local.spools import scan, spools_below
from txmq.recover.spool_drain import drain_spools
from txmq.testing.processes import ProcessEnded, run_script
from txmq.testing.wait import PATIENCE_S, wait_until

Connect = Callable[..., Client]


@pytest.fixture
def connect(connect: Connect) -> Connect:
    """Clients that soon take a broker for away, as most of them here are to."""
    return partial(connect, timeout=3.0)


@pytest.fixture
def spools(tmp_path: Path) -> Path:
    return tmp_path / "spools"


def topic_of(broker: RealBroker, connect: Connect, name: str, partitions: int = 4) -> str:
    connect(broker.url).call("topic.create", name=name, partitions=partitions)
    return name


def bodies(broker: RealBroker, topic: str, key: str | None = None) -> list[str]:
    return [found.body.decode() for found in broker.read(topic) if key in (None, found.key)]


def test_batches_in_flight_when_the_broker_dies_are_stored_once(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "flight", 1)
    own_broker.kill()
    own_broker.start(crash_at="log.after_write:4")  # the batch is stored, its reply is not sent
    client = connect(own_broker.url, spool=spools)
    client.send(topic, b"first", key="k")
    futures = [client.send_async(topic, b"%d" % n, key="k") for n in range(3_000)]
    receipts = [future.result(PATIENCE_S) for future in futures]
    wait_until(own_broker.died, what="the broker has died")
    assert receipts[-1].spooled
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) == ["first", *map(str, range(3_000))]
    assert {client.spool.place(receipts[-1], PATIENCE_S).offset} == {3_000}


def test_new_sends_go_behind_what_waits(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "behind", 1)
    client = connect(own_broker.url, spool=spools)
    client.send(topic, b"0", key="k")
    own_broker.kill()
    count = 1
    for _outage in range(2):
        client.send_batch(topic, [txmq.Message(b"%d" % n, "k") for n in range(count, count + 500)])
        count += 500
        own_broker.start()
        while True:  # until the spool is empty, under a steady stream
            receipt = client.send(topic, b"%d" % count, key="k")
            count += 1
            if not receipt.spooled:
                break
        own_broker.kill()
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) == [str(n) for n in range(count)]


def test_a_silent_broker_is_one_that_does_not_answer(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    """It gets the messages once, though it reads those sent before when it goes on."""
    topic = topic_of(own_broker, connect, "silent", 1)
    client = connect(own_broker.url, spool=spools, timeout=2.0)
    client.send(topic, b"00", key="k")
    freeze(own_broker.pid)
    receipts = [client.send(topic, b"%02d" % n, key="k") for n in range(1, 30)]
    assert all(receipt.spooled for receipt in receipts)
    assert client.stats.connections == 1
    os.kill(own_broker.pid, signal.SIGCONT)
    client.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) == [f"{n:02d}" for n in range(30)]


def test_the_order_notices_a_message_that_is_sent_past_the_spool(
    own_broker: RealBroker, connect: Connect, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant: a message is sent past the spool, while something waits there."""
    topic = topic_of(own_broker, connect, "past", 1)
    client = connect(own_broker.url, spool=spools)
    client.send(topic, b"0", key="k")
    own_broker.kill()
    for number in range(1, 300):
        client.send(topic, b"%d" % number, key="k")
    true = SpoolingSender._drain_some

    def past(self: SpoolingSender, connection: Any, drain: Any) -> None:
        self._in_flight.held = False
        true(self, connection, drain)
        self._in_flight.held = False

    monkeypatch.setattr(SpoolingSender, "_drain_some", past)
    monkeypatch.setattr(SpoolingSender, "_stores_now", lambda _self, _drain: False)
    monkeypatch.setattr(spool_drain, "MAX_BATCHES_IN_FLIGHT", 1)
    own_broker.start()
    wait_until(lambda: client.spool.waiting < 299)
    client.send(topic, b"300", key="k")
    client.spool.wait(PATIENCE_S)
    found = bodies(own_broker, topic)
    assert sorted(found, key=int) == [str(n) for n in range(301)]
    assert found != sorted(found, key=int), "the planted bug is not seen"


def test_a_process_that_starts_in_the_outage_routes_or_stores_unrouted(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    known, unknown = (topic_of(own_broker, connect, name, 5) for name in ("known", "unknown"))
    with connect(own_broker.url, spool=spools) as before:
        before.send(known, b"first", key="a")
    own_broker.kill()
    client = connect(own_broker.url, spool=spools, timeout=0.5)
    keys = [f"k{n % 7}" for n in range(70)]
    routed = client.send_batch(known, [txmq.Message(b"%d" % n, k) for n, k in enumerate(keys)])
    unrouted = client.send_batch(unknown, [txmq.Message(b"%d" % n, k) for n, k in enumerate(keys)])
    keyless = client.send(unknown, b"keyless")
    assert [receipt.partition for receipt in routed] == [partition_of(key, 5) for key in keys]
    assert {receipt.partition for receipt in (*unrouted, keyless)} == {-1}
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    for topic in (known, unknown):
        for key in set(keys):
            own = [str(n) for n, other in enumerate(keys) if other == key]
            assert bodies(own_broker, topic, key) == own
    place = client.spool.place(unrouted[3], PATIENCE_S)
    assert (place.partition, place.offset is not None) == (partition_of(keys[3], 5), True)
    assert client.spool.place(keyless, PATIENCE_S).topic == unknown


def test_a_topic_that_grew_in_the_outage_gets_messages_by_its_new_partitions(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "grown", 2)
    with connect(own_broker.url, spool=spools) as before:
        before.send(topic, b"first", key="a")
    connect(own_broker.url).call("topic.grow", name=topic, partitions=6)
    own_broker.kill()
    client = connect(own_broker.url, spool=spools)
    keys = [f"k{n % 11}" for n in range(110)]
    receipts = client.send_batch(topic, [txmq.Message(b"%d" % n, k) for n, k in enumerate(keys)])
    explicit = client.send(topic, b"explicit", partition=1)
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    for key in set(keys):
        own = [str(n) for n, other in enumerate(keys) if other == key]
        assert bodies(own_broker, topic, key) == own
    places = {found.key: found.partition for found in own_broker.read(topic) if found.key != "a"}
    assert {key: partition_of(key, 6) for key in set(keys)} | {None: 1} == places
    found = {one.message_id for one in own_broker.read(topic)}
    assert {receipt.message_id for receipt in (*receipts, explicit)} <= found


def test_what_the_broker_refuses_for_good_is_kept_and_the_rest_goes_on(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "refused", 2)
    client = connect(own_broker.url, spool=spools)
    client.send(topic, b"first", key="a")
    own_broker.kill()
    for number in range(6):
        client.send(topic, b"%d" % number, key="a")
        refused = client.send(topic, b"bad %d" % number, partition=99)
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) == ["first", *map(str, range(6))]
    assert client.spool.refused == 6
    with pytest.raises(RequestRejected, match="UnknownPartition"):
        client.spool.place(refused, PATIENCE_S)
    client.close()
    [summary] = spools_below(str(spools))
    assert (summary.messages, summary.refused, summary.owned) == (0, 6, False)
    found = list(scan(str(spools)))
    assert [message.body for message in found] == [b"bad %d" % n for n in range(6)]
    assert {message.refusal.error for message in found if message.refusal} == {"UnknownPartition"}
    again = drain_spools(own_broker.url, str(spools), timeout=PATIENCE_S, refused=True)
    assert again[:3] == (0, 0, 6)
    connect(own_broker.url).call("topic.grow", name=topic, partitions=100)
    again = drain_spools(own_broker.url, str(spools), timeout=PATIENCE_S, refused=True)
    assert again[:3] == (6, 0, 0)
    assert sum(body.startswith("bad") for body in bodies(own_broker, topic)) == 6
    assert spools_below(str(spools)) == []


def test_a_spool_without_an_owner_goes_before_the_sends_of_the_next_process(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "orphan", 1)
    own_broker.kill()
    dead = """
import os, sys, txmq
client = txmq.connect(sys.argv[1], spool=sys.argv[2], timeout=0.5)
for n in range(20):
    client.send(sys.argv[3], str(n).encode(), key="k")
os.kill(os.getpid(), 9)
"""
    for _process in range(2):
        with pytest.raises(ProcessEnded):
            run_script(dead, own_broker.url, str(spools), topic)
    assert [summary.messages for summary in spools_below(str(spools))] == [20, 20]
    client = connect(own_broker.url, spool=spools, timeout=0.5)
    assert client.spool.waiting == 40
    client.send(topic, b"new", key="k")
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) == [*map(str, range(20)), *map(str, range(20)), "new"]
    client.close()
    assert spools_below(str(spools)) == []


@pytest.mark.parametrize("remembered", [True, False])
def test_a_copied_spool_doubles_nothing(
    own_broker: RealBroker,
    connect: Connect,
    spools: Path,
    tmp_path: Path,
    remembered: bool,  # noqa: FBT001
) -> None:
    """Without the receipts, which a broker forgets, the messages are searched."""
    topic = topic_of(own_broker, connect, "copied", 3)
    unknown = topic_of(own_broker, connect, "copied-unknown", 3)
    with connect(own_broker.url, spool=spools) as before:
        before.send(topic, b"first", key="k0")
    connect(own_broker.url).call("topic.grow", name=topic, partitions=5)
    own_broker.kill()
    client = connect(own_broker.url, spool=spools, timeout=0.5)
    count = 30 if remembered else 270
    for number in range(count):
        client.send(topic, b"%d" % number, key=f"k{number % 5}")
        if number % 10 == 0:
            client.send(unknown, b"%d" % number, key=f"k{number % 5}")
            client.send(topic, b"refused", partition=77)
    copy = tmp_path / "copy"
    shutil.copytree(spools, copy)
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    with connect(own_broker.url, spool=copy) as other:
        other.spool.wait(PATIENCE_S)
        assert other.spool.refused == client.spool.refused
        assert not other.send(topic, b"after", key="k0").spooled
    found = Counter(bodies(own_broker, topic))
    assert found == Counter(["first", "after", *map(str, range(count))])
    assert len(bodies(own_broker, unknown)) == count // 10


@pytest.mark.parametrize("policy", ["block", "refuse"])
def test_at_the_limit_sends_are_refused_and_were_not_done(
    own_broker: RealBroker, connect: Connect, spools: Path, policy: str
) -> None:
    topic = topic_of(own_broker, connect, f"limit-{policy}", 1)
    client = connect(
        own_broker.url, spool=spools, spool_bytes=1 << 18, spool_full=policy, timeout=0.5
    )
    client.send(topic, b"first")
    own_broker.kill()
    stored = 0
    try:
        while stored < 1_000:
            client.send(topic, b"%d" % stored + bytes(20_000))
            stored += 1
        pytest.fail("the limit was ignored")
    except SpoolFull as error:
        assert error.outcome == "not done"  # noqa: PT017  # after an unknown number of sends
    assert stored > 5
    assert client.spool.bytes <= 1 << 18
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    client.send(topic, b"last")
    found = [body.rstrip("\0") for body in bodies(own_broker, topic)]
    assert found == ["first", *map(str, range(stored)), "last"]


def test_a_disk_that_fills_up_between_two_looks_only_delays_the_receipt(
    connect: Connect, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write to that disk, too."""
    client = connect("txmq://127.0.0.1:1", spool=spools, timeout=0.3)
    for name in ("stage", "flush"):
        true, times = getattr(Spool, name), count(1)

        def full(
            self: Spool, *arguments: Any, true: Any = true, times: Iterator[int] = times
        ) -> None:
            if next(times) <= 2:
                raise DiskFull("no space")
            true(self, *arguments)

        monkeypatch.setattr(Spool, name, full)
    receipts = client.send_batch("orders", [txmq.Message(b"%d" % n) for n in range(5)])
    assert [receipt.spooled for receipt in receipts] == [True] * 5
    client.close()
    assert [message.body for message in scan(str(spools))] == [b"%d" % n for n in range(5)]


def test_an_input_error_of_the_disk_closes_the_spool_with_a_typed_error(
    own_broker: RealBroker, connect: Connect, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_of(own_broker, connect, "eio", 1)
    client = connect(own_broker.url, spool=spools, timeout=0.5)
    client.send(topic, b"first")
    own_broker.kill()
    client.send(topic, b"second")

    def failing(_self: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_commit", failing)
        with pytest.raises(TxmqError) as raised:
            client.send(topic, b"third")
        assert raised.value.outcome == "unknown"
    with pytest.raises(StoreError):
        client.send(topic, b"fourth")
    client.close()
    own_broker.start()
    with connect(own_broker.url, spool=spools) as again:
        again.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) in (["first", "second"], ["first", "second", "third"])


def test_times_of_messages_count_from_the_send(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "times", 1)
    client = connect(own_broker.url, spool=spools)
    client.send(topic, b"first")
    own_broker.kill()
    client.send(topic, b"late", delay=timedelta(hours=1))
    client.send(topic, b"now", delay=0.01)
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    wait_until(lambda: bodies(own_broker, topic) == ["first", "now"])
    assert client.call("message.delayed", topic=topic)["delayed"] == 1


def test_an_interrupt_of_a_send_loses_and_doubles_nothing(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "interrupted")
    interrupts: list[type[BaseException]] = [KeyboardInterrupt, SystemExit]

    def partitioner(_topic: str, key: str | None, _partitions: int) -> int:
        if key == "stop" and interrupts:
            raise interrupts.pop(0)
        return 0

    client = connect(own_broker.url, spool=spools, partitioner=partitioner)
    client.send(topic, b"0", key="k")
    own_broker.kill()
    batch = [txmq.Message(b"1", "k"), txmq.Message(b"2", "stop"), txmq.Message(b"3", "k")]
    with pytest.raises(KeyboardInterrupt):
        client.send_batch(topic, batch)
    with pytest.raises(SystemExit):
        client.send_batch(topic, batch[1:])
    assert client.send(topic, b"4", key="stop").spooled
    own_broker.start()
    client.spool.wait(PATIENCE_S)
    assert bodies(own_broker, topic) == ["0", "1", "4"]


def test_the_child_of_a_fork_has_its_own_spool(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "fork", 1)
    own_broker.kill()
    forks = """
import os, sys, txmq
client = txmq.connect(sys.argv[1], spool=sys.argv[2], timeout=0.5)
client.send(sys.argv[3], b"parent", key="k")
pid = os.fork()
client.send(sys.argv[3], b"parent again" if pid else b"child", key="k")
if not pid:
    client.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
client.close()
"""
    run_script(forks, own_broker.url, str(spools), topic)
    assert sorted(summary.messages for summary in spools_below(str(spools))) == [1, 2]
    own_broker.start()
    with connect(own_broker.url, spool=spools) as client:
        client.spool.wait(PATIENCE_S)
    assert sorted(bodies(own_broker, topic)) == ["child", "parent", "parent again"]


def test_the_child_of_a_fork_is_told_of_its_own_spool(spools: Path) -> None:
    forks = """
import os, sys, txmq
client = txmq.connect("txmq://127.0.0.1:1", spool=sys.argv[1], timeout=0.5)
client.send_batch("orders", [txmq.Message(b"parent")] * 2)
pid = os.fork()
if not pid:
    client.send("orders", b"child")
    os._exit(client.spool.waiting != 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert client.spool.waiting == 2
client.close()
"""
    run_script(forks, str(spools))


def test_a_process_that_ends_without_close_leaves_its_messages_on_disk(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "ended", 1)
    own_broker.kill()
    ends = """
import sys, txmq
client = txmq.connect(sys.argv[1], spool=sys.argv[2], timeout=0.5)
for n in range(100):
    client.send_async(sys.argv[3], str(n).encode(), key="k")
"""
    run_script(ends, own_broker.url, str(spools), topic)
    own_broker.start()
    assert drain_spools(own_broker.url, str(spools), timeout=PATIENCE_S)[:3] == (100, 0, 0)
    assert bodies(own_broker, topic) == [str(n) for n in range(100)]


def test_a_drain_says_what_it_leaves_alone(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "left", 1)
    for body in (b"sent", b"elsewhere", b"newer"):
        with txmq.connect("txmq://127.0.0.1:1", spool=str(spools), timeout=0.3) as away:
            assert away.send(topic, body, partition=0).spooled
    _, foreign, newer = (Path(one.path, "spool.db") for one in spools_below(str(spools)))
    other = "00000000-0000-4000-8000-000000000001"
    changes = {
        foreign: f"UPDATE about SET value = '{other}' WHERE name = 'log_id'",
        newer: "PRAGMA user_version = 9",
    }
    for file, change in changes.items():
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.execute(change)
    result = drain_spools(own_broker.url, str(spools), timeout=PATIENCE_S)
    assert result[:3] == (1, 1, 0)  # how many a later version keeps is not known
    assert [one.path for one in result.problems] == [str(foreign.parent), str(newer.parent)]
    assert other in result.problems[0].problem
    assert "format version 9" in result.problems[1].problem
    assert bodies(own_broker, topic) == ["sent"]


def test_waiting_for_places_is_bounded(
    own_broker: RealBroker, connect: Connect, spools: Path
) -> None:
    topic = topic_of(own_broker, connect, "bounded", 1)
    client = connect(own_broker.url, spool=spools, timeout=0.2)
    client.send(topic, b"first")
    own_broker.kill()
    receipt = client.send(topic, b"second")
    with pytest.raises(RequestTimeout, match="stays on disk"):
        client.spool.wait(0.1)
    with pytest.raises(RequestTimeout, match="stays on disk"):
        client.spool.place(receipt, 0.1)


def test_a_client_without_a_spool_fails_as_before(own_broker: RealBroker, connect: Connect) -> None:
    client = connect(own_broker.url)
    client.send("plain", b"first")
    own_broker.kill()
    with pytest.raises((BrokerUnavailable, TxmqError)):
        client.send("plain", b"second", timeout=0.3)
