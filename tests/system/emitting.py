"""Workers around a relay: services that place orders and emit them, and relays that
die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import NamedTuple

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.system.farm import Job, Lane
from tests.system.orders import Order, Outcome
from tests.system.placing import NEVER, Journal, connected, write_order
from txmq import connect, emit
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import TxmqError
from txmq.relay.relay import Relay, RelayPolicy
from txmq.testing.wait import wait_until

RELAY = "relay"  # in a lane's arguments, instead of keys
SLOT = "txmq_relay"
PAUSE_S = 0.01  # of a service between two orders: no kill waits for more of them
POLICY = RelayPolicy(confirm_every_s=0.02, look_every_s=0.5)


class ChangedMind(Exception):
    """The service rolls back."""


def work(job: Job, lane: Lane, go_on: Callable[[], bool]) -> None:
    """What the lane's arguments say: a relay, or orders for these keys."""
    if lane.arguments == (RELAY,):
        with relaying(job.url, job.dsn):
            wait_until(lambda: not go_on(), 600.0, what="the end")
        return
    journal, random, keys = Journal(Path(job.directory)), Random(), cycle(lane.arguments)
    while go_on():
        with closing(connected(job.dsn)) as connection:
            while go_on() and not connection.closed:
                _place(connection, job.topic, next(keys), journal, random)
                time.sleep(PAUSE_S)


class Relaying(NamedTuple):
    """A relay at work; `ended` is set where it has ended by itself."""

    ended: Event


@contextmanager
def relaying(url: str, dsn: str, policy: RelayPolicy = POLICY) -> Iterator[Relaying]:
    """A relay in this process for the block. Raises what ended it."""
    stop, ended, troubles = Event(), Event(), list[BaseException]()

    def run() -> None:
        try:
            relay.run(stop)
        except BaseException as error:  # raised below
            troubles.append(error)
        finally:
            ended.set()

    with connect(url, timeout=10.0) as client:
        relay = Relay(client.core, dsn, SLOT, policy)
        thread = Thread(target=run)
        thread.start()
        try:
            yield Relaying(ended)
        finally:
            stop.set()
            thread.join()
    if troubles:
        raise troubles[0]


def _place(connection: Connection, topic: str, key: str, journal: Journal, random: Random) -> None:
    """One order, and what the caller was told of it."""
    token = new_token().hex
    journal.note(token, Outcome.BEGAN)
    committing = False
    try:
        order = Order(token, key, write_order(connection, token, key))
        emit(connection, topic, order.encode(), key=key)
        random.choice(WHIMS)(connection, topic, order._replace(version=NEVER))
        committing = True
        connection.commit()
    except (ChangedMind, psycopg2.Error, TxmqError) as error:
        with suppress(psycopg2.Error):
            connection.rollback()
        journal.note(token, Outcome.UNKNOWN if committing else Outcome.ABORTED, repr(error))
    else:
        journal.note(token, Outcome.COMMITTED)


def _nothing(connection: Connection, topic: str, never: Order) -> None:
    """The transaction commits."""


def _change_mind(connection: Connection, topic: str, never: Order) -> None:
    raise ChangedMind


def _go_back_to_a_savepoint(connection: Connection, topic: str, never: Order) -> None:
    """A part is withdrawn, the rest commits."""
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT part")
        emit(connection, topic, never.encode(), key=never.key)
        cursor.execute("ROLLBACK TO SAVEPOINT part")


WHIMS = (*[_nothing] * 5, _change_mind, _go_back_to_a_savepoint)
