"""SQLAlchemy's hook `after_commit`, and the same with txmq."""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import txmq.sqlalchemy

INSERT = text("INSERT INTO phantom_orders (id) VALUES (:id)")
FAILS = text("SELECT 1 / 0")


def by_hook(engine: Engine, client: txmq.Client, topic: str, order: str) -> None:
    """Send the message in `after_commit`."""
    with Session(engine) as session:
        event.listen(session, "after_commit", lambda _: client.send(topic, order.encode()))
        session.execute(INSERT, {"id": order})
        with suppress(DBAPIError):
            session.execute(FAILS)
        session.commit()  # returns; the message is out, and no row is stored


def by_txmq(engine: Engine, client: txmq.Client, topic: str, order: str) -> None:
    """Send the message with the transaction."""
    with Session(engine) as session:
        txmq.sqlalchemy.enlist(session, client).send(topic, order.encode())
        session.execute(INSERT, {"id": order})
        with suppress(DBAPIError):
            session.execute(FAILS)
        session.commit()  # raises TransactionAborted; nothing is out
