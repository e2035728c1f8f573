"""Try each way once, and count rows and messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from uuid import uuid4

import django
import psycopg2
from django.conf import settings
from psycopg2.extensions import parse_dsn
from sqlalchemy import Engine, create_engine

import txmq
import txmq.sqlalchemy
from txmq.errors import TransactionAborted

TABLE = "CREATE TABLE IF NOT EXISTS phantom_orders (id text PRIMARY KEY)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.phantom", description=__doc__)
    parser.add_argument("dsn", help="a database with txmq's tables")
    parser.add_argument("url", help="the address of a broker that may ask it: txmq://host:port")
    given = parser.parse_args()
    with psycopg2.connect(given.dsn) as connection, connection.cursor() as cursor:
        cursor.execute(TABLE)
    engine = create_engine("postgresql+psycopg2://", connect_args=parse_dsn(given.dsn))
    txmq.sqlalchemy.install(engine)
    set_up_django(given.dsn, given.url)
    with txmq.connect(given.url, service="phantom") as client:
        print("way                       the end             rows  messages")
        for way, order in ways(engine, client).items():
            print(f"{way:<26}{attempt(order, given.dsn, client)}")
    return 0


def ways(engine: Engine, client: txmq.Client) -> dict[str, Callable[[str, str], None]]:
    """Return what takes a topic and an order."""
    # Django has to be set up before its connection is imported.
    from examples.phantom import with_django, with_sqlalchemy  # noqa: PLC0415

    return {
        "SQLAlchemy, after_commit": partial(with_sqlalchemy.by_hook, engine, client),
        "SQLAlchemy, txmq": partial(with_sqlalchemy.by_txmq, engine, client),
        "Django, on_commit": partial(with_django.by_hook, client),
        "Django, txmq": with_django.by_txmq,
    }


def attempt(place: Callable[[str, str], None], dsn: str, client: txmq.Client) -> str:
    """Place an order; return how that ended, and the numbers of rows and messages."""
    order, topic = str(uuid4()), f"phantom-{uuid4().hex}"
    client.call("topic.create", name=topic, partitions=1)
    ended = "returns"
    try:
        place(topic, order)
    except TransactionAborted as error:
        ended = type(error).__name__
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT FROM phantom_orders WHERE id = %s", (order,))
        rows = cursor.rowcount
    messages = len(list(client.find(topic, partition=0)))
    client.call("topic.delete", name=topic)
    return f"{ended:<20}{rows:<6}{messages}"


def set_up_django(dsn: str, url: str) -> None:
    """Give Django its settings, as a project has them."""
    place = parse_dsn(dsn)
    settings.configure(
        INSTALLED_APPS=["txmq.django"],
        DATABASES={
            "default": {
                "ENGINE": "txmq.django.backend",
                "NAME": place["dbname"],
                "OPTIONS": {name: place[name] for name in place if name != "dbname"},
            }
        },
        TXMQ={"URL": url, "SERVICE": "phantom"},
    )
    django.setup()


if __name__ == "__main__":
    raise SystemExit(main())
