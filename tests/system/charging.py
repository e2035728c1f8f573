"""A worker that charges orders: one effect for each message, in the transaction of its
inbox, until it dies.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.system.farm import Job, Lane
from tests.system.orders import Order
from txmq import ReceivedMessage, connect
from txmq.crashpoints import crashpoint

GROUP = "billing"
TABLE = "CREATE TABLE charge (seq bigserial PRIMARY KEY, token uuid NOT NULL, key text NOT NULL, version int NOT NULL)"
PATIENCE_S = 20.0
LOOK_EVERY_S = 0.05


def work(job: Job, lane: Lane, go_on: Callable[[], bool]) -> None:
    """A member of the group, whose mode is the lane's argument."""
    mode: Any = lane.arguments[0]
    stop = Event()
    Thread(target=_stop_in_time, args=(stop, go_on), daemon=True).start()
    with connect(job.url, service=GROUP, timeout=PATIENCE_S) as client:
        consumer = client.consumer(GROUP, topics=[job.topic], mode=mode, start="first")
        consumer.run(charge, inbox=lambda: psycopg2.connect(job.dsn), stop=stop)


def charge(message: ReceivedMessage, connection: Connection) -> None:
    order = Order.decode(message.body)
    crashpoint("handler.before_effect")
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO charge (token, key, version) VALUES (%s, %s, %s)", order)
    crashpoint("handler.after_effect")


def _stop_in_time(stop: Event, go_on: Callable[[], bool]) -> None:
    while go_on():
        stop.wait(LOOK_EVERY_S)
    stop.set()
