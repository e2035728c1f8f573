"""A worker that places orders: a row and a message in one transaction, over and over,
until it dies or is to stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import Random

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.system.farm import Job, Lane
from tests.system.orders import Order, Outcome, Token
from txmq import connect
from txmq.client import Client
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.errors import TxmqError
from txmq.testing.wait import wait_until

TABLES = """
CREATE TABLE account (key text PRIMARY KEY, version int NOT NULL);
CREATE TABLE placed (token uuid PRIMARY KEY, key text NOT NULL, version int NOT NULL);
"""
RAISE_VERSION = """
INSERT INTO account VALUES (%s, 1) ON CONFLICT (key) DO UPDATE SET version = account.version + 1 RETURNING version
"""
CHECK_AFTER_S = (
    0.3  # longer than a transaction takes as a rule; where one takes longer it may be fenced
)
RESTART_S = 60.0
PATIENCE_S = 20.0  # to have the messages stored, over a restart of the broker
NEVER = 0  # the version in messages that must not come out


class ChangedMind(Exception):
    """The service rolls back."""


class Journal:
    """What a worker was told, a line at a time: what is written is safe from the death
    of the writer.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(
            directory / f"{os.getpid()}.journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY
        )

    def note(self, token: Token, outcome: Outcome, why: str = "") -> None:
        os.write(self._file, f"{token} {outcome} {why}\n".encode())

    @contextmanager
    def kept(self, token: Token) -> Iterator[None]:
        """Around a transaction: notes that it began, and what its caller was told."""
        self.note(token, Outcome.BEGAN)
        try:
            yield
        except (ChangedMind, psycopg2.Error) as error:
            self.note(token, Outcome.ABORTED, repr(error))
        except TxmqError as error:
            self.note(
                token,
                Outcome.UNKNOWN if error.outcome == "unknown" else Outcome.ABORTED,
                repr(error),
            )
        else:
            self.note(token, Outcome.COMMITTED)


def told(directory: Path) -> Mapping[Token, Outcome]:
    """The last word on each transaction, of all workers."""
    found: dict[Token, Outcome] = {}
    for journal in directory.glob("*.journal"):
        for line in journal.read_text().splitlines():
            token, outcome, *_ = line.split(" ", 2)
            found[token] = Outcome(outcome)
    return found


def last_begun(directory: Path, pid: int) -> Token:
    """The transaction that a worker is, or was, in. Raises where it has ended, as far
    as its journal knows.
    """
    token, outcome, *_ = (directory / f"{pid}.journal").read_text().splitlines()[-1].split(" ", 2)
    assert outcome == Outcome.BEGAN, f"{pid} has ended {token}: {outcome}"
    return token


def application(pid: object) -> str:
    """What the worker calls itself at the database."""
    return f"worker {pid}"


def work(job: Job, lane: Lane, go_on: Callable[[], bool]) -> None:
    """Places orders, and opens connections anew where they are lost."""
    journal, random, keys = Journal(Path(job.directory)), Random(), cycle(lane.arguments)
    with connect(job.url, service="orders", timeout=PATIENCE_S, retries=20) as client:
        while go_on():
            with closing(connected(job.dsn)) as connection:
                while go_on() and not connection.closed:
                    _place(client, connection, job.topic, next(keys), journal, random)


def connected(dsn: str) -> Connection:
    """A connection, as soon as there is a server to have one with."""
    found: list[Connection] = []

    def try_once() -> bool:
        with suppress(psycopg2.OperationalError):
            found.append(psycopg2.connect(dsn, application_name=application(os.getpid())))
        return bool(found)

    wait_until(try_once, RESTART_S, what="a connection to the database")
    return found[0]


def _place(
    client: Client, connection: Connection, topic: str, key: str, journal: Journal, random: Random
) -> None:
    """One order, and what the caller was told of it."""
    transaction = client.transaction(connection, timeout=PATIENCE_S, check_after=CHECK_AFTER_S)
    token = transaction.token.hex
    with journal.kept(token), transaction:
        order = Order(token, key, write_order(connection, token, key))
        transaction.send(topic, order.encode(), key=key)
        random.choice(WHIMS)(transaction, connection, topic, order._replace(version=NEVER))


def write_order(connection: Connection, token: Token, key: str) -> int:
    """The rows of an order; gives its version."""
    with connection.cursor() as cursor:
        cursor.execute(RAISE_VERSION, (key,))
        [(version,)] = cursor.fetchall()
        cursor.execute("INSERT INTO placed VALUES (%s, %s, %s)", (token, key, version))
    return int(version)


def _nothing(transaction: Transaction, connection: Connection, topic: str, never: Order) -> None:
    """The transaction commits."""


def _change_mind(
    transaction: Transaction, connection: Connection, topic: str, never: Order
) -> None:
    raise ChangedMind


def _swallow_an_error(
    transaction: Transaction, connection: Connection, topic: str, never: Order
) -> None:
    """The transaction has failed, and nobody minds."""
    with suppress(psycopg2.DataError), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


def _go_back_to_a_savepoint(
    transaction: Transaction, connection: Connection, topic: str, never: Order
) -> None:
    """A part is withdrawn, the rest commits."""
    with suppress(ChangedMind), transaction.savepoint():
        transaction.send(topic, never.encode(), key=never.key)
        raise ChangedMind


WHIMS = (*[_nothing] * 5, _change_mind, _swallow_an_error, _go_back_to_a_savepoint)
