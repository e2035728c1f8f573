"""The rules over each driver, through PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress

import asyncpg
import pytest

from tests.pgbouncer import PgBouncer, needs_pgbouncer, pgbouncer
from tests.tx.postgres.peers import KINDS, DriverKind, Peer, arguments, peer
from tests.tx.postgres.support import LOG, identity_of, new_token, rows
from txmq.errors import DatabaseError, TransactionAborted
from txmq.testing.postgres_server import PostgresServer
from txmq.tx.postgres import caller
from txmq.tx.postgres.branch_finish import in_role
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import commit_and, guarded_commit
from txmq.tx.postgres.identity import server_of
from txmq.tx.postgres.inbox import Position, applied, claim
from txmq.tx.postgres.inbox_compaction import compact
from txmq.tx.postgres.prepared import Ending, commit_prepared, look, prepare
from txmq.tx.postgres.session import connect
from txmq.tx.postgres.statement_watch import NO_SENDS
from txmq.tx.postgres.tokens import insert_token
from txmq.tx.xid import branches

pytestmark = needs_pgbouncer
HERE = Position("billing", str(LOG), 7, 3)
PID = "SELECT pg_backend_pid()"


@pytest.fixture(scope="module")
def bouncer(postgres: PostgresServer) -> Iterator[PgBouncer]:
    with pgbouncer(postgres.dsn()) as found:
        yield found


async def moved(other: Peer, *, away: bool) -> None:
    """Take the session that would be next, or give it back."""
    await other.execute("BEGIN" if away else "ROLLBACK")
    if away:
        await other.execute("SELECT 1")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_driver_through_the_pooler(
    kind: DriverKind, bouncer: PgBouncer, database: str
) -> None:
    """Transactions, branches and an inbox, whose steps run in different sessions."""
    rows(database, "CREATE TABLE business (n int PRIMARY KEY)")
    dsn, backends = bouncer.dsn(database), set[object]()

    async def scene() -> None:
        asynchronous = kind.run is asyncio.run
        other_kind = KINDS[3] if asynchronous else KINDS[0]
        async with (
            peer(kind, dsn, **kind.pooled) as one,
            peer(other_kind, dsn, **other_kind.pooled) as other,
        ):
            driver = one.driver
            if not asynchronous:
                other.connection.autocommit = True
            for number in range(6):
                await moved(other, away=number % 2 == 0)
                block = CallerBlock(driver, new_token(), NO_SENDS)
                await block.begin()
                assert (await server_of(driver)).identity == identity_of(database)
                backends.update(await driver.execute(PID))
                await one.execute(f"INSERT INTO business VALUES ({number})")
                async with caller.savepoint(driver):
                    await one.execute("SELECT 1")
                if number == 4:
                    with suppress(Exception):
                        await one.execute("SELECT 1 / 0")
                block.end()
                if number == 3:  # a branch
                    [branch] = branches("node", LOG, block.token, 1)
                    work = await look(driver, block)
                    await prepare(driver, branch)
                    await block.close()
                    await moved(other, away=True)
                    assert await commit_prepared(driver, branch.gid, work.xid) is Ending.DONE
                    await moved(other, away=False)
                elif number == 4:
                    with pytest.raises(TransactionAborted):
                        await insert_token(driver, block.token, [LOG], block=block)
                    await block.roll_back()
                else:
                    await insert_token(driver, block.token, [LOG], block=block)
                    await guarded_commit(driver, block.token)
                    await block.close()
            await inbox(one)

    kind.run(scene())
    assert rows(database, "SELECT n FROM business ORDER BY n") == [(n,) for n in (0, 1, 2, 3, 5)]
    assert rows(database, "SELECT count(*) FROM txmq_token") == [(4,)]
    assert len(backends) == 2


async def inbox(one: Peer) -> None:
    driver = one.driver
    if not driver.autocommit:
        if driver.awaits:
            await one.connection.set_autocommit(True)
        else:
            one.connection.autocommit = True
    assert len(await claim(driver, {HERE: [5, 6]}, first=caller.BEGIN)) == 2
    wanted = {HERE: [6, 7]}
    await commit_and(driver, new_token(), lambda first: claim(driver, wanted, first=first))
    await guarded_commit(driver, new_token())
    assert (await compact(driver, "billing", str(LOG), lock_timeout_ms=1_000)).moved == 3
    assert (await applied(driver, HERE)).ranges == ((5, 8),)


def test_a_role_is_not_set_in_a_session_that_others_get(bouncer: PgBouncer, database: str) -> None:
    """SET ROLE, by which recovery ends branches of others, would stay there."""
    role = "SELECT current_user::text"
    with (
        closing(connect(database, application_name="test")) as direct,
        in_role(direct, "pg_monitor"),
        direct.cursor() as cursor,
    ):
        cursor.execute(role)
        assert cursor.fetchall() == [("pg_monitor",)]
    with closing(connect(bouncer.dsn(database), application_name="test")) as pooled:
        with pytest.raises(DatabaseError, match="pooler") as raised, in_role(pooled, "pg_monitor"):
            pass
        assert "[[xa.database]]" in raised.value.hint
        assert rows(bouncer.dsn(database), role) == rows(database, role)


def test_prepared_statements_of_another_session_are_named_in_the_hint(
    bouncer: PgBouncer, database: str
) -> None:
    """Asyncpg keeps them by default, and the pooler does not."""

    async def scene() -> None:
        one = await asyncpg.connect(**arguments(bouncer.dsn(database)))
        other = await asyncpg.connect(**arguments(bouncer.dsn(database)), statement_cache_size=0)
        try:
            driver = Peer(one).driver
            await applied(driver, HERE)
            await other.execute("BEGIN")
            await other.execute("SELECT 1")
            with pytest.raises(DatabaseError) as raised:
                await applied(driver, HERE)
            assert "statement_cache_size=0" in raised.value.hint
        finally:
            one.terminate()
            await other.close()

    asyncio.run(scene())
