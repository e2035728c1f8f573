"""Charges for orders: the blocking client and psycopg2, with an inbox.

    python -m examples.services.payment

The charge, the note that the order is handled, and the message that it is paid are one
transaction of PostgreSQL: each order is charged once, however often this process dies.
A customer's orders are charged one after the other. A refused card is a dead letter at
once, and the customer's later orders wait behind it; another error is tried again.
SIGTERM and Ctrl-C end it with status 0, when the orders in hand are charged.
"""

from __future__ import annotations

import json
import logging
import os

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name
from psycopg2.extras import Json

import txmq

LIMIT = 1_000_00  # cents
SEND = "SELECT txmq.send('paid', %s, %s, %s)"  # published if the transaction commits


class CardRefused(Exception):
    """An error that a retry does not mend."""


RETRY = txmq.RetryPolicy((1, 10, 60, 600), dead=[f"{__name__}.CardRefused"])


def charge(message: txmq.ReceivedMessage, connection: Connection) -> None:
    """Charge for one order, in a transaction that the consumer begins and commits."""
    order = json.loads(message.body)
    if order["cents"] > LIMIT:
        raise CardRefused(f"{order['cents']} cents are over the limit")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO charges (order_id, customer, cents)"
            " VALUES (%(id)s, %(customer)s, %(cents)s)",
            order,
        )
        headers = {**message.headers, "causation": message.message_id}
        cursor.execute(SEND, (message.key, message.body, Json(headers)))


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows what `charge` raises
    with (
        txmq.connect(os.environ["TXMQ_BROKER"], service="payment") as client,
        client.consumer("payment", ["orders"], mode="ordered", retry=RETRY) as consumer,
    ):
        consumer.stop_on_signals()
        consumer.run(charge, inbox=lambda: psycopg2.connect(os.environ["DSN"]), workers=4)


if __name__ == "__main__":
    main()
