"""Relays, brokers and databases killed under a load of emitted messages: each committed
one once, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.reporting import Report
from tests.system.emitting import RELAY, SLOT, relaying
from tests.system.farm import Lane
from tests.system.reading import whole_topic
from tests.system.shop import TOPIC, Shop, opened
from txmq import emit
from txmq.relay import slot
from txmq.testing.postgres import OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import connect

POINTS = ("relay.after_store", "relay.after_feedback")
DEATHS = 12  # of relays, at each point
RESTARTS = 3
PATIENCE_S = 60.0
LARGE = 20_000


@pytest.fixture
def shop(tmp_path: Path, logical_database: str) -> Iterator[Shop]:
    with closing(connect(logical_database, application_name="test")) as connection:
        slot.create(connection, SLOT)
    with opened(tmp_path, logical_database) as shop:
        yield shop


def writers(*keys: str) -> list[Lane]:
    """Services that contend for the same keys."""
    return [Lane(f"writer-{at}", arguments=keys) for at in range(4)]


RELAYING = Lane(RELAY, arguments=(RELAY,))


def sent(shop: Shop) -> int:
    """How many messages are in the topic."""
    return sum(shop.client.call("topic.show", name=TOPIC)["ends"])


def judged(shop: Shop) -> dict[str, int]:
    """A relay that lives brings what is left; then rows and messages are the same
    orders.
    """
    rows = len(shop.rows())
    with relaying(shop.broker.url, shop.dsn):
        wait_until(lambda: sent(shop) >= rows, PATIENCE_S, what=f"{rows} messages")
    return shop.judge()


def wait_for_messages(shop: Shop, more: int) -> None:
    wanted = sent(shop) + more
    wait_until(lambda: sent(shop) >= wanted, PATIENCE_S, what=f"{more} messages")


def test_relays_killed_between_store_and_confirmation(shop: Shop, report: Report) -> None:
    dying = [Lane(point, point, DEATHS, (RELAY,)) for point in POINTS]
    with shop.farm(*dying, *writers("a", "b", "c"), work="emitting") as farm:
        wait_until(
            lambda: all(farm.hits()[point] == DEATHS for point in POINTS),
            PATIENCE_S,
            what="all deaths",
        )
    report(dict.fromkeys(POINTS, DEATHS) | judged(shop))


def test_brokers_killed_under_a_relay(shop: Shop, report: Report) -> None:
    with shop.farm(RELAYING, *writers("a", "b"), work="emitting"):
        for _ in range(RESTARTS):
            wait_for_messages(shop, 50)
            shop.broker.kill()
            shop.broker.start()
        wait_for_messages(shop, 10)
    report({"kills": RESTARTS} | judged(shop))


def test_databases_that_crash_under_a_relay(
    shop: Shop, logical_postgres: OwnServer, report: Report
) -> None:
    with shop.farm(RELAYING, *writers("a", "b"), work="emitting"):
        for _ in range(RESTARTS):
            wait_for_messages(shop, 50)
            logical_postgres.restart("immediate")
        wait_for_messages(shop, 10)
    report({"restarts": RESTARTS} | judged(shop))


def test_a_large_transaction_comes_whole_and_in_one(shop: Shop) -> None:
    with (
        closing(connect(shop.dsn, application_name="test")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("BEGIN")
        for number in range(LARGE):
            emit(connection, "large", b"%d" % number, key=f"k{number % 7}")
        with relaying(shop.broker.url, shop.dsn):
            with shop.farm(*writers("a"), work="emitting"):
                wait_for_messages(shop, 20)
                cursor.execute("COMMIT")
                wait_for_messages(shop, 20)
            wait_until(lambda: "large" in topics(shop), PATIENCE_S, what="the large transaction")
            assert topics(shop)["large"] == LARGE
    judged(shop)
    by_key: dict[str | None, list[int]] = {}
    for message in sorted(
        whole_topic(shop.client, shop.broker.url, "large"), key=lambda m: (m.partition, m.offset)
    ):
        by_key.setdefault(message.key, []).append(int(message.body))
    assert by_key == {f"k{key}": list(range(key, LARGE, 7)) for key in range(7)}


def topics(shop: Shop) -> dict[str, int]:
    """The topics with messages, and how many they have."""
    listed = shop.client.call("topic.list")["topics"]
    return {topic["name"]: topic["messages"] for topic in listed if topic["messages"]}
