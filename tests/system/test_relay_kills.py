"""Relays, brokers and databases killed while services emit messages.

Each committed message comes once, in the order of its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.reporting import Report
from tests.system.emit_worker import RELAY, SLOT, running_relay
from tests.system.order_system import TOPIC, OrderSystem, order_system
from tests.system.supervisor import WorkerSpec
from tests.system.topic_reader import read_topic
from txmq import emit
from txmq.relay import slot
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import connect

POINTS = ("relay.after_store", "relay.after_feedback")
DEATHS = 12  # of relays, at each crash point
RESTARTS = 3
LARGE = 20_000


@pytest.fixture
def system(tmp_path: Path, logical_database: str) -> Iterator[OrderSystem]:
    with closing(connect(logical_database, application_name="test")) as connection:
        slot.create(connection, SLOT)
    with order_system(tmp_path, logical_database) as system:
        yield system


def contending_workers(*keys: str) -> list[WorkerSpec]:
    """Return services that contend for the same keys."""
    return [WorkerSpec(f"writer-{at}", arguments=keys) for at in range(4)]


ENDLESS_RELAY = WorkerSpec(RELAY, arguments=(RELAY,))


def message_count(system: OrderSystem) -> int:
    """Return the number of messages in the topic."""
    return sum(system.client.call("topic.show", name=TOPIC)["ends"])


def check_with_relay(system: OrderSystem) -> dict[str, int]:
    """Let a relay bring the remaining messages, and check that rows and messages are
    the same orders.
    """
    rows = len(system.rows())
    with running_relay(system.broker.url, system.dsn):
        wait_until(lambda: message_count(system) >= rows, what=f"{rows} messages")
    return system.check()


def wait_for_messages(system: OrderSystem, more: int) -> None:
    wanted = message_count(system) + more
    wait_until(lambda: message_count(system) >= wanted, what=f"{more} messages")


def test_relays_killed_between_store_and_confirmation(system: OrderSystem, report: Report) -> None:
    dying = [WorkerSpec(point, point, DEATHS, (RELAY,)) for point in POINTS]
    with system.run_workers(
        *dying, *contending_workers("a", "b", "c"), program="emit_worker"
    ) as running_workers:
        wait_until(
            lambda: all(running_workers.deaths()[point] == DEATHS for point in POINTS),
            what="all deaths",
        )
    report(dict.fromkeys(POINTS, DEATHS) | check_with_relay(system))


def test_brokers_killed_under_a_relay(system: OrderSystem, report: Report) -> None:
    with system.run_workers(ENDLESS_RELAY, *contending_workers("a", "b"), program="emit_worker"):
        for _ in range(RESTARTS):
            wait_for_messages(system, 50)
            system.broker.kill()
            system.broker.start()
        wait_for_messages(system, 10)
    report({"kills": RESTARTS} | check_with_relay(system))


def test_databases_that_crash_under_a_relay(
    system: OrderSystem, logical_postgres: OwnServer, report: Report
) -> None:
    with system.run_workers(ENDLESS_RELAY, *contending_workers("a", "b"), program="emit_worker"):
        for _ in range(RESTARTS):
            wait_for_messages(system, 50)
            logical_postgres.restart("immediate")
        wait_for_messages(system, 10)
    report({"restarts": RESTARTS} | check_with_relay(system))


def test_a_large_transaction_comes_whole_and_in_one(system: OrderSystem) -> None:
    with (
        closing(connect(system.dsn, application_name="test")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("BEGIN")
        for number in range(LARGE):
            emit(connection, "large", b"%d" % number, key=f"k{number % 7}")
        with running_relay(system.broker.url, system.dsn):
            with system.run_workers(*contending_workers("a"), program="emit_worker"):
                wait_for_messages(system, 20)
                cursor.execute("COMMIT")
                wait_for_messages(system, 20)
            wait_until(
                lambda: "large" in topics_with_messages(system), what="the large transaction"
            )
            assert topics_with_messages(system)["large"] == LARGE
    check_with_relay(system)
    by_key: dict[str | None, list[int]] = {}
    for message in sorted(
        read_topic(system.client, "large"), key=lambda m: (m.partition, m.offset)
    ):
        by_key.setdefault(message.key, []).append(int(message.body))
    assert by_key == {f"k{key}": list(range(key, LARGE, 7)) for key in range(7)}


def topics_with_messages(system: OrderSystem) -> dict[str, int]:
    """Return the topics with messages, and the number of each."""
    listed = system.client.call("topic.list")["topics"]
    return {topic["name"]: topic["messages"] for topic in listed if topic["messages"]}
