"""Tests of two of the services, with the fixtures of `pip install '.[testing]'`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import txmq
from examples.services.payment import LIMIT, charge
from examples.services.till import sell
from txmq.testing.broker_thread import BrokerClock, BrokerThread
from txmq.testing.crash_kit import INBOX, TRANSACTION, CrashKit

TABLES = Path(__file__).with_name("schema.sql").read_text("utf-8")
CHARGES = "SELECT order_id FROM charges ORDER BY id"


def query(dsn: str, statement: str) -> list[Any]:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


def sell_one_more(url: str, dsn: str) -> None:
    engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"), poolclass=NullPool)
    txmq.sqlalchemy.install(engine)
    order = {"id": str(len(query(dsn, "SELECT id FROM orders"))), "cents": 900}
    with (
        txmq.connect(url, service="till") as client,
        Session(engine, info={"txmq": client}) as session,
        session.begin(),
    ):
        sell(session, json.dumps(order | {"customer": "c-7", "address": "12 High Street"}))


def charge_waiting(url: str, dsn: str, retry: txmq.RetryPolicy | None = None) -> None:
    with txmq.connect(url, service="payment") as client:
        consumer = client.consumer("payment", ["orders"], mode="ordered", retry=retry)
        consumer.run(charge, inbox=lambda: psycopg2.connect(dsn), idle_exit=0.3)


@pytest.fixture
def shop(txmq_database: str) -> str:
    query(txmq_database, TABLES)
    return txmq_database


def test_a_sale_is_charged(txmq_broker: BrokerThread, shop: str) -> None:
    sell_one_more(txmq_broker.url, shop)
    charge_waiting(txmq_broker.url, shop)
    assert query(shop, CHARGES) == ["0"]


def test_a_sale_exists_if_and_only_if_its_message_does(
    txmq_crash: CrashKit, txmq_broker: BrokerThread, txmq_client: txmq.Client, shop: str
) -> None:
    txmq_client.call("topic.create", name="orders", partitions=1)
    for kill in txmq_crash.kills(sell_one_more, txmq_broker.url, shop, points=TRANSACTION):
        sent = [json.loads(found.body)["id"] for found in txmq_client.find("orders")]
        assert query(shop, "SELECT id FROM orders ORDER BY id") == sorted(sent), kill
    assert len(txmq_crash.kills_done) >= 6


def test_a_killed_payment_charges_once(
    txmq_crash: CrashKit, txmq_broker: BrokerThread, shop: str
) -> None:
    for _ in range(3):
        sell_one_more(txmq_broker.url, shop)
    for _kill in txmq_crash.kills(charge_waiting, txmq_broker.url, shop, points=INBOX):
        charge_waiting(txmq_broker.url, shop)
        assert query(shop, CHARGES) == ["0", "1", "2"]


def test_a_refused_card_is_tried_again_and_then_a_dead_letter(
    txmq_client: txmq.Client,
    txmq_clock: BrokerClock,
    txmq_letters: Callable[..., list[txmq.DeadLetter]],
    txmq_broker: BrokerThread,
    shop: str,
) -> None:
    once_more = txmq.RetryPolicy((60,), retries=1)
    order = json.dumps({"id": "0", "cents": LIMIT + 1}).encode()
    txmq_client.send("orders", order, key="c-7")
    charge_waiting(txmq_broker.url, shop, once_more)
    assert txmq_letters("payment") == []  # it waits for its retry
    txmq_clock.advance(60)
    charge_waiting(txmq_broker.url, shop)
    [letter] = txmq_letters("payment")
    assert (letter.body, letter.error_type) == (order, "examples.services.payment.CardRefused")
    assert query(shop, CHARGES) == []
