"""A worker that charges orders: one effect for each message, in the transaction of its
inbox.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

from tests.system.orders import PlacedOrder
from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq import ReceivedMessage, connect
from txmq.crashpoints import crashpoint
from txmq.testing.wait import PATIENCE_S

GROUP = "billing"
TABLE = """
CREATE TABLE charge (
    seq bigserial PRIMARY KEY, token uuid NOT NULL, key text NOT NULL, version int NOT NULL)
"""
CHECK_EVERY_S = 0.05


def run_worker(
    config: SupervisorConfig, worker: WorkerSpec, keep_running: Callable[[], bool]
) -> None:
    """Run a member of the group, in the mode that is the worker's argument."""
    mode: Any = worker.arguments[0]
    stop = Event()
    Thread(target=_stop_at_the_end, args=(stop, keep_running), daemon=True).start()
    with connect(config.url, service=GROUP, timeout=PATIENCE_S) as client:
        consumer = client.consumer(GROUP, topics=[config.topic], mode=mode, start="first")
        consumer.run(charge, inbox=lambda: psycopg2.connect(config.dsn), stop=stop)


def charge(message: ReceivedMessage, connection: Connection) -> None:
    order = PlacedOrder.decode(message.body)
    crashpoint("handler.before_effect")
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO charge (token, key, version) VALUES (%s, %s, %s)", order)
    crashpoint("handler.after_effect")


def _stop_at_the_end(stop: Event, keep_running: Callable[[], bool]) -> None:
    while keep_running():
        stop.wait(CHECK_EVERY_S)
    stop.set()
