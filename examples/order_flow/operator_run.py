"""The recovery of an operator: reconcile dead letters in Spark, replay a few of them,
remove the cause, replay the rest, and abandon what cannot succeed.

    python -m examples.order_flow.operator_run DIRECTORY

This is a process of its own, which keeps the JVM and its output apart from the
director. Plans and HTML pages go into DIRECTORY. The environment names broker and
database: TXMQ_BROKER, TXMQ_DSN. `txmq-spark reconcile` and `txmq-spark replay` do the
same step by step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping as Settings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg2
from rich.console import Console

import txmq
from examples.order_flow import careful_replay
from examples.order_flow.careful_replay import OPERATOR
from examples.order_flow.services import payment, shipping
from txmq_spark.database.mapping import BusinessTable, Mapping
from txmq_spark.plan.directory import StoredPlan
from txmq_spark.plan.report import html_page, terminal_summary
from txmq_spark.plan.rules import SAFE, LetterClass, PlanRules
from txmq_spark.reconcile import ReconcileOptions, reconciled
from txmq_spark.replay import ReplayOptions, replay
from txmq_spark.session.local_session import local_session

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
FIX: Final = "UPDATE parts SET customs_code = 'HS-' || part_id WHERE customs_code IS NULL"


AT_ONCE: Final = {"rate": 0, "stop_after": 0}  # where nothing has to be removed before
Place = tuple[str, int, int]


def main() -> None:
    directory, url, dsn = Path(sys.argv[1]), os.environ["TXMQ_BROKER"], os.environ["TXMQ_DSN"]
    with local_session() as spark, txmq.connect(url, service="operator") as client:
        found = [reconcile_group(spark, directory, _options(url, dsn, group)) for group in RULES]
        plans = dict(zip(RULES, found, strict=True))
        careful = begin(url, shipping.GROUP, plans[shipping.GROUP], careful_replay.SETTINGS)

        def mend() -> str:
            return f"customs codes entered for {enter_customs_codes(dsn)} parts"

        if careful is None:
            print(f"mended: {mend()}", flush=True)
        else:
            print(careful_replay.report(careful_replay.follow(client, careful, mend)), flush=True)
        begin(url, payment.GROUP, plans[payment.GROUP], AT_ONCE)
        for group, plan in plans.items():
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


def begin(url: str, group: str, plan: StoredPlan, settings: Settings[str, object]) -> str | None:
    """Have the broker replay the letters of the plan; return the name of its own plan.
    None = there are none.
    """
    if not sum(plan.manifest.replays.values()):
        return None
    options = ReplayOptions(url, settings=settings, operator=OPERATOR, wait=False)
    [begun] = replay(plan, options).plans
    print(f"replays: {begun['letters']} letters of {group}, {begun['skipped']} skipped", flush=True)
    return str(begun["name"])


def poison(plan: StoredPlan) -> list[Place]:
    """Return the letters that would fail again."""
    chosen = plan.letters.where(plan.letters["class"] == str(LetterClass.POISON))
    rows = chosen.select("topic", "partition", "offset").collect()
    return sorted((row["topic"], row["partition"], row["offset"]) for row in rows)


def abandon(client: txmq.Client, group: str, places: Sequence[Place]) -> None:
    """Abandon these letters, and print their number."""
    if places:
        done = client.abandon_letters(group, places, operator=OPERATOR, reason=REASON).done
        print(f"abandoned: {len(done)} letters of {group}, because {REASON}", flush=True)


if __name__ == "__main__":
    main()
