"""Databases that fail: a full disk or blocked resources (docs/FAULTS.md 55, 57).

A trigger raises PostgreSQL's error 53100, so that no disk has to be filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Barrier
from typing import Any

import psycopg2
import pytest

from tests.client.world import World
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.awaited import postgres
from txmq.errors import DatabaseUnavailable, InDoubt
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import guarded_commit

FILL = """
CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device'
       USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER no_space BEFORE INSERT OR UPDATE ON txmq_token
    FOR EACH ROW EXECUTE FUNCTION no_space()
"""
EMPTY = "DROP FUNCTION IF EXISTS no_space CASCADE"


def execute(dsn: str, statement: str) -> None:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)


@contextmanager
def full(dsn: str) -> Iterator[None]:
    execute(dsn, FILL)
    try:
        yield
    finally:
        execute(dsn, EMPTY)


def book(world: World, order: str) -> Transaction:
    with world.client.transaction(world.connection, check_after=0.2) as tx:
        world.insert(order)
        tx.send(world.topic, order.encode(), key="k")
    return tx


def test_fault_55_a_transaction_that_finds_the_disk_full_is_rolled_back_whole(world: World) -> None:
    with full(world.dsn):
        with pytest.raises(DatabaseUnavailable) as refused:
            book(world, "meanwhile")
        assert (refused.value.outcome, refused.value.retriable) == ("not done", True)
        wait_until(world.settled, what="the half message to be taken back")
        assert (world.orders(), world.messages()) == (set(), set())
    book(world, "after").wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"after"}


@pytest.mark.parametrize("state", ["PUBLISHED", "ROLLED_BACK"])
def test_fault_55_a_full_disk_decides_nothing_and_the_row_does_afterwards(
    world: World,
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    async def lost(driver: Any, token: Any) -> None:
        if state == "PUBLISHED":
            guarded_commit(driver, token)
        driver.connection.close()
        execute(world.dsn, FILL)
        raise InDoubt("the connection broke", token=str(token))

    monkeypatch.setattr(postgres, "guarded_commit", lost)
    client = connect(world.broker.url, timeout=1.0)  # within which it asks
    tx = client.transaction(world.connection, check_after=0.2)
    try:
        tx.__enter__()
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        with pytest.raises(InDoubt):
            tx.__exit__(None, None, None)
        wait_until(
            lambda: world.client.call("tx.show", token=tx.token.hex)["tries"] >= 2,
            what="checks",
        )
        shown = world.client.call("tx.show", token=tx.token.hex)
        assert shown["state"] == "UNDECIDED"
        assert "53100" in shown["check_reason"]
    finally:
        execute(world.dsn, EMPTY)
    wait_until(lambda: world.state(tx.token) == state)
    assert world.orders() == world.messages() == ({"o-1"} if state == "PUBLISHED" else set())


def test_a_deadlock_ends_one_transaction_and_it_may_be_tried_again(world: World) -> None:
    execute(world.dsn, "INSERT INTO orders (id) VALUES ('a'), ('b')")
    barrier = Barrier(2)

    def pay(first: str, second: str) -> bool:
        with closing(psycopg2.connect(world.dsn)) as connection:
            try:
                with world.client.transaction(connection) as tx, connection.cursor() as cursor:
                    cursor.execute("UPDATE orders SET paid = true WHERE id = %s", (first,))
                    barrier.wait(PATIENCE_S)
                    tx.send(world.topic, first.encode(), key=first)
                    cursor.execute("UPDATE orders SET paid = true WHERE id = %s", (second,))
            except psycopg2.errors.DeadlockDetected:
                return False
        return True

    with ThreadPoolExecutor() as pool:
        paid = {first: pool.submit(pay, first, second) for first, second in ("ab", "ba")}
        done = {first for first, future in paid.items() if future.result(PATIENCE_S)}
    assert len(done) == 1
    wait_until(world.settled)
    assert world.messages() == done
