"""Sells at a counter: SQLAlchemy and psycopg 3, with the outbox.

    python -m examples.services.till FILE      # of lines of JSON; or standard input

The sale's row and its message are one decision. The till sells while the broker is away
as well, and may be started then: its messages wait in the database, and the broker
fetches them when it is back, once and in the order of each customer. Killed and started
again with the same file, the till goes on where it was.
"""

from __future__ import annotations

import fileinput
import json
import os

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import txmq
import txmq.sqlalchemy


class Base(DeclarativeBase):
    """The tables of this service."""


class Order(Base):
    """A sale; the goods are sent."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]
    address: Mapped[str]


def sell(session: Session, line: str) -> None:
    """Store one sale and its message with the transaction of the session."""
    order = Order(**json.loads(line))
    if session.get(Order, order.id):
        return  # sold before
    session.add(order)
    txmq.sqlalchemy.enlist(session, on_unavailable="outbox").send(
        "orders", line.encode(), key=order.customer, headers={"correlation": order.id}
    )


def main() -> None:
    engine = create_engine(make_url(os.environ["DSN"]).set(drivername="postgresql+psycopg"))
    txmq.sqlalchemy.install(engine)
    with (
        txmq.connect(os.environ["TXMQ_BROKER"], service="till") as client,
        fileinput.input() as lines,
    ):
        sessions = sessionmaker(engine, info={"txmq": client})
        for line in lines:
            with sessions.begin() as session:
                sell(session, line)
            print("sold", line, end="", flush=True)


if __name__ == "__main__":
    main()
