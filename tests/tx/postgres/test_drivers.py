"""The same rules over each driver: blocking ones, and those of asyncio."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import psycopg2
import pytest

import txmq.asyncpg
import txmq.psycopg
from tests.tx.postgres.peers import KINDS, DriverKind, Peer, arguments, peer
from tests.tx.postgres.support import LOG, OTHER_LOG, identity_of, new_token, rows
from txmq.errors import (
    DatabaseConflict,
    DatabaseUnavailable,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
    TransactionEnded,
    TxmqError,
    UnsupportedServer,
)
from txmq.postgres import EnlistConnection
from txmq.testing.wait import PATIENCE_S
from txmq.tx.postgres import caller, identity
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import commit_and, guarded_commit
from txmq.tx.postgres.driver import Driver, Status
from txmq.tx.postgres.drivers import async_driver, blocking_driver, driver_of, uninterrupted
from txmq.tx.postgres.emit import write_emitted
from txmq.tx.postgres.enlist import EnlistedBlock
from txmq.tx.postgres.identity import Server, read_server, server_of
from txmq.tx.postgres.inbox import Position, applied, claim, note_run, noted_run
from txmq.tx.postgres.inbox_compaction import compact
from txmq.tx.postgres.outbox import NewOutboxRow, enqueue, read_key_status, read_status
from txmq.tx.postgres.prepared import Ending, commit_prepared, look, prepare, roll_back_prepared
from txmq.tx.postgres.statement_watch import Sends
from txmq.tx.postgres.tokens import insert_token, may_have_reported
from txmq.tx.xid import branches

Scene = Callable[[Peer], Coroutine[Any, Any, None]]
HERE = Position("billing", str(LOG), 7, 3)
TABLE = "CREATE TABLE business (n int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)"
INSERT = "INSERT INTO business VALUES (1)"


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> DriverKind:
    found: DriverKind = request.param
    return found


@pytest.fixture
def perform(database: str, kind: DriverKind) -> Callable[[Scene], None]:
    """Run a scene on a connection of each driver."""
    rows(database, TABLE)

    async def performed(scene: Scene) -> None:
        async with peer(kind, database) as one:
            await scene(one)

    return lambda scene: kind.run(performed(scene))


class Marks:
    """The sends of a transaction, as far as savepoints withdraw them."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    @property
    def sends(self) -> Sends:
        return Sends(lambda: len(self.sent), self._withdraw)

    def _withdraw(self, mark: int) -> None:
        del self.sent[mark:]


async def begun(one: Peer, marks: Marks | None = None) -> CallerBlock:
    block = CallerBlock(one.driver, new_token(), (marks or Marks()).sends)
    await block.begin()
    return block


async def finish(block: CallerBlock) -> None:
    """End a block as a transaction with messages does."""
    block.end()
    await commit_with_token(block)
    await block.close()


async def commit_with_token(block: CallerBlock) -> None:
    await insert_token(block.driver, block.token, [OTHER_LOG, LOG], block=block)
    await guarded_commit(block.driver, block.token)


async def commit_alone(block: CallerBlock) -> None:
    await block.prove()
    await guarded_commit(block.driver, block.token)


def business(database: str) -> list[tuple[object, ...]]:
    return rows(database, "SELECT n FROM business ORDER BY n")


def tokens(database: str) -> int:
    [(count,)] = rows(database, "SELECT count(*) FROM txmq_token")
    return int(str(count))


def test_a_block_commits_rows_and_token_rows(
    perform: Callable[[Scene], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        before = one.driver.autocommit
        block = await begun(one)
        await one.execute(INSERT)
        server = await server_of(one.driver)
        assert server.identity == identity_of(database)
        await finish(block)
        assert one.driver.status is Status.IDLE
        assert one.driver.autocommit is before
        await one.execute("INSERT INTO business VALUES (2)")  # the connection is the caller's
        await one.driver.roll_back()

    perform(scene)
    assert (1,) in business(database)
    assert tokens(database) == 2


def test_a_standby_that_was_promoted_is_looked_at_again(
    perform: Callable[[Scene], None], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def standby(driver: Driver) -> Server:
        return replace(await read_server(driver), in_recovery=True)

    async def scene(one: Peer) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(identity, "read_server", standby)
            with pytest.raises(UnsupportedServer):
                await server_of(one.driver)
        assert (await server_of(one.driver)).identity == identity_of(database)

    perform(scene)


def test_a_swallowed_error_is_an_abort(perform: Callable[[Scene], None], database: str) -> None:
    async def scene(one: Peer) -> None:
        for with_token in (True, False):
            block = await begun(one)
            await one.execute(INSERT)
            with suppress(Exception):
                await one.execute("SELECT 1 / 0")
            block.end()
            ending = commit_with_token if with_token else commit_alone
            with pytest.raises(TransactionAborted):
                await ending(block)
            assert await block.roll_back()
            assert one.driver.status is Status.IDLE

    perform(scene)
    assert (business(database), tokens(database)) == ([], 0)


def test_savepoints_of_the_caller_withdraw_sends(
    perform: Callable[[Scene], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        marks = Marks()
        block = await begun(one, marks)
        marks.sent.append("kept")
        await one.execute("SAVEPOINT own")
        marks.sent.append("withdrawn")
        await one.execute(INSERT)
        await one.execute("ROLLBACK TO own")
        with suppress(ZeroDivisionError):
            async with caller.savepoint(one.driver):
                await one.execute(INSERT)
                raise ZeroDivisionError
        assert marks.sent == ["kept"]
        await finish(block)

    perform(scene)
    assert (business(database), tokens(database)) == ([], 2)


@pytest.mark.parametrize("inner", ["kept", "rolled back"])
def test_a_drivers_own_transaction_in_a_block_is_a_savepoint(
    perform: Callable[[Scene], None], database: str, inner: str
) -> None:
    async def scene(one: Peer) -> None:
        marks = Marks()
        block = await begun(one, marks)
        with suppress(ZeroDivisionError):
            own = one.connection.transaction()
            await (own.__aenter__() if hasattr(own, "__aenter__") else now(own.__enter__()))
            marks.sent.append(inner)
            await one.execute(INSERT)
            error = ZeroDivisionError() if inner == "rolled back" else None
            given = (type(error) if error else None, error, None)
            await (
                own.__aexit__(*given) if hasattr(own, "__aexit__") else now(own.__exit__(*given))
            )
        assert marks.sent == ([inner] if inner == "kept" else [])
        await finish(block)

    async def without_one(one: Peer) -> None:
        assert not hasattr(one.connection, "transaction")

    perform(lambda one: scene(one) if hasattr(one.connection, "transaction") else without_one(one))
    assert len(business(database)) == (inner == "kept" and tokens(database) == 2)


def test_a_prepared_statement_of_asyncpg_is_followed_when_it_runs(database: str) -> None:
    """SQLAlchemy keeps prepared statements, those of savepoints as well."""

    async def scene() -> None:
        one = await asyncpg.connect(
            **arguments(database), connection_class=txmq.asyncpg.EnlistConnection
        )
        kept = {text: await one.prepare(text) for text in ("SAVEPOINT a", "ROLLBACK TO a", "END")}
        marks = Marks()
        async with one.transaction():
            block = EnlistedBlock(driver_of(one), new_token(), marks.sends)
            block.join(nobody(), hooks=True)
            await kept["SAVEPOINT a"].fetch()
            marks.sent.append("withdrawn")
            await kept["ROLLBACK TO a"].fetchval()
            assert marks.sent == []
            with pytest.raises(LocalProtocolError, match="would end transaction"):
                await kept["END"].fetch()
            block.release()
        await one.close()

    asyncio.run(scene())


ENLISTING: dict[str, Callable[[str], Any]] = {
    "psycopg2": lambda dsn: psycopg2.connect(dsn, connection_factory=EnlistConnection),
    "psycopg": txmq.psycopg.EnlistConnection.connect,
    "psycopg of asyncio": txmq.psycopg.AsyncEnlistConnection.connect,
    "asyncpg": lambda dsn: asyncpg.connect(
        **arguments(dsn), connection_class=txmq.asyncpg.EnlistConnection
    ),
}


def test_a_block_on_a_connection_that_could_take_messages_along(
    kind: DriverKind, database: str
) -> None:
    rows(database, TABLE)

    async def scene() -> None:
        connection = ENLISTING[kind.name](database)
        one = Peer(await connection if inspect.isawaitable(connection) else connection)
        for number in range(2):
            marks = Marks()
            block = await begun(one, marks)
            await one.execute("SAVEPOINT a")
            marks.sent.append("withdrawn")
            await one.execute("ROLLBACK TO a")
            with pytest.raises(LocalProtocolError):
                await one.execute("COMMIT")
            await one.execute(f"INSERT INTO business VALUES ({number})")
            assert marks.sent == []
            await finish(block)
        await one.close()

    kind.run(scene())
    assert (business(database), tokens(database)) == ([(0,), (1,)], 4)


def nobody() -> Any:
    return None


async def now(result: object) -> object:
    return result


def test_the_caller_cannot_end_the_transaction_of_a_block(
    perform: Callable[[Scene], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        block = await begun(one)
        await one.execute(INSERT)
        for statement in ("COMMIT", "ROLLBACK", "prepare transaction 'x'"):
            with pytest.raises(LocalProtocolError):
                await one.execute(statement)
        with pytest.raises(LocalProtocolError, match="whose block is open"):
            await begun(one)
        await finish(block)
        await one.execute("SELECT 1")

    perform(scene)
    assert (business(database), tokens(database)) == ([(1,)], 2)


def test_a_commit_that_nobody_saw_is_found_by_the_mark(
    perform: Callable[[Scene], None], database: str
) -> None:
    """The statement is sent past the watch, and the driver begins another one."""

    async def scene(one: Peer) -> None:
        for again in ("SELECT 1", "BEGIN"):
            block = await begun(one)
            await one.driver.execute("COMMIT")
            with suppress(Exception):
                await one.driver.execute(again)
            block.end()
            with pytest.raises(TransactionEnded):
                await insert_token(one.driver, block.token, [LOG], block=block)
            await block.roll_back()
            assert one.driver.status is Status.IDLE

    perform(scene)
    assert tokens(database) == 0


def test_a_transaction_that_is_open_is_joined(
    perform: Callable[[Scene], None], database: str
) -> None:
    async def scene(one: Peer) -> None:
        if one.driver.autocommit:
            await one.execute("BEGIN")
        await one.execute(INSERT)
        block = await begun(one)
        assert not one.driver.begun
        await finish(block)
        if one.driver.autocommit:
            await one.execute("BEGIN")
        await one.execute("INSERT INTO business VALUES (2)")
        block = await begun(one)
        await block.prove()
        assert await block.roll_back()

    perform(scene)
    assert (business(database), tokens(database)) == ([(1,)], 2)


def test_a_transaction_that_the_driver_will_end_is_not_joined(database: str) -> None:
    async def scene() -> None:
        with (
            psycopg.connect(database) as connection,
            connection.transaction(),
            pytest.raises(LocalProtocolError, match="will end the transaction"),
        ):
            await begun(Peer(connection))
        one = await asyncpg.connect(**arguments(database))
        async with one.transaction():
            with pytest.raises(LocalProtocolError, match="will end the transaction"):
                await begun(Peer(one))
        await one.close()

    asyncio.run(scene())


def test_a_refused_commit_is_an_abort(perform: Callable[[Scene], None], database: str) -> None:
    async def scene(one: Peer) -> None:
        block = await begun(one)
        await one.execute(f"{INSERT}, (1)")
        block.end()
        await insert_token(one.driver, block.token, [LOG], block=block)
        with pytest.raises(TransactionAborted, match=r"UniqueViolation\w* 23505") as raised:
            await guarded_commit(one.driver, block.token)
        assert "Key (n)" not in str(raised.value)
        await block.roll_back()
        assert one.driver.status is Status.IDLE

    perform(scene)
    assert (business(database), tokens(database)) == ([], 0)


def test_conflicts_are_told_by_their_code(perform: Callable[[Scene], None], database: str) -> None:
    rows(
        database,
        "CREATE FUNCTION conflict() RETURNS void LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE serialization_failure; END $$",
    )

    async def scene(one: Peer) -> None:
        block = await begun(one)
        with pytest.raises(DatabaseConflict):
            await caller.execute(one.driver, "SELECT conflict()")
        assert await block.roll_back()

    perform(scene)


def test_a_connection_that_is_lost_at_commit_leaves_the_transaction_in_doubt(
    perform: Callable[[Scene], None], database: str
) -> None:
    rows(
        database,
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;"
        " CREATE CONSTRAINT TRIGGER die AFTER INSERT ON business DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION die()",
    )

    async def scene(one: Peer) -> None:
        block = await begun(one)
        await one.execute(INSERT)
        block.end()
        await insert_token(one.driver, block.token, [LOG], block=block)
        with pytest.raises(InDoubt) as raised:
            await guarded_commit(one.driver, block.token)
        assert raised.value.token == str(block.token)
        await block.close()
        with pytest.raises(DatabaseUnavailable):
            await begun(one)

    perform(scene)
    assert (business(database), tokens(database)) == ([], 0)


def test_branches_are_prepared_or_refused(perform: Callable[[Scene], None], database: str) -> None:
    async def scene(one: Peer) -> None:
        for number, commit in enumerate((True, False), 1):
            [branch] = branches("node", LOG, new_token(), 1)
            block = await begun(one)
            await one.execute(f"INSERT INTO business VALUES ({number})")
            block.end()
            work = await look(one.driver, block)
            assert work.xid is not None
            await prepare(one.driver, branch)
            await block.close()
            end, other = commit_prepared, roll_back_prepared
            if not commit:
                end, other = other, end
            assert await end(one.driver, branch.gid, work.xid) is Ending.DONE
            assert await end(one.driver, branch.gid, work.xid) is Ending.FOUND
            assert await other(one.driver, branch.gid, work.xid) is Ending.OTHERWISE
        [branch] = branches("node", LOG, new_token(), 1)
        block = await begun(one)
        await one.execute("INSERT INTO business VALUES (3)")
        with suppress(Exception):
            await one.execute("SELECT 1 / 0")
        block.end()
        with pytest.raises(TransactionAborted):
            await prepare(one.driver, branch)
        await block.roll_back()
        assert one.driver.status is Status.IDLE

    perform(scene)
    assert business(database) == [(1,)]
    assert rows(database, "SELECT FROM pg_prepared_xacts WHERE database = current_database()") == []


def test_a_chain_of_inbox_transactions(perform: Callable[[Scene], None], database: str) -> None:
    token, run_id = new_token(), str(uuid4())

    async def scene(one: Peer) -> None:
        driver = one.driver
        await set_autocommit(one)
        await note_run(driver, HERE, run_id)
        assert await noted_run(driver, HERE) == run_id
        assert await claim(driver, {HERE: [5, 6]}, first=caller.BEGIN) == {(HERE, 5), (HERE, 6)}
        await one.execute(INSERT)
        wanted = {HERE: [6, 7], HERE._replace(partition=4): [1]}
        claims = await commit_and(driver, token, lambda first: claim(driver, wanted, first=first))
        assert claims == {(HERE, 7), (HERE._replace(partition=4), 1)}
        with suppress(Exception):
            await one.execute("SELECT 1 / 0")
        with pytest.raises(TransactionAborted):
            await commit_and(driver, token, lambda first: claim(driver, wanted, first=first))
        assert driver.status is Status.IDLE
        assert (await applied(driver, HERE)).ranges == ((5, 7),)
        assert (await compact(driver, "billing", str(LOG), lock_timeout_ms=1_000)).moved == 2
        assert (await applied(driver, HERE)).ranges == ((5, 7),)

    perform(scene)
    assert business(database) == [(1,)]


async def set_autocommit(one: Peer) -> None:
    """Set the mode in which an inbox has its connections; asyncpg has no other."""
    if isinstance(one.connection, psycopg.AsyncConnection):
        await one.connection.set_autocommit(True)
    elif not isinstance(one.connection, asyncpg.Connection):
        one.connection.autocommit = True


def test_rows_of_the_outbox(perform: Callable[[Scene], None], database: str) -> None:
    async def scene(one: Peer) -> None:
        driver = one.driver
        block = await begun(one)
        row = NewOutboxRow(LOG, new_token(), new_token(), "shop", 2, [1, -(2**63)], b"\0;%s'")
        await insert_token(driver, row.replaced or row.token, [LOG], block=block)
        await enqueue(driver, [row, row._replace(token=new_token(), replaced=None)])
        assert (await read_key_status(driver, LOG, [-(2**63)])).waiting
        assert not (await read_key_status(driver, LOG, [7])).waiting
        assert (await read_status(driver, [LOG, OTHER_LOG]))[LOG].waiting
        assert not await may_have_reported(driver, LOG, 2**40)
        await guarded_commit(driver, block.token)
        await block.close()

    perform(scene)
    stored = rows(database, "SELECT messages, keys, content FROM txmq_outbox ORDER BY seq")
    assert [(n, keys, bytes(content)) for n, keys, content in stored] == [  # type: ignore[call-overload]
        (2, [1, -(2**63)], b"\0;%s'")
    ] * 2


def test_a_message_in_the_databases_log(perform: Callable[[Scene], None]) -> None:
    async def scene(one: Peer) -> None:
        await set_autocommit(one)
        with pytest.raises(LocalProtocolError, match="no transaction"):
            await write_emitted(one.driver, b"\0")
        block = await begun(one)
        with suppress(TxmqError):  # where wal_level is too low
            await write_emitted(one.driver, b"\0")
        await block.prove()
        await guarded_commit(one.driver, block.token)
        await block.close()

    perform(scene)


def test_connections_of_another_kind_are_refused_by_name(database: str) -> None:
    with pytest.raises(LocalProtocolError, match="psycopg2, psycopg or asyncpg"):
        driver_of(object())

    async def scene() -> None:
        one = await asyncpg.connect(**arguments(database))
        with pytest.raises(LocalProtocolError, match=r"asyncpg.*this client blocks"):
            blocking_driver(one)
        assert async_driver(one).awaits
        await one.close()
        pool = await asyncpg.create_pool(**arguments(database), min_size=1, max_size=1)
        async with pool, pool.acquire() as proxy:
            block = await begun(Peer(proxy))
            await proxy.execute("SELECT 1")
            with pytest.raises(LocalProtocolError):
                await proxy.execute("COMMIT")
            await finish(block)

    asyncio.run(scene())
    with psycopg2.connect(database) as one, pytest.raises(LocalProtocolError, match="blocks"):
        async_driver(one)
    with (
        psycopg.connect(database) as other,
        other.pipeline(),
        pytest.raises(LocalProtocolError, match="pipeline"),
    ):
        driver_of(other).require_usable()


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: kind.name)
@pytest.mark.parametrize("answered", [True, False])
def test_a_task_that_is_cancelled_in_commit_knows_its_outcome_or_is_in_doubt(
    kind: DriverKind, database: str, monkeypatch: pytest.MonkeyPatch, *, answered: bool
) -> None:
    """A deferred trigger waits for a lock, so that COMMIT is out meanwhile."""
    rows(database, TABLE)
    rows(
        database,
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$;"
        " CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON business DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION hold()",
    )
    monkeypatch.setattr(uninterrupted, "PATIENCE_S", PATIENCE_S if answered else 0.0)

    async def committing(one: Peer) -> None:
        block = await begun(one)
        await one.execute(INSERT)
        block.end()
        await guarded_commit(one.driver, block.token)

    async def scene() -> None:
        async with peer(kind, database) as one:
            with psycopg2.connect(database) as holder, holder.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(1)")
                task = asyncio.create_task(committing(one))
                while not waiting(database):  # noqa: ASYNC110  # the server tells no event
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0)
                if answered:
                    holder.rollback()
                    await task
                    assert isinstance(one.driver.interruption, asyncio.CancelledError)
                    assert one.driver.status is Status.IDLE
                else:
                    with pytest.raises(InDoubt):
                        await task
                    assert one.driver.closed

    asyncio.run(scene())
    if answered:
        assert business(database) == [(1,)]


def waiting(database: str) -> bool:
    statement = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    return bool(rows(database, statement))


def test_each_statement_has_one_text_that_binds_on_the_server_too() -> None:
    """A parameter without a type in SQL would get one from its value in psycopg2, and
    none in asyncpg.
    """
    from txmq.tx.postgres import inbox, inbox_compaction, outbox, tokens

    texts = [
        text
        for module in (inbox, inbox_compaction, outbox, tokens)
        for name, text in vars(module).items()
        if name.isupper() and isinstance(text, str)
    ]
    assert [found for text in texts for found in re.findall(r"%(?:\(\w+\))?s(?!::)", text)] == []
