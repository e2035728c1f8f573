"""`emit` writes messages within the business transaction, or refuses before it
writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import asyncpg
import psycopg
import psycopg2
import pytest
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

import txmq.aio
from tests.tx.postgres.peers import arguments
from tests.tx.postgres.support import producer
from txmq import emit
from txmq.errors import (
    DatabaseUnavailable,
    LocalProtocolError,
    MessageTooLarge,
    TransactionAborted,
    WalLevelTooLow,
)
from txmq.model import limits
from txmq.relay import slot
from txmq.relay.slot_stream import SlotStream
from txmq.tx.postgres.session import connect
from txmq.wire.logical_message import EmittedMessage, unpack_emitted

NAME = "txmq_relay"


@pytest.fixture
def stream(logical_database: str) -> Iterator[SlotStream]:
    with closing(connect(logical_database, application_name="test")) as connection:
        slot.create(connection, NAME)
    with closing(SlotStream(logical_database, NAME)) as stream:
        yield stream


@pytest.fixture
def service(logical_database: str) -> Iterator[Connection]:
    with closing(producer(logical_database)) as connection:
        yield connection


def found(stream: SlotStream, service: Connection) -> list[list[EmittedMessage]]:
    """Return the messages so far, by transaction."""
    emit(service, "end", b"")
    service.commit()
    transactions: list[list[EmittedMessage]] = []
    while not transactions or transactions[-1][0].topic != "end":
        committed = stream.read(all_stored=True)
        if committed is not None and committed.contents:
            transactions.append(list(map(unpack_emitted, committed.contents)))
    return transactions[:-1]


def test_emitted_messages_come_with_the_commit(stream: SlotStream, service: Connection) -> None:
    emit(service, "orders", b"one\0", key="o-1", tag="created", headers={"a": "b"}, partition=3)
    emit(service, "orders", b"two")
    assert stream.read(all_stored=True) is None
    service.commit()
    [[one, two]] = found(stream, service)
    assert (one.topic, one.partition, *one.message[:4]) == (
        "orders",
        3,
        b"one\0",
        "o-1",
        "created",
        {"a": "b"},
    )
    assert (two.partition, two.message.key, two.message.body) == (None, None, b"two")
    assert one.born_at <= two.born_at


def test_connections_of_asyncio_emit_as_well(
    stream: SlotStream, service: Connection, logical_database: str
) -> None:
    async def story() -> None:
        async with await psycopg.AsyncConnection.connect(logical_database) as one:
            await txmq.aio.emit(one, "orders", b"psycopg", key="o-1")
        other = await asyncpg.connect(**arguments(logical_database))
        async with other.transaction():
            await txmq.aio.emit(other, "orders", b"asyncpg", key="o-1")
        with pytest.raises(LocalProtocolError, match="no transaction"):
            await txmq.aio.emit(other, "orders", b"x")
        with pytest.raises(LocalProtocolError, match="blocks"):
            await txmq.aio.emit(service, "orders", b"x")
        await other.close()

    asyncio.run(story())
    [[one], [other]] = found(stream, service)
    assert (one.message.body, other.message.body) == (b"psycopg", b"asyncpg")


def test_rolled_back_messages_are_not_decoded(stream: SlotStream, service: Connection) -> None:
    emit(service, "orders", b"gone")
    service.rollback()
    emit(service, "orders", b"kept")
    with service.cursor() as cursor:
        cursor.execute("SAVEPOINT part")
        emit(service, "orders", b"withdrawn")
        cursor.execute("ROLLBACK TO SAVEPOINT part")
    service.commit()
    [[only]] = found(stream, service)
    assert only.message.body == b"kept"


def test_the_largest_message_goes_through(stream: SlotStream, service: Connection) -> None:
    emit(service, "orders", bytes(limits.MESSAGE))
    service.commit()
    [[only]] = found(stream, service)
    assert only.message.body == bytes(limits.MESSAGE)


def test_a_message_that_is_too_large_leaves_the_transaction_as_it_was(service: Connection) -> None:
    emit(service, "orders", b"x")
    with pytest.raises(MessageTooLarge):
        emit(service, "orders", bytes(limits.MESSAGE + 1))
    service.commit()


def test_a_server_without_logical_decoding_leaves_the_transaction_as_it_was(database: str) -> None:
    with closing(producer(database)) as service:
        with pytest.raises(WalLevelTooLow, match="replica"):
            emit(service, "orders", b"x")
        with service.cursor() as cursor:
            cursor.execute("SELECT 1")
        service.commit()


def test_a_message_outside_a_transaction_is_refused(service: Connection) -> None:
    service.autocommit = True
    with pytest.raises(LocalProtocolError, match="no transaction is open"):
        emit(service, "orders", b"x")


def test_a_failed_transaction_takes_no_message(service: Connection) -> None:
    with service.cursor() as cursor, pytest.raises(psycopg2.DataError):
        cursor.execute("SELECT 1 / 0")
    with pytest.raises(TransactionAborted):
        emit(service, "orders", b"x")


def test_a_lost_connection_is_reported(service: Connection, logical_database: str) -> None:
    service.cursor().execute("SELECT 1")
    with (
        closing(connect(logical_database, application_name="test")) as other,
        other.cursor() as cursor,
    ):
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", (service.info.backend_pid,))
    with pytest.raises(DatabaseUnavailable):
        emit(service, "orders", b"x")
