"""The demonstration's audit finds every planted contradiction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import resources

import psycopg2
import pytest
from psycopg2.extensions import cursor as Cursor  # noqa: N812  # a class

from examples.order_flow import audit

# Two customers: one with two orders, charged and shipped; one blocked, whose order is
# refused, but shipped.
CORRECT = """
INSERT INTO carriers VALUES ('MAIL');
INSERT INTO customers VALUES (1, 100, 40, 2, false), (2, 50, 40, 1, true);
INSERT INTO orders VALUES (11, 1, 1, 20, '1996-01-02', 'MAIL'),
                          (12, 1, 2, 40, '1996-01-03', 'MAIL'),
                          (13, 2, 1, 10, '1996-01-04', 'MAIL');
INSERT INTO order_lines SELECT order_id, line, 7, 1, 5 FROM orders, generate_series(1, 2) line;
INSERT INTO charges (order_id, customer_id, cents) VALUES (12, 1, 40), (11, 1, 20);
INSERT INTO shipments (order_id, customer_id, version, carrier)
VALUES (13, 2, 1, 'MAIL'), (11, 1, 1, 'MAIL'), (12, 1, 2, 'MAIL');
INSERT INTO txmq_token (tok, log_id)
SELECT lpad(order_id::text, 32, 'f')::uuid, gen_random_uuid() FROM orders;
INSERT INTO input SELECT order_id, customer_id, 2, total_cents FROM orders;
INSERT INTO found
SELECT 0, order_id, lpad(order_id::text, 32, 'f') || '-0', customer_id, order_id, customer_id,
       version, total_cents
FROM orders;
INSERT INTO sales SELECT ordered_on, 1, total_cents FROM orders;
INSERT INTO letters VALUES ('payment', 0, 13, 'abandoned', 'blocked');
INSERT INTO told VALUES ('a', 'payment', 'new-error'), ('b', 'shipping', 'flood');
INSERT INTO alerts SELECT id, kind, consumer_group, now(), '{}' FROM told;
INSERT INTO scans VALUES ('s', 1), ('s', 2);  -- a third one was sent, and its producer killed
INSERT INTO scanned VALUES ('s', 1, 4, 0), ('s', 2, 4, 1), ('s', 3, 4, 2);
"""

PLANTED = [  # a statement, and the beginning of the claim that it breaks
    ("DELETE FROM found WHERE order_id = 12", "every committed order"),
    ("INSERT INTO found SELECT * FROM found WHERE order_id = 12", "every committed order"),
    ("UPDATE found SET order_id = 99 WHERE order_id = 12", "every message"),
    ("UPDATE found SET cents = 1 WHERE order_id = 12", "every message"),
    ("DELETE FROM order_lines WHERE order_id = 12 AND line = 1", "every order of the input"),
    ("DELETE FROM input WHERE order_id = 12", "every order of the input"),
    ("INSERT INTO input VALUES (14, 1, 1, 1)", "every order of the input"),
    ('UPDATE found SET "offset" = 1 WHERE order_id = 12', "each customer's messages"),
    ("UPDATE customers SET balance_cents = 0 WHERE customer_id = 1", "each balance"),
    ("UPDATE customers SET version = 3 WHERE customer_id = 1", "each balance"),
    (
        "INSERT INTO charges (order_id, customer_id, cents) VALUES (11, 1, 20)",
        "each order is charged",
    ),
    ("DELETE FROM charges WHERE order_id = 11", "each order is charged"),
    ("DELETE FROM letters", "each order is charged"),
    ("UPDATE charges SET cents = 1", "each charge"),
    ("INSERT INTO charges (order_id, customer_id, cents) VALUES (13, 2, 10)", "exactly the orders"),
    ("UPDATE shipments SET shipment_id = -shipment_id", "each customer's orders"),
    ("DELETE FROM shipments WHERE order_id = 11", "each customer's orders"),
    ("DELETE FROM shipments WHERE order_id = 12", "each customer's orders"),
    (
        "INSERT INTO shipments SELECT 99, 12, 1, 2, 'MAIL'",
        "each customer's orders",
    ),
    ("DELETE FROM sales WHERE cents = 20", "analytics"),
    ("UPDATE sales SET orders = 2 WHERE cents = 20", "analytics"),
    ("UPDATE letters SET state = 'dead'", "no message is in two places"),
    (
        "INSERT INTO letters VALUES ('payment', 0, 11, 'abandoned', 'blocked')",
        "no message is in two places",
    ),
    ("INSERT INTO unsettled VALUES ('shipping', 'fences', 1)", "every consumer group"),
    (
        "INSERT INTO unsettled VALUES ('shipping', 'at_consumers', 1)",
        "nothing is left on the disks",
    ),
    ("INSERT INTO unsettled VALUES ('tracking', 'spooled', 1)", "nothing is left on the disks"),
    ("DELETE FROM told WHERE id = 'b'", "each alert"),
    ("DELETE FROM alerts WHERE id = 'b'", "each alert"),
    ("INSERT INTO told SELECT * FROM told WHERE id = 'b'", "each alert"),
    ("UPDATE told SET kind = 'old' WHERE id = 'a'", "each group with letters"),
    ("DELETE FROM scanned WHERE number = 2", "each scan with a receipt"),
    ("INSERT INTO scanned VALUES ('s', 1, 4, 3)", "each scan with a receipt"),
    ("INSERT INTO scanned VALUES ('s', 4, 4, 3), ('s', 4, 4, 4)", "each scanner's scans"),
    ('UPDATE scanned SET "offset" = 9 WHERE number = 1', "each scanner's scans"),
    ("INSERT INTO undecided VALUES ('ab', 'undecided')", "no transaction"),
    (
        "DELETE FROM txmq_token WHERE tok IN (SELECT tok FROM txmq_token LIMIT 1)",
        "each transaction",
    ),
    (
        "INSERT INTO txmq_token (tok, log_id) VALUES (repeat('f', 32)::uuid, gen_random_uuid())",
        "each transaction",
    ),
]


@pytest.fixture
def cursor(database: str) -> Iterator[Cursor]:
    """A cursor of a database with a small, correct shop."""
    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute(
            resources.files("examples.order_flow").joinpath("schema.sql").read_text("utf-8")
        )
        cursor.execute(audit.TABLES)
        cursor.execute(CORRECT)
        yield cursor


def test_a_correct_shop_has_no_contradictions(cursor: Cursor) -> None:
    assert [result for result in audit.check_claims(cursor) if result.contradictions] == []


def test_each_claim_has_a_planted_contradiction() -> None:
    beginnings = tuple(claim for _planted, claim in PLANTED)
    assert [claim for claim in audit.CLAIMS if not claim.startswith(beginnings)] == []


@pytest.mark.parametrize(("planted", "claim"), PLANTED)
def test_a_planted_contradiction_is_found(cursor: Cursor, planted: str, claim: str) -> None:
    cursor.execute(planted)
    assert any(
        result.claim.startswith(claim)
        for result in audit.check_claims(cursor)
        if result.contradictions
    )
