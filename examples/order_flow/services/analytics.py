"""Sales per day: a broadcast consumer that processes many messages in one transaction.

A sum reveals every message that is counted twice or not at all. The inbox prevents
both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name
from psycopg2.extras import execute_values

import txmq
from examples.order_flow.order_placed import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.context import RETRY, TIMEOUT_S, ServiceContext, on_term

GROUP = "analytics"
BATCH_MESSAGES, BATCH_WAIT_S = 500, 0.2


def add_sales(messages: Sequence[txmq.ReceivedMessage], connection: Connection) -> None:
    """Add the sales of the messages."""
    orders = [OrderPlaced.decode(message.body) for message in messages]
    numbers = Counter(order.ordered_on for order in orders)
    cents = Counter[object]()
    for order in orders:
        cents[order.ordered_on] += order.total_cents
    with connection.cursor() as cursor:
        execute_values(
            cursor,
            "INSERT INTO sales VALUES %s ON CONFLICT (ordered_on) DO UPDATE"
            " SET orders = sales.orders + EXCLUDED.orders, cents = sales.cents + EXCLUDED.cents",
            [(day, number, cents[day]) for day, number in numbers.items()],
        )


def run(context: ServiceContext) -> None:
    with txmq.connect(context.broker, service="analytics", timeout=TIMEOUT_S) as client:
        consumer = client.consumer(
            GROUP,
            topics=[ORDER_PLACED],
            mode="broadcast",
            member="sales",
            start="first",
            retry=RETRY,
        )
        on_term(consumer.close)
        consumer.run(
            add_sales, inbox=context.connect, batch=BATCH_MESSAGES, batch_wait=BATCH_WAIT_S
        )
        context.journal.count_to("duplicates", consumer.stats.duplicates)
