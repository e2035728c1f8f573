"""Adds up the sales of each day: a broadcast consumer that takes many messages in one
transaction.

A sum shows it when anything is counted twice or not at all. The inbox sees to it that
nothing is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psycopg2.extensions import connection as Connection  # a class, whatever its name
from psycopg2.extras import execute_values

import txmq
from examples.order_flow.messages import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.setting import PATIENCE_S, RETRY, Setting, on_term

GROUP = "analytics"
AT_ONCE, BATCH_WAIT_S = 500, 0.2


def count(messages: Sequence[txmq.ReceivedMessage], connection: Connection) -> None:
    """Add the sales that the messages tell of."""
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


def run(setting: Setting) -> None:
    with txmq.connect(setting.broker, service="analytics", timeout=PATIENCE_S) as client:
        consumer = client.consumer(
            GROUP,
            topics=[ORDER_PLACED],
            mode="broadcast",
            member="sales",
            start="first",
            retry=RETRY,
        )
        on_term(consumer.close)
        consumer.run(count, inbox=setting.connect, batch=AT_ONCE, batch_wait=BATCH_WAIT_S)
        setting.journal.note("duplicates", consumer.stats.duplicates)
