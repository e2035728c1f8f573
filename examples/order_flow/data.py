"""The input: orders, order lines and customers of the TPC-H generator, the same in
every run.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from decimal import Decimal
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import psycopg2
from psycopg2.extras import execute_values

from txmq.errors import ConfigError

TABLES = ("customer", "lineitem", "orders")


class OrderLine(NamedTuple):
    """A quantity of one part."""

    line: int
    part_id: int
    quantity: int
    price_cents: int


class Order(NamedTuple):
    """An incoming order."""

    order_id: int
    customer_id: int
    total_cents: int
    ordered_on: date
    priority: str
    carrier: str
    lines: list[OrderLine]


class InputSummary(NamedTuple):
    """The size of the input, and the ids in it."""

    orders: int
    lines: int
    customers: tuple[int, ...]  # those with orders
    parts: tuple[int, ...]
    carriers: tuple[str, ...]


def generate(directory: Path, scale: float) -> None:
    """Generate the tables as CSV files in `directory`.

    Raises ConfigError where the generator is missing or fails.
    """
    program = Path(sys.executable).with_name("tpchgen-cli")
    options = [
        f"--scale-factor={scale}",
        f"--tables={','.join(TABLES)}",
        f"--output-dir={directory}",
        "--quiet",
    ]
    try:
        done = subprocess.run(
            [program, "csv", *options], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "tpchgen-cli", f"{program} is missing", hint="run: pip install 'txmq[demo]'"
        ) from None
    if done.returncode:
        raise ConfigError(
            "scale", f"tpchgen-cli failed: {done.stderr.strip()}", hint="try --scale 0.01"
        )


def read_orders(directory: Path, *, share: int = 0, of: int = 1) -> Iterator[Order]:
    """Yield the orders by number.

    With `of` > 1, yield each `of`-th order from number `share` on.
    """
    # both files are sorted by the order key
    lines = groupby(_rows(directory, "lineitem"), key=itemgetter("l_orderkey"))
    both = zip(_rows(directory, "orders"), lines, strict=True)
    for row, (order_id, its_lines) in islice(both, share, None, of):
        assert row["o_orderkey"] == order_id, "every order has lines"
        yield _order(row, list(its_lines))


def _order(row: dict[str, str], lines: list[dict[str, str]]) -> Order:
    return Order(
        order_id=int(row["o_orderkey"]),
        customer_id=int(row["o_custkey"]),
        total_cents=_cents(row["o_totalprice"]),
        ordered_on=date.fromisoformat(row["o_orderdate"]),
        priority=row["o_orderpriority"],
        carrier=lines[0]["l_shipmode"],
        lines=[
            OrderLine(
                int(line["l_linenumber"]),
                int(line["l_partkey"]),
                int(line["l_quantity"]),
                _cents(line["l_extendedprice"]),
            )
            for line in lines
        ],
    )


def load(directory: Path, dsn: str) -> InputSummary:
    """Create the tables of the shop and fill those that exist before the first
    order.
    """
    facts = _summarise(directory)
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(Path(__file__).with_name("schema.sql").read_text("utf-8"))
        customers = [
            (int(row["c_custkey"]), _cents(row["c_acctbal"]))
            for row in _rows(directory, "customer")
        ]
        accounts = "INSERT INTO customers (customer_id, opening_cents, balance_cents) VALUES %s"
        execute_values(
            cursor, accounts, [(customer, cents, cents) for customer, cents in customers]
        )
        execute_values(
            cursor,
            "INSERT INTO parts VALUES %s",
            [(part, f"HS-{part % 97:02}{part:06}") for part in facts.parts],
        )
        execute_values(
            cursor,
            "INSERT INTO carriers (carrier) VALUES %s",
            [(carrier,) for carrier in facts.carriers],
        )
    return facts


def _summarise(directory: Path) -> InputSummary:
    orders = lines = 0
    customers, parts, carriers = set[int](), set[int](), set[str]()
    for order in read_orders(directory):
        orders += 1
        lines += len(order.lines)
        customers.add(order.customer_id)
        parts.update(line.part_id for line in order.lines)
        carriers.add(order.carrier)
    return InputSummary(
        orders, lines, tuple(sorted(customers)), tuple(sorted(parts)), tuple(sorted(carriers))
    )


def _rows(directory: Path, table: str) -> Iterator[dict[str, str]]:
    with (directory / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _cents(amount: str) -> int:
    return int(Decimal(amount) * 100)
