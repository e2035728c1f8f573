"""The recovery of an operator: reconcile dead letters in Spark, remove the cause,
replay the plan, abandon the rest.

    python -m examples.order_flow.operator_run DIRECTORY

This is a process of its own, which keeps the JVM and its output apart from the
director. Plans and HTML pages go into DIRECTORY. The environment names broker and
database: TXMQ_BROKER, TXMQ_DSN. `spark-submit spark/reconcile.py` and `spark/replay.py`
do the same step by step.
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
from txmq_spark.database_tables import BusinessTable
from txmq_spark.local_session import local_session
from txmq_spark.plan import SAFE, LetterClass, PlanRules
from txmq_spark.reconcile import ReconcileOptions, Reconciliation, reconcile
from txmq_spark.replay import replay
from txmq_spark.report import html_page, terminal_summary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The account stays blocked, so a retry cannot succeed.
REFUSED: Final = f"{payment.PaymentRefused.__module__}.{payment.PaymentRefused.__qualname__}"
# A letter whose effect is committed (its last ack was lost with the broker) is
# replayed, too: the inbox drops it, and the fence of its key lifts.
REPLAYED_CLASSES: Final = SAFE | {LetterClass.APPLIED}
RULES: Final = {
    # Each order is charged separately: a later charge does not replace an earlier one.
    payment.GROUP: PlanRules(
        error_types=frozenset({REFUSED}), include=REPLAYED_CLASSES | {LetterClass.SUPERSEDED}
    ),
    shipping.GROUP: PlanRules(include=REPLAYED_CLASSES),
}
REASON: Final = "the customer's account is blocked: the money is collected by other means"
CALL_LETTERS: Final = 1_000  # the most letters of one call
FIX: Final = "UPDATE parts SET customs_code = 'HS-' || part_id WHERE customs_code IS NULL"


def main() -> None:
    directory, url, dsn = Path(sys.argv[1]), os.environ["TXMQ_BROKER"], os.environ["TXMQ_DSN"]
    with local_session() as spark:
        found = [reconcile_group(spark, directory, _options(url, dsn, group)) for group in RULES]
        print(f"fixed: customs codes entered for {enter_customs_codes(dsn)} parts", flush=True)
        for reconciliation in found:
            replay_plan(spark, url, reconciliation)
    with txmq.connect(url, service="operator") as client:
        for reconciliation in found:
            abandon(client, reconciliation)


def _options(url: str, dsn: str, group: str) -> ReconcileOptions:
    return ReconcileOptions(
        url=url,
        group=group,
        dsn=dsn,
        business=BusinessTable("orders", key="customer_id"),
        version="header:version",
        rules=RULES[group],
    )


def reconcile_group(
    spark: SparkSession, directory: Path, question: ReconcileOptions
) -> Reconciliation:
    """Reconcile a group: print a table, and write the plan and the page."""
    found = reconcile(spark, question)
    (directory / f"{question.group}-plan.jsonl").write_bytes(found.data)
    report = directory / f"{question.group}.html"
    report.write_text(html_page(found), "utf-8")
    Console().print(terminal_summary(found), f"Report: {report}\n")
    return found


def enter_customs_codes(dsn: str) -> int:
    """Remove the cause of the failures in shipping; return the number of parts."""
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(FIX)
        return cursor.rowcount


def replay_plan(spark: SparkSession, url: str, found: Reconciliation) -> None:
    """Replay the letters of the plan, if there are any."""
    plan = found.manifest
    if plan.replays:
        counts = Counter(one.outcome for one in replay(spark, url, plan).outcomes)
        print(
            f"replayed: {counts['done']} letters of {plan.header.facts.group},"
            f" {counts['refused']} refused",
            flush=True,
        )


def abandon(client: txmq.Client, found: Reconciliation) -> None:
    """Abandon the poison letters."""
    poison = [item.letter for item in found.planned if item.cls is LetterClass.POISON]
    places = [(letter.topic, letter.partition, letter.offset) for letter in poison]
    group = found.manifest.header.facts.group
    for start in range(0, len(places), CALL_LETTERS):
        some = places[start : start + CALL_LETTERS]
        client.call("dlq.abandon", group=group, letters=some, operator="order-flow", reason=REASON)
    if places:
        print(f"abandoned: {len(places)} letters of {group}, because {REASON}", flush=True)


if __name__ == "__main__":
    main()
