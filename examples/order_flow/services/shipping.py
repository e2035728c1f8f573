"""Ships orders, each customer's strictly in the order in which they were placed.

When an order cannot be shipped, the later ones of its customer wait behind it, all others go on.
"""

from __future__ import annotations

from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

import txmq
from examples.order_flow.messages import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.setting import PATIENCE_S, RETRY, Setting, on_term
from txmq.crashpoints import crashpoint

THREADS = 2
GROUP = "shipping"


class CarrierUnavailable(Exception):
    """The carrier takes nothing at the moment: it may later."""


class CustomsCodeMissing(Exception):
    """A part has no customs code: nobody can ship it until somebody enters one."""


def ship(message: txmq.ReceivedMessage, connection: Connection) -> None:
    """Ship one order."""
    order = OrderPlaced.decode(message.body)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT part_id FROM order_lines JOIN parts USING (part_id) WHERE order_id = %s AND customs_code IS NULL",
            (order.order_id,),
        )
        if incomplete := cursor.fetchone():
            raise CustomsCodeMissing(f"part {incomplete[0]} has no customs code")
        cursor.execute("SELECT available FROM carriers WHERE carrier = %s", (order.carrier,))
        if cursor.fetchone() != (True,):
            raise CarrierUnavailable(f"{order.carrier} is not available")
        cursor.execute(
            "INSERT INTO shipments (order_id, customer_id, version, carrier)"
            " VALUES (%(order_id)s, %(customer_id)s, %(version)s, %(carrier)s)",
            order.model_dump(),
        )
    crashpoint("order_flow.shipping")  # as in payment


def run(setting: Setting) -> None:
    with txmq.connect(setting.broker, service="shipping", timeout=PATIENCE_S) as client:
        consumer = client.consumer(
            GROUP, topics=[ORDER_PLACED], mode="ordered", on_exhausted="park", start="first", retry=RETRY
        )
        on_term(consumer.close)
        consumer.run(setting.noted(ship), inbox=setting.connect, threads=THREADS)
        setting.journal.note("duplicates", consumer.stats.duplicates)
