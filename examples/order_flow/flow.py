"""The phases of the order flow: servers, input, services under faults beside a watch
over dead letters, recovery, drain, audit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Final

from examples.order_flow import data, faults, watch
from examples.order_flow.audit import ClaimResult, audit
from examples.order_flow.data import InputSummary
from examples.order_flow.deployment import Deployment
from examples.order_flow.faults import FaultPlan
from examples.order_flow.journal import totals
from examples.order_flow.order_placed import ORDER_PLACED
from examples.order_flow.screen import Screen
from examples.order_flow.services import tracking
from examples.order_flow.summary import claims_table, counts_table, groups_table
from examples.order_flow.traffic import (
    CONSUMERS,
    PAUSE_S,
    TRACKING,
    Traffic,
    restart_crashed,
    run_until,
)

PARTITIONS: Final = 8
COUNTS: Final = """
SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM txmq_token WHERE state = 'D'),
       (SELECT count(*) FROM txmq_token WHERE state = 'R'),
       (SELECT count(*) FROM charges), (SELECT count(*) FROM shipments),
       (SELECT count(*) FROM alerts)
"""
LEFT_RUNNING: Final = Template("""
Broker, console and PostgreSQL are still running:
  broker      $url
  console     $console
  metrics     ${console}metrics
  PostgreSQL  $dsn
To explore:
  export TXMQ_BROKER=$url; alias txmq='$python -m txmq'
  txmq topic show order-placed
  txmq tail order-placed --no-follow --count 5
  txmq group show shipping
  txmq dlq list payment
  txmq tx list; txmq alarms
  psql '$dsn' -c 'TABLE shipments LIMIT 5'
To stop and remove them:
  $end
""")


def run(directory: Path, *, scale: float, seed: int, keep: bool, cluster: bool) -> bool:
    """Run the whole flow; return whether the audit found no contradiction.

    Raises TxmqError where the flow could not be completed.
    """
    screen, deployment = Screen(), Deployment(directory, cluster=cluster)
    deployment.fleet.environment |= screen.environment
    screen.event(f"logs and reports: {directory}")
    passed = left = False
    try:
        passed = _run_phases(deployment, screen, scale=scale, seed=seed)
        if passed and keep:
            places = {
                "url": deployment.url,
                "console": deployment.console,
                "dsn": deployment.dsn,
                "python": sys.executable,
            }
            screen.echo(LEFT_RUNNING.substitute(places, end=deployment.leave_running()))
            left = True
    finally:
        if not left:
            deployment.close(clear=passed)
        if not passed:
            screen.event(
                f"failed; the data is kept in {', '.join(map(str, deployment.data_directories()))}"
            )
    return passed


def _run_phases(deployment: Deployment, screen: Screen, *, scale: float, seed: int) -> bool:
    with screen.phase("PostgreSQL and broker"):
        screen.event(f"PostgreSQL is ready: {deployment.start_postgres()}")
        screen.event(f"broker is ready: {deployment.start_broker()}, console: {deployment.console}")
    with screen.phase("Input"):
        facts, plan = _prepare(deployment, screen, scale, seed)
    traffic = Traffic(deployment, screen, facts, plan)
    with screen.phase("Services under faults"):
        traffic.start()
        screen.show(groups_table(run_until(deployment, screen, facts.orders, traffic.step).groups))
    with screen.phase("Reconcile, fix, replay"):
        letters = _recover(deployment, screen)
    with screen.phase("Drain"):
        run_until(deployment, screen, facts.orders, lambda now: now.drained)
        deployment.fleet.stop(watch.NAME, TRACKING, *CONSUMERS)
    with screen.phase("Audit"):
        results = audit(deployment)
        screen.show(claims_table(results))
    counts = _counts(deployment, letters)
    screen.show(counts_table(counts))
    screen.show(screen.times_table())
    _write_result(deployment.directory, counts, screen.times, results)
    return not any(result.contradictions for result in results)


def _prepare(
    deployment: Deployment, screen: Screen, scale: float, seed: int
) -> tuple[InputSummary, FaultPlan]:
    """Generate the input, draw the faults, and create the tables and the topic."""
    data.generate(deployment.data, scale)
    facts = data.load(deployment.data, deployment.dsn)
    plan = faults.draw_plan(seed, facts)
    deployment.query(
        "UPDATE parts SET customs_code = NULL WHERE part_id = ANY(%s)", (list(plan.bad_parts),)
    )
    deployment.query(
        "UPDATE customers SET blocked = true WHERE customer_id = ANY(%s)", (list(plan.refused),)
    )
    with deployment.client() as client:
        client.call("topic.create", name=ORDER_PLACED, partitions=PARTITIONS)
        client.call("topic.create", name=tracking.TOPIC, partitions=PARTITIONS)
        client.call("topic.create", name=watch.TOPIC, partitions=1)
    screen.event(
        f"{facts.orders:,} orders with {facts.lines:,} lines of {len(facts.customers):,} customers"
    )
    screen.event(
        f"seed {seed}: {len(plan.bad_parts)} parts without a customs code,"
        f" {len(plan.refused)} customers blocked,"
        f" {plan.kills} kills, an outage of {plan.carrier}, a crash of PostgreSQL"
    )
    return facts, plan


def _recover(deployment: Deployment, screen: Screen) -> dict[str, int]:
    """Run the operator's recovery of the letters; return the numbers by outcome."""
    operator = deployment.fleet.start(
        "operator", ["-m", "examples.order_flow.operator_run", str(deployment.directory)]
    )
    shown = 0
    with screen.waiting("Spark reconciles and replays"):
        while operator.exit_status() is None:
            restart_crashed(deployment, screen)
            shown += screen.echo(operator.output()[shown:])
            time.sleep(PAUSE_S)
    restart_crashed(deployment, screen)
    screen.echo(operator.output()[shown:])
    manifests = [
        json.loads(plan.read_text("utf-8"))
        for plan in deployment.directory.glob("*-plan/plan.json")
    ]
    classes = [counts for one in manifests for counts in one["letters"].values()]
    return {
        "dead": sum(sum(counts.values()) for counts in classes),
        "replayed": sum(sum(one["replays"].values()) for one in manifests),
        "abandoned": sum(counts["poison"] for counts in classes),
    }


def _counts(deployment: Deployment, letters: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of this run; `summary.MEANINGS` explains each of them."""
    noted = totals(deployment.journals)
    [(committed, found_committed, fenced, charges, shipments, alerts)] = deployment.query(COUNTS)
    return {
        "attempted": noted["attempted"],
        "killed": sum(deployment.fleet.killed().values()),
        "committed": committed,
        "checked back, committed": found_committed,
        "checked back, rolled back": fenced,
        "delivered": noted["deliveries"],
        "retried": noted["retries"],
        "stored": noted["stored"],
        "spooled": noted["spooled"],
        **letters,
        "duplicates": noted["duplicates"],
        "charges": charges,
        "shipments": shipments,
        "alerts": alerts,
    }


def _write_result(
    directory: Path,
    counts: Mapping[str, int],
    times: list[tuple[str, float]],
    results: Sequence[ClaimResult],
) -> None:
    """Write counts, times and contradictions as a file for programs."""
    result = {
        "counts": counts,
        "seconds": {title: round(seconds, 3) for title, seconds in times},
        "contradictions": {
            one.claim: [str(example) for example in one.examples]
            for one in results
            if one.contradictions
        },
    }
    (directory / "result.json").write_text(json.dumps(result, indent=2), "utf-8")
