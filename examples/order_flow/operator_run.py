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
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg2
from rich.console import Console

import txmq
from examples.order_flow.services import payment, shipping
from txmq_spark.local_session import local_session
from txmq_spark.mapping import BusinessTable, Mapping
from txmq_spark.plan import SAFE, LetterClass, PlanRules
from txmq_spark.plan_directory import StoredPlan
from txmq_spark.reconcile import ReconcileOptions, reconciled
from txmq_spark.replay import ReplayOptions, replay
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


SETTINGS: Final = {"rate": 0, "stop_after": 0}  # the cause is removed, so all may go at once
Place = tuple[str, int, int]


def main() -> None:
    directory, url, dsn = Path(sys.argv[1]), os.environ["TXMQ_BROKER"], os.environ["TXMQ_DSN"]
    with local_session() as spark, txmq.connect(url, service="operator") as client:
        found = [reconcile_group(spark, directory, _options(url, dsn, group)) for group in RULES]
        print(f"fixed: customs codes entered for {enter_customs_codes(dsn)} parts", flush=True)
        for group, plan in zip(RULES, found, strict=True):
            replay_plan(url, group, plan)
            abandon(client, group, poison(plan))


def _options(url: str, dsn: str, group: str) -> ReconcileOptions:
    orders = BusinessTable(name="orders", key="customer_id")
    return ReconcileOptions(
        url=url,
        groups=(group,),
        dsn=dsn,
        mapping=Mapping(tables=(orders,), version="header:version"),
        rules=RULES[group],
    )


def reconcile_group(spark: SparkSession, directory: Path, question: ReconcileOptions) -> StoredPlan:
    """Reconcile a group: print a table, and write the plan and the page."""
    [group] = question.groups
    with reconciled(spark, question) as found:
        plan = found.write(str(directory / f"{group}-plan"))
        report = directory / f"{group}.html"
        page = html_page(found.manifest, found.made, found.summary, plan.path)
        report.write_text(page, "utf-8")
        summary = terminal_summary(found.manifest, found.summary)
    Console().print(summary, f"Report: {report}\n")
    return plan


def enter_customs_codes(dsn: str) -> int:
    """Remove the cause of the failures in shipping; return the number of parts."""
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(FIX)
        return cursor.rowcount


def replay_plan(url: str, group: str, plan: StoredPlan) -> None:
    """Have the broker replay the letters of the plan, if there are any."""
    if sum(plan.manifest.replays.values()):
        options = ReplayOptions(url, settings=SETTINGS, operator="order-flow", wait=False)
        [begun] = replay(plan, options).plans
        print(
            f"replayed: {begun['letters']} letters of {group}, {begun['skipped']} skipped",
            flush=True,
        )


def poison(plan: StoredPlan) -> list[Place]:
    """Return the letters that would fail again."""
    chosen = plan.letters.where(plan.letters["class"] == str(LetterClass.POISON))
    rows = chosen.select("topic", "partition", "offset").collect()
    return sorted((row["topic"], row["partition"], row["offset"]) for row in rows)


def abandon(client: txmq.Client, group: str, places: Sequence[Place]) -> None:
    """Abandon letters."""
    for start in range(0, len(places), CALL_LETTERS):
        some = places[start : start + CALL_LETTERS]
        client.call("dlq.abandon", group=group, letters=some, operator="order-flow", reason=REASON)
    if places:
        print(f"abandoned: {len(places)} letters of {group}, because {REASON}", flush=True)


if __name__ == "__main__":
    main()
