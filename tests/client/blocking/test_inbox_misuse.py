"""Handlers that end the transaction of their message (docs/FAULTS.md 109 to 111): the
message fails and becomes a letter that says so, and no part of its effects stays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import psycopg
import psycopg2
import pytest
from psycopg2 import extras

import txmq
import txmq.psycopg
from tests.client.effects import EFFECT, effects, take_effect, with_effects
from tests.client.real_consumers import drain
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError
from tests.tx.postgres.support import rows
from txmq.client.blocking.client import Client
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.postgres import EnlistConnection

Work = Callable[[str], None]


class Handled(NamedTuple):
    """What a scene gets: the handler's connection, an insert on it, and the client."""

    connection: Any
    insert: Work
    client: Client


def commit(at: Handled) -> None:
    at.connection.commit()


def roll_back(at: Handled) -> None:
    at.connection.rollback()


def commit_by_sql(at: Handled) -> None:
    at.connection.cursor().execute("COMMIT")


def commit_and_chain(at: Handled) -> None:
    at.connection.cursor().execute("/* a */ COMMIT AND CHAIN")


def roll_back_by_sql(at: Handled) -> None:
    at.connection.cursor().execute("ROLLBACK")


def commit_in_a_string(at: Handled) -> None:
    at.connection.cursor().execute("SELECT 1; COMMIT")


def roll_back_in_a_string(at: Handled) -> None:
    at.connection.cursor().execute("SELECT 1; ROLLBACK")


def unwatched(at: Handled) -> Any:
    """Return a cursor that nothing of txmq sees."""
    if isinstance(at.connection, psycopg.Connection):
        return psycopg.ClientCursor(at.connection)
    return at.connection.cursor(cursor_factory=extras.RealDictCursor)


def commit_unseen(at: Handled) -> None:
    unwatched(at).execute("COMMIT")


def roll_back_unseen(at: Handled) -> None:
    unwatched(at).execute("ROLLBACK")


def another_transaction(at: Handled) -> None:
    unwatched(at).execute("ROLLBACK; BEGIN; INSERT INTO effects (body) VALUES ('own')")


def prepare(at: Handled) -> None:
    at.connection.cursor().execute("PREPARE TRANSACTION 'theirs'")


def own_block(at: Handled) -> None:
    with at.client.transaction(at.connection):
        at.insert("own")


def enlist(at: Handled) -> None:
    at.client.enlist(at.connection, hooks=True)


def with_connection(at: Handled) -> None:
    """The idiom of psycopg2, whose first block commits."""
    with at.connection:
        at.insert("own")


def with_connection_that_fails(at: Handled) -> None:
    """Its end is a rollback."""
    with suppress(ApplicationError), at.connection:
        at.insert("own")
        raise ApplicationError


def roll_back_and_begin_anew(at: Handled) -> None:
    with suppress(Exception):
        at.connection.rollback()
    with suppress(Exception):
        unwatched(at).execute("INSERT INTO effects (body) VALUES ('own')")
    at.connection.commit()


def roll_back_and_use_a_block_of_the_driver(at: Handled) -> None:
    with suppress(Exception):
        at.connection.rollback()
    with at.connection.transaction():
        at.insert("own")


COMMON = (
    commit,
    roll_back,
    commit_by_sql,
    commit_and_chain,
    roll_back_by_sql,
    commit_in_a_string,
    roll_back_in_a_string,
    commit_unseen,
    roll_back_unseen,
    another_transaction,
    prepare,
    with_connection,
    with_connection_that_fails,
    roll_back_and_begin_anew,
)
CONNECTS: dict[str, Callable[[str], Any]] = {
    "psycopg2": psycopg2.connect,
    "psycopg2, EnlistConnection": lambda dsn: psycopg2.connect(
        dsn, connection_factory=EnlistConnection
    ),
    "psycopg": psycopg.connect,
    "psycopg, EnlistConnection": txmq.psycopg.EnlistConnection.connect,
}
SCENES = [
    *((driver, scene) for driver in CONNECTS for scene in COMMON),
    ("psycopg", roll_back_and_use_a_block_of_the_driver),
    ("psycopg, EnlistConnection", roll_back_and_use_a_block_of_the_driver),
]
# Both are refused before they do anything.
OWN_TRANSACTIONS = [(driver, scene) for driver in CONNECTS for scene in (own_block, enlist)]


def scene_of(client: Client, act: Callable[[Handled], None], *, swallowed: bool) -> Any:
    """Return a handler with an effect in front of what a scene does, and one behind.

    With `swallowed` no error of either leaves it.
    """

    def handle(message: ReceivedMessage, connection: Any) -> None:
        body = message.body.decode()

        def insert(what: str) -> None:
            statement = "INSERT INTO effects (body, attempt) VALUES (%s, %s)"
            connection.cursor().execute(statement, (f"{body}-{what}", message.attempt))

        insert("a")
        if body != "bad":
            return
        at = Handled(connection, insert, client)
        with suppress(Exception) if swallowed else nullcontext():
            act(at)
        with suppress(Exception) if swallowed else nullcontext():
            insert("b")

    return handle


@pytest.mark.parametrize(
    ("driver", "act", "swallowed"),
    [
        *((*scene, swallowed) for scene in SCENES for swallowed in (False, True)),
        *((*scene, False) for scene in OWN_TRANSACTIONS),
    ],
)
def test_a_handler_that_ends_the_transaction_of_its_message_has_failed(
    client: Client,
    database: str,
    driver: str,
    act: Callable[[Handled], None],
    *,
    swallowed: bool,
) -> None:
    topic, group, count = fresh("t"), fresh("g"), with_effects(database)
    for body in (b"good", b"bad", b"fine"):
        client.send(topic, body, key="k")
    retry = RetryPolicy((0,), retries=2)
    with client.consumer(group, [topic], retry=retry) as consumer:
        handle = scene_of(client, act, swallowed=swallowed)
        drain(client, consumer, handle, inbox=lambda: CONNECTS[driver](database))
        assert (consumer.stats.nacked, consumer.stats.duplicates) == (3, 0)
    assert effects(count) == ["fine-a", "good-a"]
    [letter] = client.letters(group)
    assert "connection of its own" in letter.error_text, "what to do instead"


@pytest.mark.parametrize("check", ["SET CONSTRAINTS ALL IMMEDIATE", "SELECT check_all()"])
@pytest.mark.parametrize("driver", CONNECTS)
def test_a_handler_may_take_a_part_back_and_check_its_constraints(
    client: Client, database: str, driver: str, check: str
) -> None:
    topic, count = fresh("t"), with_effects(database)
    rows(
        database,
        "CREATE FUNCTION check_all() RETURNS void LANGUAGE plpgsql AS "
        "'BEGIN SET CONSTRAINTS ALL IMMEDIATE; END'",
    )
    client.send_batch(topic, [Message(b"m%d" % number, "k") for number in range(4)])

    def handle(message: ReceivedMessage, connection: Any) -> None:
        with connection.cursor() as cursor:
            for statement in ("SAVEPOINT own", EFFECT, "ROLLBACK TO own", "RELEASE own", EFFECT):
                values = (message.body.decode(), 1) if statement is EFFECT else None
                cursor.execute(statement, values)
            cursor.execute(check)
        if isinstance(connection, psycopg.Connection):
            with suppress(ApplicationError), connection.transaction():
                connection.execute(EFFECT, ("not", 1))
                raise ApplicationError

    with client.consumer(fresh("g"), [topic]) as consumer:
        drain(client, consumer, handle, inbox=lambda: CONNECTS[driver](database))
        assert (consumer.stats.nacked, consumer.stats.acked) == (0, 4)
    assert effects(count) == ["m0", "m1", "m2", "m3"]


@pytest.mark.parametrize("apart", ["; ", None])
def test_a_handler_that_has_the_row_of_its_message_checked_may_commit_nothing(
    client: Client, database: str, apart: str | None
) -> None:
    """In a string of its own, the guard of the server is used up by then, and the rest
    is there.
    """
    topic, group, count = fresh("t"), fresh("g"), with_effects(database)
    client.send(topic, b"m")

    def handle(message: ReceivedMessage, connection: Any) -> None:
        take_effect(message, connection)
        for string in f"SET CONSTRAINTS ALL IMMEDIATE{apart or '|'}COMMIT".split("|"):
            with suppress(psycopg2.Error):
                connection.cursor().execute(string)

    with client.consumer(group, [topic], retry=RetryPolicy((0,), retries=1)) as consumer:
        drain(client, consumer, handle, inbox=lambda: psycopg2.connect(database))
    assert (effects(count), len(list(client.letters(group)))) == ([], 1)


def test_rows_of_the_inbox_from_elsewhere_are_let_through(database: str) -> None:
    """As those of a dump that is restored."""
    row = "INSERT INTO txmq_inbox_recent VALUES ('g', gen_random_uuid(), 1, 0, 0, 5)"
    rows(database, row)
    [(count,)] = rows(database, "SELECT count(*) FROM txmq_inbox_recent")
    assert count == 1
