"""Codecs, loaders, adapters and classes of rows of a service's connection: txmq's own
statements do not go by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import asyncpg
import psycopg
import psycopg2
import pytest
from psycopg2 import extensions, extras

from tests.tx.postgres.peers import KINDS, DriverKind, Peer, peer
from tests.tx.postgres.support import LOG, identity_of, new_token, rows
from txmq.errors import WalLevelTooLow
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.emit import write_emitted
from txmq.tx.postgres.identity import read_server
from txmq.tx.postgres.inbox import Position, applied, claim, note_run, noted_run
from txmq.tx.postgres.outbox import (
    NewOutboxRow,
    SetAside,
    enqueue,
    fetch,
    read_key_status,
    read_status,
)
from txmq.tx.postgres.prepared import look
from txmq.tx.postgres.statement_watch import NO_SENDS
from txmq.tx.postgres.tokens import insert_token, may_have_reported

# What txmq's statements bind or return, and what none of them does.
TYPES = ("uuid", "int4", "int8", "bool", "text", "bytea")
HERE = Position("billing", str(LOG), 7, 3)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> DriverKind:
    found: DriverKind = request.param
    return found


class Foreign:
    """What a value became."""

    def __init__(self, *_: object) -> None:
        """Take any value."""


class FalseRecord(asyncpg.Record):  # type: ignore[misc]  # no types
    """A record that shows other values."""

    def __iter__(self) -> Iterator[object]:
        return iter([Foreign()] * len(self))


async def customize(connection: Any, stack: ExitStack) -> None:
    """Let the connection turn all values into others."""
    if isinstance(connection, psycopg2.extensions.connection):
        customize_psycopg2(connection, stack)
    elif isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        customize_psycopg(connection)
    else:
        await customize_asyncpg(connection)


def customize_psycopg2(connection: Any, stack: ExitStack) -> None:
    connection.cursor_factory = extras.RealDictCursor
    oids = tuple(extensions.string_types)
    extensions.register_type(extensions.new_type(oids, "FOREIGN", Foreign), connection)
    adapted = {(kind, extensions.ISQLQuote): refuse for kind in (str, int, list, bytes, bool)}
    stack.enter_context(mock.patch.dict(extensions.adapters, adapted))


def refuse(value: object) -> object:
    raise TypeError(f"{value!r} is adapted by the caller's rules")


class FalseLoader(psycopg.adapt.Loader):
    """Loads nothing of what there is."""

    def load(self, data: object) -> Foreign:
        return Foreign(data)


class FalseDumper(psycopg.adapt.Dumper):
    """Dumps nothing of what there is."""

    def dump(self, obj: object) -> bytes:
        raise TypeError(f"{obj!r} is dumped by the caller's rules")


def customize_psycopg(connection: Any) -> None:
    connection.row_factory = psycopg.rows.dict_row
    for name in TYPES:
        connection.adapters.register_loader(name, FalseLoader)
    for python in (str, int, list, bytes, bool):
        connection.adapters.register_dumper(python, FalseDumper)


async def customize_asyncpg(connection: Any) -> None:
    for name in TYPES:
        await connection.set_type_codec(
            name, schema="pg_catalog", encoder=refuse, decoder=Foreign, format="text"
        )


@pytest.fixture
def perform(database: str, kind: DriverKind) -> Iterator[Callable[[Any], None]]:
    """Run a scene on a connection of each driver with codecs of its own."""
    options = {"record_class": FalseRecord} if kind.name == "asyncpg" else {}
    with ExitStack() as stack:

        async def performed(scene: Any) -> None:
            async with peer(kind, database, **options) as one:
                await customize(one.connection, stack)
                await scene(one)

        yield lambda scene: kind.run(performed(scene))


def test_the_statements_of_a_block_do_not_go_by_them(
    perform: Callable[[Any], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        driver = one.driver
        block = CallerBlock(driver, new_token(), NO_SENDS)
        await block.begin()
        assert (await read_server(driver)).identity == identity_of(database)
        assert await read_status(driver, [LOG]) == {LOG: (False, False)}
        assert await read_key_status(driver, LOG, [3, 4]) == (False, False)
        assert not await may_have_reported(driver, LOG, 1)
        block.end()
        inserted = await insert_token(driver, block.token, [LOG], block=block)
        assert inserted.server.system_id == identity_of(database).system_id
        await guarded_commit(driver, block.token)
        await block.close()

    perform(scene)
    assert rows(database, "SELECT count(*) FROM txmq_token") == [(1,)]


def test_the_statements_of_a_joined_block_do_not_go_by_them(
    perform: Callable[[Any], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        await one.execute("BEGIN")
        block = CallerBlock(one.driver, new_token(), NO_SENDS)
        await block.begin()
        assert await block.roll_back()

    perform(scene)


def test_the_statements_of_a_branch_do_not_go_by_them(
    perform: Callable[[Any], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        block = CallerBlock(one.driver, new_token(), NO_SENDS)
        await block.begin()
        work = await look(one.driver, block)
        assert (work.server, work.has_outbox) == (identity_of(database), True)
        assert await block.roll_back()

    perform(scene)


def test_the_statements_of_an_inbox_do_not_go_by_them(
    perform: Callable[[Any], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        driver, run = one.driver, str(new_token())
        assert await claim(driver, {HERE: [5, 6]}, first="BEGIN; ") == {(HERE, 5), (HERE, 6)}
        await guarded_commit(driver, new_token())
        assert (await applied(driver, HERE)).ranges == ((5, 7),)
        assert await noted_run(driver, HERE) is None
        await note_run(driver, HERE, run)
        assert await noted_run(driver, HERE) == run
        await driver.roll_back()

    perform(scene)


def test_the_statements_of_the_outbox_do_not_go_by_them(
    perform: Callable[[Any], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        driver, token = one.driver, new_token()
        row = NewOutboxRow(LOG, token, new_token(), "orders", 1, [3, -4], b"\0content\xff")
        await driver.execute("BEGIN; SAVEPOINT s")
        await enqueue(driver, [row])
        [found] = await fetch(driver, LOG, [], SetAside())
        assert (found.token, found.service, found.content) == (token, "orders", row.content)
        assert await fetch(driver, LOG, [found.published], SetAside()) == []
        await driver.roll_back()

    perform(scene)


def test_a_message_in_the_log_does_not_go_by_them(perform: Callable[[Any], None]) -> None:
    async def scene(one: Peer) -> None:
        await one.execute("BEGIN")
        with pytest.raises(WalLevelTooLow, match="is replica"):
            await write_emitted(one.driver, b"payload\0")
        await one.driver.roll_back()

    perform(scene)
