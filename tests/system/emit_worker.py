"""Workers of the relay: services that emit their orders, and relays that are killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import NamedTuple

import psycopg
import psycopg2

from tests.system.order_worker import NEVER, Abandoned, Journal, connect_to_database, write_order
from tests.system.orders import PlacedOrder, ReportedOutcome
from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq import connect, emit
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import TxmqError
from txmq.relay.relay import Relay, RelayPolicy
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.driver import BlockingConnection as Connection

RELAY = "relay"  # argument of a worker that runs a relay instead of placing orders
SLOT = "txmq_relay"
PAUSE_S = 0.01  # between two orders of a service; more would only fill the topic
POLICY = RelayPolicy(confirm_every_s=0.02, look_every_s=0.5)


def run_worker(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool]
) -> None:
    """Run a relay, or place orders for the keys that the worker has as arguments."""
    if worker.arguments == (RELAY,):
        with running_relay(config.url, config.dsn):
            wait_until(lambda: not keep_running(), 15 * PATIENCE_S, what="the end")
        return
    journal, random, keys = Journal(Path(config.directory)), Random(), cycle(worker.arguments)
    while keep_running():
        with closing(connect_to_database(config.dsn)) as connection:
            while keep_running() and not connection.closed:
                _place(connection, config.topic, next(keys), journal, random)
                time.sleep(PAUSE_S)


class RunningRelay(NamedTuple):
    """A relay in a thread. `ended` is set when it ends by itself."""

    ended: Event


@contextmanager
def running_relay(
    url: str, dsn: str, policy: RelayPolicy = POLICY, *, slot: str = SLOT
) -> Iterator[RunningRelay]:
    """Run a relay in this process for the block. Raises the error that ended it."""
    stop, ended, errors = Event(), Event(), list[BaseException]()

    def run() -> None:
        try:
            relay.run(stop)
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)
        finally:
            ended.set()

    with connect(url, timeout=PATIENCE_S) as client:
        relay = Relay(client._core, dsn, slot, policy)
        thread = Thread(target=run)
        thread.start()
        try:
            yield RunningRelay(ended)
        finally:
            stop.set()
            thread.join()
    if errors:
        raise errors[0]


def _place(connection: Connection, topic: str, key: str, journal: Journal, random: Random) -> None:
    """Place one order, and note its outcome."""
    token = new_token().hex
    journal.note(token, ReportedOutcome.BEGAN)
    committing = False
    try:
        order = PlacedOrder(token, key, write_order(connection, token, key))
        emit(connection, topic, order.encode(), key=key)
        random.choice(VARIANTS)(connection, topic, order._replace(version=NEVER))
        committing = True
        connection.commit()
    except (Abandoned, psycopg2.Error, psycopg.Error, TxmqError) as error:
        with suppress(psycopg2.Error, psycopg.Error):
            connection.rollback()
        journal.note(
            token, ReportedOutcome.UNKNOWN if committing else ReportedOutcome.ABORTED, repr(error)
        )
    else:
        journal.note(token, ReportedOutcome.COMMITTED)


def _commit(connection: Connection, topic: str, never: PlacedOrder) -> None:
    """Change nothing, so that the transaction commits."""


def _abandon(connection: Connection, topic: str, never: PlacedOrder) -> None:
    raise Abandoned


def _roll_back_to_a_savepoint(connection: Connection, topic: str, never: PlacedOrder) -> None:
    """Withdraw a message; the rest of the transaction commits."""
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT part")
        emit(connection, topic, never.encode(), key=never.key)
        cursor.execute("ROLLBACK TO SAVEPOINT part")


VARIANTS = (*[_commit] * 5, _abandon, _roll_back_to_a_savepoint)
