"""Intake of orders: the rows of an order and its message are one decision.

The service may be killed at any moment. After a restart it continues with the orders
that are not in the table. It does not have to ask for the outcome of the last ones: the
broker finds out from PostgreSQL whether a transaction has committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Lock

import psycopg2
from psycopg2.errors import UniqueViolation
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name
from psycopg2.extras import execute_values

import txmq
from examples.order_flow.data import Order, read_orders
from examples.order_flow.order_placed import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.context import ServiceContext
from txmq.errors import TransactionAborted, TxmqError

THREADS = 6
PAUSE_S = 0.1


def place_order(client: txmq.Client, connection: Connection, order: Order) -> None:
    """Store one order and send its message."""
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
            "INSERT INTO orders VALUES (%(order_id)s, %(customer_id)s, %(version)s,"
            " %(total_cents)s, %(ordered_on)s, %(carrier)s)",
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


class OrderWorker:
    """A thread that places orders one by one, through outages of broker and
    database.
    """

    def __init__(self, client: txmq.Client, context: ServiceContext) -> None:
        self._client, self._context = client, context
        self._connection: Connection | None = None

    def run(self, orders: Iterator[Order]) -> None:
        for order in orders:
            while not self._placed(order):
                time.sleep(PAUSE_S)

    def _placed(self, order: Order) -> bool:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = self._context.connect()
            self._context.journal.count("attempted")
            place_order(self._client, self._connection, order)
        except UniqueViolation:
            return True  # stored by an attempt whose outcome was unknown
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


class SharedIterator(Iterator[Order]):
    """An iterator for several threads."""

    def __init__(self, orders: Iterator[Order]) -> None:
        self._orders, self._lock = orders, Lock()

    def __next__(self) -> Order:
        with self._lock:
            return next(self._orders)


def run(context: ServiceContext) -> None:
    with closing(context.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT order_id FROM orders")
        done = {order_id for (order_id,) in cursor}
    orders = read_orders(context.data, share=context.instance, of=context.instances)
    shared = SharedIterator(order for order in orders if order.order_id not in done)
    with (
        txmq.connect(context.broker, service="orders") as client,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        workers = [pool.submit(OrderWorker(client, context).run, shared) for _ in range(THREADS)]
    for worker in workers:
        worker.result()
