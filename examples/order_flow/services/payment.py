"""Charges for orders, each once: charges and the inbox's record of their messages are
one transaction in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psycopg2.extensions import connection as Connection  # a class, whatever its name
from psycopg2.extras import execute_values

import txmq
from examples.order_flow.messages import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.setting import (
    AT_ONCE,
    BATCH_WAIT_S,
    PATIENCE_S,
    RETRY,
    Setting,
    on_term,
)
from txmq.crashpoints import crashpoint

GROUP = "payment"


class PaymentRefused(Exception):
    """The customer's account is blocked."""


def charge(
    messages: Sequence[txmq.ReceivedMessage],
    connection: Connection,
    refuse: Callable[[txmq.ReceivedMessage, Exception], None],
) -> None:
    """Charge for some orders. One that is refused goes through the retries to the dead
    letters, alone.
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
    crashpoint(
        "order_flow.charging"
    )  # done but not committed: here the demonstration kills this process


def run(setting: Setting) -> None:
    with txmq.connect(setting.broker, service="payment", timeout=PATIENCE_S) as client:
        consumer = client.consumer(
            GROUP, topics=[ORDER_PLACED], mode="concurrent", start="first", retry=RETRY
        )
        on_term(consumer.close)
        handler = setting.handler(charge, consumer)
        consumer.run(handler, inbox=setting.connect, batch=AT_ONCE, batch_wait=BATCH_WAIT_S)
        setting.journal.note("duplicates", consumer.stats.duplicates)
