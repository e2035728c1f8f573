"""Charges for orders, each exactly once.

The charges and the inbox rows of their messages are in one PostgreSQL transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name
from psycopg2.extras import execute_values

import txmq
from examples.order_flow.order_placed import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.context import (
    BATCH_MESSAGES,
    BATCH_WAIT_S,
    RETRY,
    TIMEOUT_S,
    ServiceContext,
    on_term,
)
from txmq.crashpoints import crashpoint

GROUP = "payment"


class PaymentRefused(Exception):
    """The account of the customer is blocked."""


def charge(
    messages: Sequence[txmq.ReceivedMessage],
    connection: Connection,
    refuse: Callable[[txmq.ReceivedMessage, Exception], None],
) -> None:
    """Charge for some orders.

    A refused order goes through the retries to the dead letters; the others are
    charged.
    """
    orders = [OrderPlaced.decode(message.body) for message in messages]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT customer_id FROM customers WHERE customer_id = ANY(%s) AND blocked",
            ([order.customer_id for order in orders],),
        )
        blocked = {customer_id for (customer_id,) in cursor}
        for message, order in zip(messages, orders, strict=True):
            if order.customer_id in blocked:
                refuse(message, PaymentRefused(f"customer {order.customer_id} is blocked"))
        execute_values(
            cursor,
            "INSERT INTO charges (order_id, customer_id, cents) VALUES %s",
            [(order.order_id, order.customer_id, order.total_cents) for order in orders],
        )
    # executed but not committed: the demonstration kills the process here
    crashpoint("order_flow.charging")


def run(context: ServiceContext) -> None:
    with txmq.connect(context.broker, service="payment", timeout=TIMEOUT_S) as client:
        consumer = client.consumer(
            GROUP, topics=[ORDER_PLACED], mode="concurrent", start="first", retry=RETRY
        )
        on_term(consumer.close)
        handler = context.handler(charge, consumer)
        consumer.run(handler, inbox=context.connect, batch=BATCH_MESSAGES, batch_wait=BATCH_WAIT_S)
        context.journal.count_to("duplicates", consumer.stats.duplicates)
