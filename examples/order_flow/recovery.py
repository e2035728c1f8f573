"""What an operator does about dead letters: reconcile in Spark, remove the cause,
replay the plan, close the rest.

    python -m examples.order_flow.recovery DIRECTORY

is a process of its own, so that a JVM and its messages stay out of the director. Plans
and pages go into DIRECTORY; broker and database are in the environment: TXMQ_BROKER,
TXMQ_DSN. `spark-submit spark/reconcile.py` and `spark/replay.py` do the same one by
one.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg2
from rich.console import Console

import txmq
from examples.order_flow.services import payment, shipping
from txmq.testing.spark import local_session
from txmq_spark.plan import SAFE, Class, Rules
from txmq_spark.reconcile import Question, Reconciliation, reconcile
from txmq_spark.replay import replay
from txmq_spark.report import page, terminal
from txmq_spark.tables import Business

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Nobody will unblock the account, so that another try is of no use.
REFUSED: Final = f"{payment.PaymentRefused.__module__}.{payment.PaymentRefused.__qualname__}"
# One that failed after its effect was committed (its last ack died with the broker) is
# replayed, too: the inbox drops it, and its key's fence lifts.
TAKEN: Final = SAFE | {Class.APPLIED}
RULES: Final = {
    # Each order is charged by itself: a later charge of the customer makes none
    # superfluous.
    payment.GROUP: Rules(error_types=frozenset({REFUSED}), include=TAKEN | {Class.SUPERSEDED}),
    shipping.GROUP: Rules(include=TAKEN),
}
REASON: Final = "the customer's account is blocked: the money is collected by other means"
AT_ONCE: Final = 1_000  # letters that a broker takes in one call
FIX: Final = "UPDATE parts SET customs_code = 'HS-' || part_id WHERE customs_code IS NULL"


def main() -> None:
    directory, url, dsn = Path(sys.argv[1]), os.environ["TXMQ_BROKER"], os.environ["TXMQ_DSN"]
    with local_session() as spark:
        found = [examine(spark, directory, _question(url, dsn, group)) for group in RULES]
        print(f"fixed: customs codes entered for {fix(dsn)} parts", flush=True)
        for reconciliation in found:
            carry_out(spark, url, reconciliation)
    with txmq.connect(url, service="operator") as client:
        for reconciliation in found:
            abandon(client, reconciliation)


def _question(url: str, dsn: str, group: str) -> Question:
    return Question(
        url=url,
        group=group,
        dsn=dsn,
        business=Business("orders", key="customer_id"),
        version="header:version",
        rules=RULES[group],
    )


def examine(spark: SparkSession, directory: Path, question: Question) -> Reconciliation:
    """What the group's letters are: a table here, a frozen plan and a page as files."""
    found = reconcile(spark, question)
    (directory / f"{question.group}-plan.jsonl").write_bytes(found.data)
    report = directory / f"{question.group}.html"
    report.write_text(page(found), "utf-8")
    Console().print(terminal(found), f"Report: {report}\n")
    return found


def fix(dsn: str) -> int:
    """Removes the cause of the failures in shipping; returns how many parts it was
    about.
    """
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(FIX)
        return cursor.rowcount


def carry_out(spark: SparkSession, url: str, found: Reconciliation) -> None:
    """Replays what the plan takes, if anything."""
    plan = found.manifest
    if plan.replays:
        counts = Counter(one.outcome for one in replay(spark, url, plan).outcomes)
        print(
            f"replayed: {counts['done']} letters of {plan.header.facts.group}, {counts['refused']} refused",
            flush=True,
        )


def abandon(client: txmq.Client, found: Reconciliation) -> None:
    """Closes the letters that nothing would come of."""
    poison = [item.letter for item in found.planned if item.cls is Class.POISON]
    places = [(letter.topic, letter.partition, letter.offset) for letter in poison]
    group = found.manifest.header.facts.group
    for start in range(0, len(places), AT_ONCE):
        some = places[start : start + AT_ONCE]
        client.call("dlq.abandon", group=group, letters=some, operator="order-flow", reason=REASON)
    if places:
        print(f"abandoned: {len(places)} letters of {group}, because {REASON}", flush=True)


if __name__ == "__main__":
    main()
