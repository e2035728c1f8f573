"""The examples of a page, run as they stand, by
`python -m tests.document_examples PAGE DSN`.

The blocks of Python and SQL run in the page's order in one namespace, with a broker and
a database of their own. A block that calls `charge` or waits for messages ends as by
Ctrl-C once it got one. A page's blocks suppose names, such as `client`: those of
SUPPOSED are set anew before each block, and the tables are emptied. An address is the
only thing that is replaced.

Commands of the shell: tests/cli/test_operations_pages.py, tests/system/test_security.py
and tests/spark/test_documented_commands.py run them, and
tests/cli/test_documented_commands.py parses them all.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from inspect import CO_COROUTINE
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import psycopg
import psycopg2
from psycopg2.extensions import parse_dsn
from pydantic import BaseModel

import txmq
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.postgres_server import postgres_url
from txmq.testing.wait import PATIENCE_S

ROOT: Final = Path(__file__).parents[1]
BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN: Final = ("python", "sql")
# Blocks that do not run here: their page, the number among the page's blocks of that
# language, and why.
ELSEWHERE: Final = {
    ("README.md", "sql", 1): "the tables are here already",
    ("README.md", "python", 2): "it is a program: tests/client/test_readme.py runs it",
    ("docs/CONSUMERS.md", "python", 1): "a program: tests/client/test_consumers_page.py runs it",
    ("docs/CONSUMERS.md", "python", 2): "likewise",
    ("docs/CONSUMERS.md", "python", 3): "likewise",
    ("docs/SECURITY.md", "sql", 1): "grants by a superuser: tests/tx/postgres/test_schema.py",
    ("docs/SECURITY.md", "sql", 2): "grants to roles, likewise",
    ("docs/TESTING.md", "python", 1): "tests, which tests/testing/test_plugin.py runs",
    ("docs/TESTING.md", "python", 2): "likewise",
    ("spark/README.md", "python", 1): "in a session of Spark: tests/spark/test_readme.py runs it",
    ("spark/README.md", "python", 2): "likewise",
    ("spark/README.md", "python", 3): "likewise",
    ("spark/README.md", "python", 4): "with orders of its own: tests/spark/test_event_time.py",
}
# Statements that show that a block of SQL does what its page says.
AFTERWARDS: Final = {("docs/TRANSACTIONS.md", "sql", 1): "INSERT INTO orders VALUES (1, 'c-7')"}
TABLES: Final = """
CREATE TABLE orders (id int PRIMARY KEY, customer text);
CREATE TABLE charges (message text);
"""


class Block(NamedTuple):
    """A block of code of a page, the `number`-th one of its language, behind so many
    lines.
    """

    page: str
    language: str
    number: int
    text: str
    lines: int


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page of the repository."""
    seen = dict[str, int]()
    text = (ROOT / page).read_text("utf-8")
    for found in BLOCK.finditer(text):
        language = found[1]
        seen[language] = seen.get(language, 0) + 1
        lines = text.count("\n", 0, found.start(2))
        yield Block(page, language, seen[language], found[2], lines)


def to_run(page: str) -> list[Block]:
    """Return the blocks of a page that run here."""
    return [one for one in blocks(page) if one.language in RUN and one[:3] not in ELSEWHERE]


class Place(NamedTuple):
    """Where a page's examples run."""

    url: str
    dsn: str
    stack: ExitStack

    def replace(self, text: str) -> str:
        """Return a block with the addresses of this broker and this database."""
        text = text.replace("txmq://127.0.0.1:7650", self.url)
        return text.replace("://app@db/shop", postgres_url(self.dsn).removeprefix("postgresql"))


def interrupting() -> Callable[[object], None]:
    """Return a handler whose first call is a Ctrl-C."""
    calls = iter((signal.SIGINT,))

    def charge(message: object) -> None:
        del message
        for number in calls:
            os.kill(os.getpid(), number)

    return charge


class Order(BaseModel):
    """A body."""

    id: int = 1
    name: str = "o-1"


def supposed(place: Place, *, awaits: bool) -> dict[str, Any]:
    """Return the names that any page may suppose, for a block that awaits or not."""
    names: dict[str, Any] = {
        "asyncio": asyncio, "psycopg2": psycopg2, "txmq": txmq,
        "DSN": place.dsn, "url": place.url, "body": b"...", "Order": Order,
    }  # fmt: skip
    if awaits:
        return names
    client = place.stack.enter_context(txmq.connect(place.url, service="t", timeout=PATIENCE_S))
    return names | {
        "client": client,
        "connection": psycopg2.connect(place.dsn),
        "store": SimpleNamespace(has=lambda _token: True, bill=lambda _key, _token: None),
    }


async def supposed_awaited(place: Place) -> dict[str, Any]:
    """Return those of a block that awaits, in its loop."""
    return {
        "client": txmq.aio.connect(place.url, service="t", timeout=PATIENCE_S),
        "connection": await psycopg.AsyncConnection.connect(place.dsn),
    }


def of_readme(place: Place, *, awaits: bool) -> dict[str, Any]:
    """A session of SQLAlchemy's, whose engine takes messages along."""
    from sqlalchemy import create_engine, event, text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session

    del awaits
    engine = create_engine("postgresql+psycopg2://", connect_args=parse_dsn(place.dsn))
    txmq.sqlalchemy.install(engine)
    return {
        "event": event, "text": text, "DBAPIError": DBAPIError, "suppress": suppress,
        "session": Session(engine), "insert_order": text("INSERT INTO orders VALUES (1)"),
    }  # fmt: skip


def of_guide(place: Place, *, awaits: bool) -> dict[str, Any]:
    """A handler, and providers of OpenTelemetry."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    del place
    charge = interrupting()

    async def charge_awaited(message: object) -> None:
        charge(message)

    return {
        "charge": charge_awaited if awaits else charge,
        "tracer_provider": TracerProvider(), "meter_provider": MeterProvider(),
    }  # fmt: skip


def of_transactions(place: Place, *, awaits: bool) -> dict[str, Any]:
    """What the page imports of SQLAlchemy and Django, and a model."""
    import sqlalchemy
    from django.db import transaction
    from sqlalchemy import orm
    from sqlalchemy.ext import asyncio as aio

    del awaits
    configure_django(place)
    return {
        "create_engine": sqlalchemy.create_engine, "sessionmaker": orm.sessionmaker,
        "create_async_engine": aio.create_async_engine, "AsyncSession": aio.AsyncSession,
        "Order": order_row(), "transaction": transaction, "contextmanager": contextmanager,
    }  # fmt: skip


@cache
def order_row() -> type:
    """Return the model of table `orders`, of SQLAlchemy and of Django in one."""
    from django.db import models
    from sqlalchemy import Column, Integer, Table, orm

    base: Any = orm.declarative_base()

    class Row(base):  # type: ignore[misc]  # made as the page's reader has long made it
        __table__ = Table("orders", base.metadata, Column("id", Integer, primary_key=True))

    class DjangoRow(models.Model):  # type: ignore[misc]  # noqa: DJ008  # untyped; not printed
        class Meta:
            app_label, managed, db_table = "shop", False, "orders"

    Row.objects = DjangoRow.objects  # Django's
    return Row


def configure_django(place: Place) -> None:
    """Set Django up once, with the settings of the page."""
    import django
    from django.conf import settings

    if settings.configured:
        return
    fields = parse_dsn(place.dsn)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST"}
    database = {theirs: fields[own] for own, theirs in names.items()} | {"PORT": fields["port"]}
    settings.configure(
        INSTALLED_APPS=["txmq.django"],
        DATABASES={"default": {"ENGINE": "txmq.django.backend", **database}},
        TXMQ={"URL": place.url, "SERVICE": "shop", "OPTIONS": {"timeout": PATIENCE_S}},
    )
    django.setup()


def of_frameworks(place: Place, *, awaits: bool) -> dict[str, Any]:
    """Values of FastStream's page."""
    from faststream import AckPolicy

    del place, awaits
    return {"AckPolicy": AckPolicy, "Invoice": SimpleNamespace, "Stored": Order}


def of_others(place: Place, *, awaits: bool) -> dict[str, Any]:
    """Nothing more."""
    del place, awaits
    return {}


SUPPOSED: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "README.md": of_readme,
    "docs/GUIDE.md": of_guide,
    "docs/TRANSACTIONS.md": of_transactions,
    "docs/FRAMEWORKS.md": of_frameworks,
}


class Examples:
    """The examples of a page while they run."""

    def __init__(self, page: str, place: Place) -> None:
        self._page, self._place = page, place
        module = sys.modules["example"] = ModuleType("example")
        self._names = vars(module)
        self._loop = place.stack.enter_context(asyncio.Runner())
        self._own: Callable[..., dict[str, Any]] = SUPPOSED.get(page, of_others)
        self.execute(TABLES)

    def run(self) -> None:
        """Run all blocks. Raises what one raises, noted with the block."""
        for block in to_run(self._page):
            self.execute("TRUNCATE orders, charges")
            try:
                self.run_block(block)
            except KeyboardInterrupt:  # the end of what has none
                pass
            except Exception as error:
                error.add_note(f"{block.page}, block {block.number} of {block.language}")
                raise

    def run_block(self, block: Block) -> None:
        """Run a block."""
        text = self._place.replace(block.text)
        if block.language == "sql":
            self.execute(text)
            self.execute(AFTERWARDS.get(block[:3], ""))
            return
        code = compile(
            "\n" * block.lines + text, ROOT / block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        awaits = bool(code.co_flags & CO_COROUTINE)
        self._names |= supposed(self._place, awaits=awaits) | self._own(self._place, awaits=awaits)
        if not awaits:
            exec(code, self._names)
            return

        async def awaited() -> None:
            self._names |= await supposed_awaited(self._place)
            await cast("Awaitable[None]", eval(code, self._names))

        self._loop.run(awaited())

    def execute(self, statement: str) -> None:
        """Execute a statement in the database."""
        with psycopg.connect(self._place.dsn, autocommit=True) as connection:
            connection.execute(statement.encode())


def main(page: str, dsn: str) -> None:
    """Run the examples of a page."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        broker = BrokerThread(Path(folder) / "data", databases={"shop": dsn})
        url = stack.enter_context(broker).url
        Examples(page, Place(url, dsn, stack)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
