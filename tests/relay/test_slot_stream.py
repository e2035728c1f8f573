"""Reading a slot: the order of commits, confirmations, and long transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

from tests.tx.postgres.support import producer
from txmq import emit
from txmq.relay import slot
from txmq.relay.pgoutput import CommittedTransaction
from txmq.relay.slot_stream import SlotStream
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import connect
from txmq.wire.logical_message import unpack_emitted

NAME = "txmq_relay"


@pytest.fixture
def dsn(logical_database: str) -> str:
    """A database with a slot."""
    with closing(connect(logical_database, application_name="test")) as connection:
        slot.create(connection, NAME)
    return logical_database


@pytest.fixture
def stream(dsn: str) -> Iterator[SlotStream]:
    with closing(SlotStream(dsn, NAME)) as stream:
        yield stream


@pytest.fixture
def early(dsn: str) -> Iterator[Connection]:
    """A transaction that has emitted, and commits when the test says so."""
    with closing(producer(dsn)) as connection:
        emit(connection, "t", b"early")
        yield connection


def committed(dsn: str, body: bytes) -> None:
    with closing(producer(dsn)) as connection:
        emit(connection, "t", body)
        connection.commit()


def next_of(stream: SlotStream) -> CommittedTransaction:
    """Return the next transaction with messages."""
    found: list[CommittedTransaction] = []

    def look() -> bool:
        committed = stream.read(all_stored=True)
        found.extend([committed] if committed is not None and committed.contents else [])
        return bool(found)

    wait_until(look, what="a transaction")
    return found[0]


def body_of(found: CommittedTransaction) -> bytes:
    return unpack_emitted(found.contents[0]).message.body


def test_transactions_come_in_the_order_of_their_commits(
    early: Connection, dsn: str, stream: SlotStream
) -> None:
    committed(dsn, b"one")
    committed(dsn, b"two")
    early.commit()
    found = [next_of(stream) for _ in range(3)]
    assert list(map(body_of, found)) == [b"one", b"two", b"early"]
    assert found == sorted(found, key=lambda one: one.lsn)


def test_what_was_confirmed_does_not_come_again_and_the_rest_does(dsn: str) -> None:
    with closing(SlotStream(dsn, NAME)) as stream:
        for body in (b"one", b"two"):
            committed(dsn, body)
        stream.confirm(next_of(stream).end_lsn)
        next_of(stream)
    with closing(free_stream(dsn)) as stream:
        assert body_of(next_of(stream)) == b"two"


def free_stream(dsn: str) -> SlotStream:
    """Return a stream, once the server has freed the slot."""
    with closing(connect(dsn, application_name="test")) as connection:
        wait_until(
            lambda: slot.require(connection, NAME).active_pid is None, what="the slot is free"
        )
    return SlotStream(dsn, NAME)


def test_a_piece_from_before_what_was_confirmed_is_the_last_until_all_is_stored(
    early: Connection, dsn: str, stream: SlotStream
) -> None:
    committed(dsn, b"one")
    stream.confirm(next_of(stream).end_lsn)
    committed(dsn, b"not yet stored")
    next_of(stream)
    early.commit()

    def look() -> bool:
        assert stream.read(all_stored=False) is None
        return stream.blocked

    wait_until(look, what="the early transaction begins")
    assert stream.read(all_stored=False) is None
    assert body_of(next_of(stream)) == b"early"
