"""A worker that places orders: a row and a message in one transaction."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import Random

import asyncpg
import psycopg
import psycopg2

from tests.system.orders import PlacedOrder, ReportedOutcome, Token
from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq import connect
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.errors import TxmqError
from txmq.testing.processes import whole_lines
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.driver import BlockingConnection as Connection

TABLES = """
CREATE TABLE account (key text PRIMARY KEY, version int NOT NULL);
CREATE TABLE placed (token uuid PRIMARY KEY, key text NOT NULL, version int NOT NULL);
"""
RAISE_VERSION = """
INSERT INTO account VALUES (%s, 1)
ON CONFLICT (key) DO UPDATE SET version = account.version + 1 RETURNING version
"""
# longer than most transactions take; a slower one may be fenced
CHECK_AFTER_S = 0.3
DRIVERS = ("psycopg2", "psycopg", "asyncio psycopg", "asyncio asyncpg")
NEVER = 0  # the version in messages that must not be published


class Abandoned(Exception):
    """The service rolls the transaction back."""


class Journal:
    """A file of the outcomes that txmq reported to a worker.

    Each line is one write, so that it survives the death of the worker.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(
            directory / f"{os.getpid()}.journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY
        )

    def note(self, token: Token, outcome: ReportedOutcome, why: str = "") -> None:
        os.write(self._file, f"{token} {outcome} {why}\n".encode())

    @contextmanager
    def recording(self, token: Token) -> Iterator[None]:
        """Note the beginning of a transaction, and its outcome after the block."""
        self.note(token, ReportedOutcome.BEGAN)
        try:
            yield
        except (Abandoned, psycopg2.Error, psycopg.Error, asyncpg.PostgresError) as error:
            self.note(token, ReportedOutcome.ABORTED, repr(error))
        except TxmqError as error:
            self.note(
                token,
                ReportedOutcome.UNKNOWN if error.outcome == "unknown" else ReportedOutcome.ABORTED,
                repr(error),
            )
        else:
            self.note(token, ReportedOutcome.COMMITTED)


def reported_outcomes(directory: Path) -> Mapping[Token, ReportedOutcome]:
    """Return the last outcome of each transaction, of all workers."""
    found: dict[Token, ReportedOutcome] = {}
    for journal in directory.glob("*.journal"):
        for line in whole_lines(journal):
            token, outcome, *_ = line.split(" ", 2)
            found[token] = ReportedOutcome(outcome)
    return found


def open_transaction(directory: Path, pid: int) -> Token:
    """Return the last transaction of a worker. Raises AssertionError if its journal
    says that the transaction has ended.
    """
    token, outcome, *_ = whole_lines(directory / f"{pid}.journal")[-1].split(" ", 2)
    assert outcome == ReportedOutcome.BEGAN, f"{pid} has ended {token}: {outcome}"
    return token


def application_name(pid: object) -> str:
    """Return the name of a worker at the database."""
    return f"worker {pid}"


def run_worker(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool]
) -> None:
    """Place orders, and connect again after each lost connection.

    Workers without a crash point take turns between all drivers.
    """
    driver = DRIVERS[sum(worker.name.encode()) % len(DRIVERS)] if not worker.point else ""
    note_driver(Path(config.directory), driver or driver_of_worker(os.getpid()))
    if driver.startswith("asyncio "):
        # It imports this module.
        from tests.system import async_order_worker

        async_order_worker.run_worker(config, worker, keep_running, driver.removeprefix("asyncio "))
        return
    journal, random, keys = Journal(Path(config.directory)), Random(), cycle(worker.arguments)
    with connect(config.url, service="orders", timeout=PATIENCE_S, retries=20) as client:
        while keep_running():
            with closing(connect_to_database(config.dsn)) as connection:
                while keep_running() and not connection.closed:
                    _place(client, connection, config.topic, next(keys), journal, random)


def driver_of_worker(pid: int) -> str:
    """Return the name of the driver of a worker that blocks: half of them has each."""
    return DRIVERS[pid % 2]


def note_driver(directory: Path, driver: str) -> None:
    """Leave the name of this worker's driver to the test."""
    (directory / f"{os.getpid()}.driver").write_text(driver)


def noted_driver(directory: Path, pid: int) -> str:
    """Return the name of a worker's driver."""
    return (directory / f"{pid}.driver").read_text()


def connect_to_database(dsn: str) -> Connection:
    """Return a connection, as soon as a server accepts one."""
    found: list[Connection] = []
    pid = os.getpid()
    drivers: dict[str, Callable[..., Connection]] = {
        "psycopg2": psycopg2.connect,
        "psycopg": psycopg.connect,
    }

    def try_once() -> bool:
        with suppress(psycopg2.OperationalError, psycopg.OperationalError):
            found.append(
                drivers[driver_of_worker(pid)](dsn, application_name=application_name(pid))
            )
        return bool(found)

    wait_until(try_once, what="a connection to the database")
    return found[0]


def _place(
    client: Client, connection: Connection, topic: str, key: str, journal: Journal, random: Random
) -> None:
    """Place one order, and note its outcome."""
    transaction = client.transaction(connection, timeout=PATIENCE_S, check_after=CHECK_AFTER_S)
    token = transaction.token.hex
    with journal.recording(token), transaction:
        order = PlacedOrder(token, key, write_order(connection, token, key))
        transaction.send(topic, order.encode(), key=key)
        random.choice(VARIANTS)(transaction, connection, topic, order._replace(version=NEVER))


def write_order(connection: Connection, token: Token, key: str) -> int:
    """Write the rows of an order, and return its version."""
    with connection.cursor() as cursor:
        cursor.execute(RAISE_VERSION, (key,))
        [(version,)] = cursor.fetchall()
        cursor.execute("INSERT INTO placed VALUES (%s, %s, %s)", (token, key, version))
    return int(version)


def _commit(
    transaction: Transaction, connection: Connection, topic: str, never: PlacedOrder
) -> None:
    """Change nothing, so that the transaction commits."""


def _abandon(
    transaction: Transaction, connection: Connection, topic: str, never: PlacedOrder
) -> None:
    raise Abandoned


def _swallow_an_error(
    transaction: Transaction, connection: Connection, topic: str, never: PlacedOrder
) -> None:
    """Fail a statement and hide its error, so that the transaction cannot commit."""
    with suppress(psycopg2.DataError, psycopg.DataError), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


def _roll_back_to_a_savepoint(
    transaction: Transaction, connection: Connection, topic: str, never: PlacedOrder
) -> None:
    """Withdraw a message; the rest of the transaction commits."""
    with suppress(Abandoned), transaction.savepoint():
        transaction.send(topic, never.encode(), key=never.key)
        raise Abandoned


VARIANTS = (*[_commit] * 5, _abandon, _swallow_an_error, _roll_back_to_a_savepoint)
