"""Shipments of orders, in the order in which each customer placed them.

When an order cannot be shipped, the later ones of its customer wait behind it; those of
other customers continue. What failed is kept on local disk, and tried again from there:
an outage of a carrier costs the broker nothing, and it may be away meanwhile.
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

GROUP = "shipping"


class CarrierUnavailable(Exception):
    """The carrier accepts no shipments at the moment."""


class CustomsCodeMissing(Exception):
    """A part has no customs code, which an operator must enter."""


def ship(
    messages: Sequence[txmq.ReceivedMessage],
    connection: Connection,
    refuse: Callable[[txmq.ReceivedMessage, Exception], None],
) -> None:
    """Ship some orders, in their order.

    An order that cannot be shipped blocks the later ones of its customer.
    """
    orders = [OrderPlaced.decode(message.body) for message in messages]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT order_id, part_id FROM order_lines JOIN parts USING (part_id)"
            " WHERE order_id = ANY(%s) AND customs_code IS NULL",
            ([order.order_id for order in orders],),
        )
        incomplete = dict(cursor.fetchall())
        cursor.execute("SELECT carrier FROM carriers WHERE available")
        available = {carrier for (carrier,) in cursor}
        for message, order in zip(messages, orders, strict=True):
            if order.order_id in incomplete:
                refuse(
                    message,
                    CustomsCodeMissing(f"part {incomplete[order.order_id]} has no customs code"),
                )
            elif order.carrier not in available:
                refuse(message, CarrierUnavailable(f"{order.carrier} is not available"))
        execute_values(
            cursor,
            "INSERT INTO shipments (order_id, customer_id, version, carrier) VALUES %s",
            [(order.order_id, order.customer_id, order.version, order.carrier) for order in orders],
        )
    crashpoint("order_flow.shipping")  # as in payment


def run(context: ServiceContext) -> None:
    with txmq.connect(context.broker, service="shipping", timeout=TIMEOUT_S) as client:
        consumer = client.consumer(
            GROUP,
            topics=[ORDER_PLACED],
            mode="ordered",
            on_exhausted="park",
            start="first",
            retry=RETRY,
            on_failure="local",
            local_store=context.local,
        )
        on_term(consumer.close)
        handler = context.handler(ship, consumer, refused="stored")
        consumer.run(handler, inbox=context.connect, batch=BATCH_MESSAGES, batch_wait=BATCH_WAIT_S)
        context.journal.count_to("duplicates", consumer.stats.duplicates)
