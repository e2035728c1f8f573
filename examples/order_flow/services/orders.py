"""Takes orders in. The rows of an order and the message about it are one decision: both
exist, or neither.

It may be killed at any moment. Started again it goes on with the orders that are not in
the table, and asks nobody what became of the last ones: where a transaction had
committed, the broker finds that out from PostgreSQL by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Lock

import psycopg2
from psycopg2.errors import UniqueViolation
from psycopg2.extensions import connection as Connection  # a class, whatever its name
from psycopg2.extras import execute_values

import txmq
from examples.order_flow.data import Order, read_orders
from examples.order_flow.messages import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.setting import Setting
from txmq.errors import TransactionAborted, TxmqError

THREADS = 6
PAUSE_S = 0.1


def place(client: txmq.Client, connection: Connection, order: Order) -> None:
    """Book one order and tell the others."""
    with client.transaction(connection) as tx, connection.cursor() as cursor:
        cursor.execute(
            "UPDATE customers SET balance_cents = balance_cents - %s, version = version + 1"
            " WHERE customer_id = %s RETURNING version",
            (order.total_cents, order.customer_id),
        )
        [(version,)] = cursor.fetchall()
        placed = OrderPlaced(
            order_id=order.order_id,
            customer_id=order.customer_id,
            version=version,
            total_cents=order.total_cents,
            ordered_on=order.ordered_on,
            carrier=order.carrier,
        )
        cursor.execute(
            "INSERT INTO orders VALUES (%(order_id)s, %(customer_id)s, %(version)s, %(total_cents)s, %(ordered_on)s,"
            " %(carrier)s)",
            placed.model_dump(),
        )
        execute_values(
            cursor,
            "INSERT INTO order_lines VALUES %s",
            [(order.order_id, *line) for line in order.lines],
        )
        tx.send(
            ORDER_PLACED,
            placed.encode(),
            key=str(order.customer_id),
            tag=order.priority,
            headers={"version": str(version)},
        )


class Worker:
    """Places orders one after the other, whatever happens to broker and database
    meanwhile.
    """

    def __init__(self, client: txmq.Client, setting: Setting) -> None:
        self._client, self._setting = client, setting
        self._connection: Connection | None = None

    def run(self, orders: Iterator[Order]) -> None:
        for order in orders:
            while not self._placed(order):
                time.sleep(PAUSE_S)

    def _placed(self, order: Order) -> bool:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = self._setting.connect()
            self._setting.journal.note("attempted")
            place(self._client, self._connection, order)
        except UniqueViolation:
            return True  # by an attempt of which we never heard how it ended
        except psycopg2.OperationalError:
            return False
        except TxmqError as error:
            if not (
                error.retriable
                or error.outcome == "unknown"
                or isinstance(error, TransactionAborted)
            ):
                raise
            return False
        return True


class Shared(Iterator[Order]):
    """An iterator for several threads."""

    def __init__(self, orders: Iterator[Order]) -> None:
        self._orders, self._lock = orders, Lock()

    def __next__(self) -> Order:
        with self._lock:
            return next(self._orders)


def run(setting: Setting) -> None:
    with closing(setting.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT order_id FROM orders")
        done = {order_id for (order_id,) in cursor}
    orders = read_orders(setting.data, share=setting.instance, of=setting.instances)
    shared = Shared(order for order in orders if order.order_id not in done)
    with (
        txmq.connect(setting.broker, service="orders") as client,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        workers = [pool.submit(Worker(client, setting).run, shared) for _ in range(THREADS)]
    for worker in workers:
        worker.result()
