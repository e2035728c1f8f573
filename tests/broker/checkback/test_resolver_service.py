"""The broker's resolvers beside a real database."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg2
import pytest
from twisted.internet.defer import Deferred, fail, succeed

from tests.broker.support import at_once
from tests.fixtures_postgres import Databases
from tests.tx.postgres.support import producer
from txmq.broker.checkback import database_resolver
from txmq.broker.checkback.database_resolver import PROBE_US
from txmq.broker.checkback.resolver_service import ResolverService
from txmq.broker.checkback.resolvers import ResolverStatus
from txmq.broker.reactor.steady_clock import BELIEVED_US, wall_clock
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import ResolverSettings
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision
from txmq.model.units import SECOND
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import insert_token, read_server, server_of
from txmq.tx.postgres.brokers import registered
from txmq.tx.postgres.partitions import partitions
from txmq.tx.postgres.resolver import TIME_READ_S, TokenResolver
from txmq.tx.postgres.session import connect

if TYPE_CHECKING:
    from collections.abc import Callable


class FrozenWallClock:
    """A wall clock that stands still until it is set."""

    def __init__(self) -> None:
        self.time = 1_700_000_000_000_000

    def now(self) -> int:
        return self.time


def test_upkeep_finds_out_which_database_a_resolver_leads_to_and_makes_partitions(
    database: str,
) -> None:
    connection = connect(database, application_name="test")
    with connection.cursor() as cursor:
        for partition in partitions(connection)[1:]:
            cursor.execute(f"DROP TABLE public.{partition.name}")
    few = len(partitions(connection))
    log_id, oldest = uuid4(), uuid4()
    resolving = ResolverService(
        [ResolverSettings(name="r", dsn=database)],
        log_id,
        at_once,
        FrozenWallClock().now,
        name="b-1",
    )
    mine = read_server(connection).identity
    decider, other = (
        ByPostgres(mine.system_id, mine.timeline, oid, None, 1)
        for oid in (mine.database_oid, mine.database_oid + 1)
    )
    assert resolving.may_resolve(other)
    resolving.upkeep({decider.database: oldest.bytes, other.database: uuid4().bytes})
    [told] = registered(connection)
    assert (told.log_id, told.name, told.oldest_undecided) == (log_id, "b-1", oldest)
    assert resolving.may_resolve(decider)
    assert not resolving.may_resolve(other)
    before = ByPostgres(mine.system_id, mine.timeline - 1, mine.database_oid, None, 1)
    assert "a failover has left that server behind" in resolving.left_behind(before)
    assert resolving.left_behind(decider) == resolving.left_behind(other) == ""
    assert len(partitions(connection)) > few
    connection.close()


def test_a_database_that_cannot_be_reached_leaves_everything_as_it_is(database: str) -> None:
    gone = psycopg2.extensions.make_dsn(database, dbname="no_such_database")
    resolving = ResolverService(
        [ResolverSettings(name="r", dsn=gone)], uuid4(), at_once, FrozenWallClock().now
    )
    resolving.upkeep({})
    assert resolving.may_resolve(ByPostgres(1, 1, 1, None, 1))


def test_a_resolver_tells_since_when_its_database_has_been_away_and_when_it_is_back(
    postgres: PostgresServer, databases: Databases
) -> None:
    clock, name = FrozenWallClock(), databases.borrow()
    began = clock.time
    resolving = ResolverService(
        [ResolverSettings(name="r", dsn=postgres.dsn(name))], uuid4(), at_once, clock.now
    )
    assert resolving.status() == [ResolverStatus("r", 0, 0, "", 0, "")]
    postgres.execute(f"ALTER DATABASE {name} RENAME TO {name}_away")
    resolving.upkeep({})
    clock.time += PROBE_US
    resolving.probe()
    [away] = resolving.status()
    assert (away.seen_at, away.failing_since, away.cleanup_failing_since) == (0, began, began)
    assert f'database "{name}" does not exist' in away.trouble
    assert (away.cleanup_error, resolving.upkeep_owed) == (away.trouble, True)
    postgres.execute(f"ALTER DATABASE {name}_away RENAME TO {name}")

    def kept_up() -> bool:
        resolving.upkeep({})
        return not resolving.upkeep_owed

    wait_until(kept_up, what="an upkeep that succeeds")
    [back] = resolving.status()
    assert back._replace(time=0) == ResolverStatus("r", clock.time, 0, "", 0, "")
    assert abs(back.time - wall_clock()) < BELIEVED_US, "the database is on this machine"
    clock.time += PROBE_US
    resolving.probe()
    assert resolving.status()[0].seen_at == clock.time
    postgres.drop_database(name)


def test_a_resolver_that_goes_on_failing_tells_since_when() -> None:
    clock, failing = FrozenWallClock(), True

    def in_thread(function: Callable[..., Any], *args: object) -> Deferred[Any]:
        del function, args
        return fail(RuntimeError("a bug")) if failing else succeed(None)

    settings = [ResolverSettings(name="r", dsn="dbname=x")]
    resolving = ResolverService(settings, uuid4(), in_thread, clock.now)
    back = list[object]()
    resolving.on_recheck(back.append, lambda _token: None)
    began = clock.time
    for _ in range(3):
        resolving.probe()
        [status] = resolving.status()
        assert (status.failing_since, status.seen_at) == (began, 0)
        assert status.trouble == "it failed: see the broker's log"
        clock.time += PROBE_US
    assert back == []
    failing = False
    resolving.probe()
    [status] = resolving.status()
    assert (status.failing_since, status.seen_at, len(back)) == (0, clock.time, 1)


def test_an_idle_broker_that_reads_outboxes_reads_the_clock_of_their_database_as_well(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FrozenWallClock()
    resolver = partial(TokenResolver, clock=lambda: clock.time / SECOND)
    monkeypatch.setattr(database_resolver, "TokenResolver", resolver)
    resolving = ResolverService(
        [ResolverSettings(name="r", dsn=database)],
        uuid4(),
        at_once,
        clock.now,
        publish=lambda _rows, _by, _aside, _over: None,
    )
    resolving.upkeep({})
    assert resolving.status()[0].time
    for _second in range(2 * int(TIME_READ_S)):
        clock.time += SECOND
        resolving.fetch_outboxes()
        resolving.probe()
    [seen] = resolving.status()
    assert seen.seen_at == clock.time
    assert seen.time


def test_tokens_whose_rows_were_locked_are_checked_again_soon(database: str) -> None:
    token, answers, again = new_token(), list[tuple[Decision, str]](), list[bytes]()
    log_id, back = uuid4(), list[bool]()
    resolving = ResolverService(
        [ResolverSettings(name="r", dsn=database)], log_id, at_once, FrozenWallClock().now
    )
    resolving.on_recheck(lambda decides: back.append(decides(decider)), again.append)
    with closing(producer(database)) as connection:
        decider = ByPostgres(*server_of(connection).identity, None, 1)
        row: Any = SimpleNamespace(decider=decider)
        insert_token(connection, token, [log_id])
        for _ in range(2):
            resolving.resolve(
                token.bytes, row, lambda _token, answer, _by, why: answers.append((answer, why))
            )
            [status] = resolving.status()
            assert f"session {connection.info.backend_pid} " in status.blocked
            assert status.blocked_since > 0
            resolving.probe()
        assert again == [token.bytes] * 2
        connection.commit()
    resolving.resolve(token.bytes, row, lambda *told: answers.append((told[1], told[3])))
    assert [answer for answer, _why in answers] == [Decision.UNKNOWN] * 2 + [Decision.COMMIT]
    resolving.probe()
    [status] = resolving.status()
    assert (len(again), status.blocked_since, status.blocked) == (2, 0, "")
    assert back == [True]  # with the first answer
