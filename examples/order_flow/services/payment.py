"""Charges for orders, each once: the charge and the inbox's record of the message are one transaction in PostgreSQL."""

from __future__ import annotations

from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

import txmq
from examples.order_flow.messages import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.setting import PATIENCE_S, RETRY, Setting, on_term
from txmq.crashpoints import crashpoint

THREADS = 2
GROUP = "payment"


class PaymentRefused(Exception):
    """The customer's account is blocked."""


def charge(message: txmq.ReceivedMessage, connection: Connection) -> None:
    """Charge for one order. What it raises rolls back and goes through the retries to the dead letters."""
    order = OrderPlaced.decode(message.body)
    with connection.cursor() as cursor:
        cursor.execute("SELECT blocked FROM customers WHERE customer_id = %s", (order.customer_id,))
        if cursor.fetchone() == (True,):
            raise PaymentRefused(f"customer {order.customer_id} is blocked")
        cursor.execute(
            "INSERT INTO charges (order_id, customer_id, cents) VALUES (%s, %s, %s)",
            (order.order_id, order.customer_id, order.total_cents),
        )
    crashpoint("order_flow.charging")  # done but not committed: here the demonstration kills this process


def run(setting: Setting) -> None:
    with txmq.connect(setting.broker, service="payment", timeout=PATIENCE_S) as client:
        consumer = client.consumer(GROUP, topics=[ORDER_PLACED], mode="concurrent", start="first", retry=RETRY)
        on_term(consumer.close)
        consumer.run(setting.noted(charge), inbox=setting.connect, threads=THREADS)
        setting.journal.note("duplicates", consumer.stats.duplicates)
