"""The audit of the final state: claims about the tables and about the topic as it reads
back.

Each claim is a query for the rows that contradict it.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from io import StringIO
from typing import Any, Final, NamedTuple

import psycopg2
from psycopg2.extensions import cursor as Cursor  # noqa: N812  # a class

import txmq
from examples.order_flow import watch
from examples.order_flow.data import read_orders
from examples.order_flow.deployment import Deployment
from examples.order_flow.fleet import ROOT
from examples.order_flow.order_placed import ORDER_PLACED, OrderPlaced
from examples.order_flow.services import tracking
from txmq.recover.local.spools import spools_below
from txmq.testing.processes import ProcessEnded

SHOWN: Final = 3  # examples per claim
PAGE: Final = 1_000  # letters per call

TABLES: Final = """
CREATE TEMPORARY TABLE input (order_id int8, customer_id int8, lines int8, cents int8);
CREATE TEMPORARY TABLE found (
    partition int4, "offset" int8, message_id text, key text,
    order_id int8, customer_id int8, version int8, cents int8
);
CREATE TEMPORARY TABLE letters (grp text, partition int4, "offset" int8, state text, reason text);
CREATE TEMPORARY TABLE undecided (token text, state text);
CREATE TEMPORARY TABLE scans (scanner text, number int8);
CREATE TEMPORARY TABLE scanned (scanner text, number int8, partition int4, "offset" int8);
CREATE TEMPORARY TABLE told (id text, consumer_group text, kind text);
CREATE TEMPORARY TABLE unsettled (grp text, what text, count int8);
"""

CLAIMS: Final = {
    "every committed order has exactly one message": """
        SELECT o.order_id, count(f.order_id) FROM orders o LEFT JOIN found f USING (order_id)
        GROUP BY o.order_id HAVING count(f.order_id) <> 1""",
    "every message has its committed order, with the same contents": """
        SELECT f.message_id FROM found f LEFT JOIN orders o USING (order_id)
        WHERE (o.customer_id, o.version, o.total_cents)
              IS DISTINCT FROM (f.customer_id, f.version, f.cents)""",
    "every order of the input is committed with all its lines, and no other": """
        SELECT order_id FROM input i FULL JOIN (
            SELECT o.*,
                   (SELECT count(*) FROM order_lines l WHERE l.order_id = o.order_id) AS lines
            FROM orders o
        ) o USING (order_id)
        WHERE (i.customer_id, i.lines, i.cents)
              IS DISTINCT FROM (o.customer_id, o.lines, o.total_cents)""",
    "each customer's messages are in the order of their versions": """
        SELECT customer_id, version FROM (
            SELECT *, row_number() OVER (
                PARTITION BY customer_id ORDER BY partition, "offset"
            ) AS place FROM found
        ) placed WHERE version <> place""",
    "each balance is the opening balance minus the orders": """
        SELECT c.customer_id FROM customers c LEFT JOIN orders USING (customer_id)
        GROUP BY c.customer_id
        HAVING balance_cents <> opening_cents - coalesce(sum(total_cents), 0)
               OR c.version <> count(order_id)""",
    "each order is charged exactly once, or refused": """
        WITH charged AS (SELECT order_id, count(*) AS times FROM charges GROUP BY order_id),
             refused AS (
                 SELECT order_id, count(*) AS times
                 FROM found JOIN letters USING (partition, "offset")
                 WHERE grp = 'payment' GROUP BY order_id
             )
        SELECT order_id, c.times, r.times FROM orders
        LEFT JOIN charged c USING (order_id) LEFT JOIN refused r USING (order_id)
        WHERE coalesce(c.times, 0) + coalesce(r.times, 0) <> 1""",
    "each charge has the customer and the amount of its order": """
        SELECT charge_id FROM charges c LEFT JOIN orders o USING (order_id)
        WHERE (o.customer_id, o.total_cents) IS DISTINCT FROM (c.customer_id, c.cents)""",
    "exactly the orders of blocked customers are refused": """
        SELECT order_id FROM orders o JOIN customers USING (customer_id)
        LEFT JOIN charges USING (order_id) WHERE blocked <> (charge_id IS NULL)""",
    "each customer's orders were shipped in the order of their versions, without a gap": """
        SELECT customer_id, version FROM (
            SELECT o.customer_id, o.version, shipment_id,
                   row_number() OVER (PARTITION BY o.customer_id ORDER BY shipment_id) AS place
            FROM orders o
            LEFT JOIN shipments s ON (s.order_id, s.version) = (o.order_id, o.version)
        ) shipped WHERE version <> place OR shipment_id IS NULL
        UNION ALL
        SELECT customer_id, -1 FROM shipments GROUP BY customer_id, order_id
        HAVING count(*) <> 1""",
    "analytics counted each order exactly once": """
        SELECT ordered_on FROM sales s
        FULL JOIN (
            SELECT ordered_on, count(*) AS orders, sum(total_cents) AS cents FROM orders GROUP BY 1
        ) o USING (ordered_on)
        WHERE (s.orders, s.cents) IS DISTINCT FROM (o.orders, o.cents)""",
    "no message is in two places": """
        SELECT partition, "offset" FROM letters JOIN found USING (partition, "offset")
        JOIN charges USING (order_id) WHERE grp = 'payment'
        UNION ALL
        SELECT partition, "offset" FROM letters JOIN found USING (partition, "offset")
        JOIN shipments USING (order_id) WHERE grp = 'shipping'
        UNION ALL
        SELECT partition, "offset" FROM found GROUP BY partition, "offset" HAVING count(*) > 1
        UNION ALL
        SELECT partition, "offset" FROM letters WHERE state <> 'abandoned'""",
    "every consumer group is done: nothing unsettled, no lease, retry, fence or parked message": """
        SELECT * FROM unsettled WHERE what NOT IN ('at_consumers', 'spooled')""",
    "nothing is left on the disks of consumers and producers": """
        SELECT * FROM unsettled WHERE what IN ('at_consumers', 'spooled')""",
    "each scan with a receipt is in its topic exactly once": """
        SELECT k.scanner, k.number FROM scans k LEFT JOIN scanned s USING (scanner, number)
        GROUP BY 1, 2 HAVING count(s.scanner) <> 1""",
    "each scanner's scans are in their order, and none is there twice": """
        SELECT scanner, number FROM (
            SELECT *, lag(number) OVER (
                PARTITION BY scanner ORDER BY partition, "offset"
            ) AS before FROM scanned
        ) placed WHERE number <= before""",
    "each alert is in its topic once and in its table once": """
        SELECT id FROM told t FULL JOIN alerts a USING (id)
        GROUP BY id HAVING count(t.kind) <> 1 OR count(a.kind) <> 1""",
    "each group with letters was told a new error": """
        SELECT grp FROM letters
        EXCEPT SELECT consumer_group FROM told WHERE kind = 'new-error'""",
    "no transaction is undecided, in doubt or contradictory": """
        SELECT token, state FROM undecided
        UNION ALL
        SELECT gid, 'prepared' FROM pg_prepared_xacts WHERE database = current_database()""",
    "each transaction in the token table has its message, and each message its transaction": """
        SELECT tok FROM (
            SELECT replace(tok::text, '-', '') AS tok FROM txmq_token WHERE state IN ('C', 'D')
        ) t
        FULL JOIN (SELECT left(message_id, 32) AS tok FROM found) f USING (tok)
        WHERE (t IS NULL) OR (f IS NULL)""",
}


class ClaimResult(NamedTuple):
    """A claim, the number of its contradictions, and examples of them."""

    claim: str
    contradictions: int
    examples: list[tuple[Any, ...]]


def audit(deployment: Deployment) -> list[ClaimResult]:
    """Read topic and letters back and check all claims."""
    with (
        closing(psycopg2.connect(deployment.dsn)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(TABLES)
        _fill(cursor, deployment)
        return check_claims(cursor)


def check_claims(cursor: Cursor) -> list[ClaimResult]:
    """Check all claims; TABLES must exist and be filled."""
    return [_check_claim(cursor, claim, query) for claim, query in CLAIMS.items()]


def _check_claim(cursor: Cursor, claim: str, query: str) -> ClaimResult:
    cursor.execute(query)
    rows = cursor.fetchall()
    return ClaimResult(claim, len(rows), rows[:SHOWN])


def _fill(cursor: Cursor, deployment: Deployment) -> None:
    orders = read_orders(deployment.data)
    _copy(
        cursor, "input", ((o.order_id, o.customer_id, len(o.lines), o.total_cents) for o in orders)
    )
    _copy(cursor, "found", map(_found, read_back(deployment.url, ORDER_PLACED)))
    _copy(cursor, "scanned", map(_scanned, read_back(deployment.url, tracking.TOPIC)))
    _copy(cursor, "told", map(_told, read_back(deployment.url, watch.TOPIC)))
    kept = deployment.local.glob(f"*/{tracking.KEPT}")
    _copy(cursor, "scans", (scan for path in kept for scan in tracking.read_scans(path)))
    with deployment.client() as client:
        _copy(cursor, "letters", letters(client, "payment", "shipping"))
        states = ("undecided", "waiting", "in-doubt", "conflicts")
        listed = ((state, client.call("tx.list", state=state)["transactions"]) for state in states)
        _copy(
            cursor, "undecided", ((row["token"], state) for state, rows in listed for row in rows)
        )
        names = ("unsettled", "leased", "retrying", "at_consumers", "parked", "fences", "letters")
        groups = client.call("group.list")["groups"]
        left = [(row["group"], name, row[name]) for row in groups for name in names if row[name]]
    left += [
        (spool.service, "spooled", spool.messages + spool.refused)
        for directory in deployment.local.glob(f"*/{tracking.SPOOLS}")
        for spool in spools_below(str(directory))
        if spool.messages or spool.refused
    ]
    _copy(cursor, "unsettled", left)


def _found(message: dict[str, Any]) -> tuple[Any, ...]:
    order = OrderPlaced.decode(message["body"].encode())
    place = (message["partition"], message["offset"], message["message_id"], message["key"])
    return *place, order.order_id, order.customer_id, order.version, order.total_cents


def _scanned(message: dict[str, Any]) -> tuple[Any, ...]:
    return message["key"], int(message["body"]), message["partition"], message["offset"]


def _told(message: dict[str, Any]) -> tuple[Any, ...]:
    alert = json.loads(message["body"])
    return alert["id"], alert["group"], alert["alert"]


def read_back(url: str, topic: str) -> Iterator[dict[str, Any]]:
    """Yield all messages of a topic, as the command line reads them."""
    command = [
        sys.executable,
        "-m",
        "txmq",
        "tail",
        topic,
        "--no-follow",
        "--json",
        "--broker",
        url,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise ProcessEnded(f"txmq tail ended with status {process.returncode}")


def letters(client: txmq.Client, *groups: str) -> Iterator[tuple[Any, ...]]:
    """Yield the dead letters of consumer groups, including abandoned ones."""
    for group in groups:
        after: int | None = 0
        while after is not None:
            reply = client.call("dlq.list", group=group, after=after, limit=PAGE)
            after = reply["next"]
            for row in reply["letters"]:
                yield group, row["partition"], row["offset"], row["state"], row["reason"]


def _copy(cursor: Cursor, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    text = StringIO()
    csv.writer(text).writerows(rows)
    text.seek(0)
    cursor.copy_expert(f"COPY {table} FROM STDIN (FORMAT csv)", text)
