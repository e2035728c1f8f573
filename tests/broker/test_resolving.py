"""The broker's resolvers beside a real database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg2
from twisted.internet.defer import Deferred, execute

from txmq.broker.resolving import Resolving
from txmq.config import Resolver
from txmq.tx.postgres.brokers import registered
from txmq.tx.postgres.identity import read_server
from txmq.tx.postgres.partitions import partitions
from txmq.tx.postgres.session import connect

if TYPE_CHECKING:
    from collections.abc import Callable


def at_once(function: Callable[..., Any], *args: object) -> Deferred[Any]:
    return execute(function, *args)


def test_upkeep_finds_out_which_database_a_resolver_leads_to_and_makes_partitions(database: str) -> None:
    connection = connect(database, application_name="test")
    with connection.cursor() as cursor:
        for partition in partitions(connection)[1:]:
            cursor.execute(f"DROP TABLE public.{partition.name}")
    few = len(partitions(connection))
    log_id, oldest = uuid4(), uuid4()
    resolving = Resolving([Resolver(name="r", dsn=database)], log_id, at_once, "b-1")
    mine = read_server(connection).identity
    decider, other = (
        ("postgres", mine.system_id, mine.timeline, oid, None) for oid in (mine.database_oid, mine.database_oid + 1)
    )
    assert resolving.knows(other)
    resolving.upkeep(oldest.bytes)
    [told] = registered(connection)
    assert (told.log_id, told.name, told.oldest_undecided) == (log_id, "b-1", oldest)
    assert resolving.knows(decider)
    assert not resolving.knows(other)
    assert len(partitions(connection)) > few
    connection.close()


def test_a_database_that_cannot_be_reached_leaves_everything_as_it_is(database: str) -> None:
    gone = psycopg2.extensions.make_dsn(database, dbname="no_such_database")
    resolving = Resolving([Resolver(name="r", dsn=gone)], uuid4(), at_once)
    resolving.upkeep(uuid4().bytes)
    assert resolving.knows(("postgres", 1, 1, 1, None))
