"""Tests of the service, with the fixtures of `pip install 'txmq[testing]'`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg2
import pytest

import txmq
from examples.tested_service.orders import TABLES, charge_waiting, place_order
from txmq.testing.broker_thread import BrokerClock, BrokerThread
from txmq.testing.crash_kit import INBOX, TRANSACTION, CrashKit


def query(dsn: str, statement: str) -> list[Any]:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


@pytest.fixture
def shop(txmq_database: str) -> str:
    query(txmq_database, TABLES)
    return txmq_database


def sent(client: txmq.Client) -> list[int]:
    return sorted(int(found.body) for found in client.find("orders"))


def test_an_order_is_charged_once(txmq_broker: BrokerThread, shop: str) -> None:
    place_order(txmq_broker.url, shop)
    charge_waiting(txmq_broker.url, shop)
    assert query(shop, "SELECT amount FROM charges") == [1]


def test_an_order_exists_if_and_only_if_its_message_does(
    txmq_crash: CrashKit, txmq_broker: BrokerThread, txmq_client: txmq.Client, shop: str
) -> None:
    txmq_client.call("topic.create", name="orders", partitions=1)
    for kill in txmq_crash.kills(place_order, txmq_broker.url, shop, points=TRANSACTION):
        assert query(shop, "SELECT id FROM orders ORDER BY id") == sent(txmq_client), kill
    assert len(txmq_crash.kills_done) >= 6


def test_a_killed_consumer_charges_once(
    txmq_crash: CrashKit, txmq_broker: BrokerThread, shop: str
) -> None:
    for _ in range(3):
        place_order(txmq_broker.url, shop)
    for _kill in txmq_crash.kills(charge_waiting, txmq_broker.url, shop, points=INBOX):
        charge_waiting(txmq_broker.url, shop)
        assert query(shop, "SELECT amount FROM charges ORDER BY amount") == [1, 2, 3]


def test_a_declined_card_is_tried_again_and_then_a_dead_letter(
    txmq_client: txmq.Client,
    txmq_clock: BrokerClock,
    txmq_letters: Callable[..., list[txmq.DeadLetter]],
    txmq_broker: BrokerThread,
    shop: str,
) -> None:
    with txmq_client.consumer("billing", ["orders"], retry=txmq.RetryPolicy((60,), retries=1)):
        pass  # the group, with its policy
    txmq_client.send("orders", b"-5", key="5")
    charge_waiting(txmq_broker.url, shop)
    assert txmq_letters("billing") == []  # it waits for its retry
    txmq_clock.advance(60)
    charge_waiting(txmq_broker.url, shop)
    [letter] = txmq_letters("billing")
    assert (letter.body, letter.error_type) == (
        b"-5",
        "examples.tested_service.orders.CardDeclined",
    )
    assert query(shop, "SELECT * FROM charges") == []
