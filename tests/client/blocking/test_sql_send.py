"""`txmq.send` of the database: messages of triggers and psql, by way of the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from uuid import UUID

import psycopg2
import pytest

from tests.client.real import RealBroker
from tests.client.world import World
from txmq.testing.wait import PATIENCE_S, wait_until

TRIGGER = """
CREATE OR REPLACE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM txmq.send(
        TG_ARGV[0], NEW.id, NEW.id, jsonb_build_object('op', TG_OP), TG_ARGV[1]::uuid);
    RETURN NEW;
END $$;
CREATE TRIGGER announce AFTER INSERT OR UPDATE ON orders
FOR EACH ROW EXECUTE FUNCTION announce(%s, %s)
"""


@pytest.fixture
def connection(world: World) -> Iterator[Any]:
    """A connection to a database whose rows are announced to the world's topic."""
    world.client.call("topic.create", name=world.topic, partitions=1)
    with closing(psycopg2.connect(world.dsn)) as connection:
        wait_until(lambda: registered(connection, world.client.log_id))
        with connection, connection.cursor() as cursor:
            cursor.execute(TRIGGER, (world.topic, str(world.client.log_id)))
        yield connection


def registered(connection: Any, log_id: UUID) -> bool:
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT FROM txmq_broker WHERE log_id = %s", (str(log_id),))
        return bool(cursor.rowcount)


def bodies(world: World) -> list[str]:
    return [found.body.decode() for found in world.stored()]


def published(world: World, *expected: str) -> None:
    """Wait for as many messages, and compare them in their order."""
    wait_until(lambda: len(bodies(world)) >= len(expected))
    assert bodies(world) == list(expected)


def test_a_trigger_s_messages_are_those_of_committed_rows_in_their_order(
    world: World, connection: Any
) -> None:
    for n in range(3):
        world.insert(f"o-{n}", connection)
        connection.commit()
    world.insert("o-3", connection)
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT s")
        world.insert("o-4", connection)
        cursor.execute("ROLLBACK TO s; UPDATE orders SET paid = true WHERE id = 'o-0'")
    connection.commit()
    world.insert("o-5", connection)
    connection.rollback()
    world.insert("o-6", connection)
    with suppress(psycopg2.Error), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")
    connection.commit()  # ROLLBACK
    published(world, "o-0", "o-1", "o-2", "o-3", "o-0")
    assert world.orders() == {"o-0", "o-1", "o-2", "o-3"}
    [found] = world.client.find(world.topic, key="o-1")
    assert found.headers == {"op": "INSERT"}


def test_a_key_keeps_its_order_between_triggers_and_clients(world: World, connection: Any) -> None:
    world.insert("o-1", connection)
    connection.commit()
    for n in range(3):
        with world.client.transaction(connection, timeout=PATIENCE_S) as tx:
            tx.send(world.topic, f"client-{n}".encode(), key="o-1")
        with connection, connection.cursor() as cursor:
            cursor.execute("UPDATE orders SET paid = NOT paid WHERE id = 'o-1'")
    published(world, "o-1", "client-0", "o-1", "client-1", "o-1", "client-2", "o-1")


@pytest.mark.parametrize("weak", ["off", "local"])
def test_a_weak_commit_is_made_a_strong_one(world: World, connection: Any, weak: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL synchronous_commit = {weak}")
        world.insert("o-1", connection)
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("on",)
    connection.commit()
    published(world, "o-1")


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("'no topic', NULL, 'b'", "invalid topic name"),
        ("'.hidden', NULL, 'b'", "invalid topic name"),
        ("'_txmq.audit', NULL, 'b'", "invalid topic name"),
        ("NULL, NULL, 'b'", "invalid topic name NULL"),
        ("'t', repeat('k', 1025), 'b'", "key of 1025 bytes"),
        ("'t', NULL, NULL::bytea", "body of NULL bytes"),
        ("'t', NULL, repeat('b', 4194305)", "body of 4194305 bytes"),
        ("'t', NULL, 'b', '[]'", "invalid headers"),
        ("'t', NULL, 'b', '{\"a\": 1}'", "invalid headers"),
        ("'t', NULL, 'b', NULL, gen_random_uuid()", "0 brokers work on this database for log"),
    ],
)
def test_what_no_broker_could_publish_is_refused(
    world: World, connection: Any, arguments: str, refusal: str
) -> None:
    with connection.cursor() as cursor, pytest.raises(psycopg2.Error, match=refusal):
        cursor.execute(f"SELECT txmq.send({arguments})")
    connection.rollback()


def test_of_several_brokers_one_has_to_be_named(
    world: World, connection: Any, also_deciding: RealBroker, connect: Any
) -> None:
    other = connect(also_deciding.url)
    other.call("topic.create", name=world.topic, partitions=1)
    wait_until(lambda: registered(connection, other.log_id))
    with connection.cursor() as cursor, pytest.raises(psycopg2.Error, match="brokers work on") as e:
        cursor.execute("SELECT txmq.send(%s, NULL, 'b')", (world.topic,))
    assert (e.value.diag.message_hint or "").startswith("name the log")
    connection.rollback()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT txmq.send(%s, NULL, '\\x00ff'::bytea, log_id => %s)",
            (world.topic, str(other.log_id)),
        )
        [(token,)] = cursor.fetchall()
    connection.commit()
    wait_until(lambda: bool(also_deciding.read(world.topic)))
    [found] = also_deciding.read(world.topic)
    assert (found.body, found.message_id) == (b"\x00\xff", f"{UUID(str(token)).hex}-0")
    assert other.call("tx.show", token=UUID(str(token)).hex)["state"] == "PUBLISHED"
