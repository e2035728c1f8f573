"""Transactions whose topics have grown since the client looked them up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from uuid import uuid4

import psycopg2
import pytest

from tests.client.ledgers import Ledgers
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.transaction import TransactionOperations
from txmq.client.protocol.sender.rows import PART_ROWS
from txmq.errors import Conflict, MessageTooLarge
from txmq.model.keys import partition_of
from txmq.testing.wait import PATIENCE_S, wait_until

Connect = Callable[..., Client]
FEW, GROWN = 2, 7
KEYS = [f"k{n}" for n in range(50)]


def make_topics(client: Client, *names: str) -> tuple[str, ...]:
    """Create topics with few partitions, and have the client look them up."""
    topics = tuple(f"{name}-{uuid4().hex[:8]}" for name in names)
    for topic in topics:
        client.call("topic.create", name=topic, partitions=FEW)
        client.send(topic, b"before", key=KEYS[0])
    return topics


def grow(client: Client, *topics: str) -> None:
    for topic in topics:
        client.call("topic.grow", name=topic, partitions=GROWN)


def send(tx: TransactionOperations, topics: tuple[str, ...], count: int) -> None:
    """Send so many messages to each topic, in parts of several kinds of calls."""
    for topic in topics:
        bodies = [b"%d" % n for n in range(count)]
        tx.send_many(topic, bodies, [KEYS[n % len(KEYS)] for n in range(count)])
        tx.send(topic, b"%d" % count, key=KEYS[0])


def require_published(broker: RealBroker, topics: tuple[str, ...], count: int) -> None:
    """Require each message once, in the partition of its key, and keys in order."""
    for topic in topics:
        found = [one for one in broker.read(topic) if one.body != b"before"]
        assert sorted(int(one.body) for one in found) == list(range(count + 1))
        assert all(one.partition == partition_of(one.key or "", GROWN) for one in found)
        of_keys = defaultdict(list)
        for one in found:
            of_keys[one.key].append(int(one.body))
        assert all(bodies == sorted(bodies) for bodies in of_keys.values())
        assert len({one.message_id for one in found}) == count + 1


@contextmanager
def local(client: Client, _dsn: str) -> Iterator[TransactionOperations]:
    with client.transaction() as tx:
        yield tx
    tx.wait_published(PATIENCE_S)


@contextmanager
def half(client: Client, _dsn: str) -> Iterator[TransactionOperations]:
    with client.transaction(checker="none") as tx:
        yield tx
    tx.wait_published(PATIENCE_S)


@contextmanager
def prepared_half(client: Client, _dsn: str) -> Iterator[TransactionOperations]:
    with client.transaction(checker="none") as tx:
        yield tx
        tx.prepare()
    tx.wait_published(PATIENCE_S)


@contextmanager
def postgres(client: Client, dsn: str) -> Iterator[TransactionOperations]:
    with closing(psycopg2.connect(dsn)) as connection:
        with client.transaction(connection) as tx:
            yield tx
        tx.wait_published(PATIENCE_S)


KINDS = (local, half, prepared_half, postgres)
COUNTS = (10, 3 * PART_ROWS)  # messages of one part, and of several
STALE = ({0}, {1}, {0, 1, 2})  # of three topics: the first, a later one, all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("stale", STALE, ids=str)
def test_a_transaction_goes_on_by_itself_where_its_topics_have_grown(
    deciding: RealBroker,
    shared_database: str,
    connect: Connect,
    kind: Callable[..., Iterator[TransactionOperations]],
    count: int,
    stale: set[int],
) -> None:
    client = connect(deciding.url, retries=0)
    topics = make_topics(client, "a", "b", "c")
    other = connect(deciding.url)
    grow(other, *(topics[n] for n in stale))
    with kind(client, shared_database) as tx:  # type: ignore[attr-defined]  # a context manager
        send(tx, topics, count)
    require_published(deciding, tuple(topics[n] for n in stale), count)
    assert len(deciding.read(topics[2])) == count + 2


def test_a_two_phase_commit_goes_on_by_itself(ledgers: Ledgers, connect: Connect) -> None:
    client, count = ledgers.client, 2 * PART_ROWS
    topics = make_topics(client, "a", "b")
    grow(connect(ledgers.broker.url), *topics)
    with client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
        send(tx, topics, count)
    tx.wait_published(PATIENCE_S)
    require_published(ledgers.broker, topics, count)


def test_a_job_goes_on_by_itself(real: RealBroker, connect: Connect) -> None:
    client, count = connect(real.url, retries=0), 20_000
    topics = make_topics(client, "a", "b")
    job = client.job()
    group = job.group()
    grow(connect(real.url), *topics)
    send(group, topics, count)  # type: ignore[arg-type]  # it has the same calls
    winners = [group.store()]
    job.decide(winners)
    assert job.wait_published(winners, PATIENCE_S)
    require_published(real, topics, count)


def test_a_topic_that_grows_all_the_time_aborts_no_transaction(
    deciding: RealBroker, shared_database: str, connect: Connect
) -> None:
    client, other = connect(deciding.url, connections=32), connect(deciding.url)
    (topic,) = make_topics(client, "t")

    def work(number: int) -> None:
        with KINDS[number % len(KINDS)](client, shared_database) as tx:
            for n in range(3):
                tx.send(topic, b"%d-%d" % (number, n), key=f"{number}")

    with ThreadPoolExecutor(16) as pool:
        works = [pool.submit(work, number) for number in range(64)]
        for partitions in range(FEW + 1, 30):
            wait_until(lambda: _grown(other, topic, partitions))  # noqa: B023  # called at once
        for done in works:
            done.result(PATIENCE_S)
    bodies = [found.body for found in deciding.read(topic)]
    assert len(bodies) == len(set(bodies)) == 1 + 64 * 3


def _grown(client: Client, topic: str, partitions: int) -> bool:
    try:
        client.call("topic.grow", name=topic, partitions=partitions)
    except Conflict:  # transactions hold keys
        return False
    return True


def test_a_half_message_of_several_parts_that_is_refused_frees_its_keys_at_once(
    real: RealBroker, connect: Connect
) -> None:
    client = connect(real.url)
    free, small = make_topics(client, "free", "small")
    client.call("topic.alter", name=small, message_bytes=10)
    tx = client.transaction(checker="none")
    tx.__enter__()
    tx.send_many(free, [b"x"] * 2 * PART_ROWS, KEYS[:1] * 2 * PART_ROWS)
    tx.send(small, bytes(100))
    with pytest.raises(MessageTooLarge):
        tx.__exit__(None, None, None)
    wait_until(
        lambda: client.call("tx.show", token=tx.token.hex)["state"] == "ROLLED_BACK",
        what="the rollback",
    )
    client.send(free, b"after", key=KEYS[0])
    assert [found.body for found in real.read(free)] == [b"before", b"after"]
