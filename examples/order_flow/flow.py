"""The director: prepares the stage, lets the services run under faults, has the letters
dealt with, audits.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Final

from examples.order_flow import data, faults
from examples.order_flow.audit import audit
from examples.order_flow.data import Facts
from examples.order_flow.faults import Plan
from examples.order_flow.journal import totals
from examples.order_flow.messages import ORDER_PLACED
from examples.order_flow.screen import Screen
from examples.order_flow.stage import Stage
from examples.order_flow.tables import counts_table, findings_table, groups_table
from examples.order_flow.traffic import CONSUMERS, PAUSE_S, Traffic, tend, watch

PARTITIONS: Final = 8
TALLY: Final = """
SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM txmq_token WHERE state = 'D'),
       (SELECT count(*) FROM txmq_token WHERE state = 'R'),
       (SELECT count(*) FROM charges), (SELECT count(*) FROM shipments)
"""
LOOK_AROUND: Final = Template("""
Broker, console and PostgreSQL run on:
  broker      $url
  console     $console
  metrics     ${console}metrics
  PostgreSQL  $dsn
To look around:
  export TXMQ_BROKER=$url; alias txmq='$python -m txmq'
  txmq topic show order-placed
  txmq tail order-placed --no-follow --count 5
  txmq group show shipping
  txmq dlq list payment
  txmq tx list; txmq alarms
  psql '$dsn' -c 'TABLE shipments LIMIT 5'
To end it all:
  $end
""")


def run(directory: Path, *, scale: float, seed: int, keep: bool) -> bool:
    """The whole flow; whether the audit found nothing. Raises TxmqError where it could
    not be brought to its end.
    """
    screen, stage = Screen(), Stage(directory)
    stage.fleet.environment |= screen.environment
    screen.event(f"logs and reports: {directory}")
    passed = left = False
    try:
        passed = _act(stage, screen, scale=scale, seed=seed)
        if passed and keep:
            places = {
                "url": stage.url,
                "console": stage.console,
                "dsn": stage.dsn,
                "python": sys.executable,
            }
            screen.say(LOOK_AROUND.substitute(places, end=stage.leave_running()))
            left = True
    finally:
        if not left:
            stage.close(clear=passed)
        if not passed:
            screen.event(f"not passed; the data is kept: {', '.join(map(str, stage.places()))}")
    return passed


def _act(stage: Stage, screen: Screen, *, scale: float, seed: int) -> bool:
    with screen.phase("PostgreSQL and broker"):
        screen.event(f"PostgreSQL serves: {stage.start_postgres()}")
        screen.event(f"broker serves: {stage.start_broker()}, console: {stage.console}")
    with screen.phase("Input"):
        facts, plan = _prepare(stage, screen, scale, seed)
    traffic = Traffic(stage, screen, facts, plan)
    with screen.phase("Services under faults"):
        traffic.start()
        screen.show(groups_table(watch(stage, screen, facts.orders, traffic.step).groups))
    with screen.phase("Reconcile, fix, replay"):
        letters = _recover(stage, screen)
    with screen.phase("Drain"):
        watch(stage, screen, facts.orders, lambda now: now.drained)
        stage.fleet.stop(*CONSUMERS)
    with screen.phase("Audit"):
        findings = audit(stage)
        screen.show(findings_table(findings))
    counts = _counts(stage, letters)
    screen.show(counts_table(counts))
    screen.show(screen.times_table())
    _keep_result(stage.directory, counts, screen.times)
    return not any(finding.contradictions for finding in findings)


def _prepare(stage: Stage, screen: Screen, scale: float, seed: int) -> tuple[Facts, Plan]:
    """Input, faults and the first row of everything."""
    data.generate(stage.data, scale)
    facts = data.load(stage.data, stage.dsn)
    plan = faults.draw(seed, facts)
    stage.query(
        "UPDATE parts SET customs_code = NULL WHERE part_id = ANY(%s)", (list(plan.bad_parts),)
    )
    stage.query(
        "UPDATE customers SET blocked = true WHERE customer_id = ANY(%s)", (list(plan.refused),)
    )
    with stage.client() as client:
        client.call("topic.create", name=ORDER_PLACED, partitions=PARTITIONS)
    screen.event(
        f"{facts.orders:,} orders with {facts.lines:,} lines of {len(facts.customers):,} customers"
    )
    screen.event(
        f"seed {seed}: {len(plan.bad_parts)} parts without a customs code, {len(plan.refused)} customers blocked,"
        f" {plan.kills} kills to come, an outage of {plan.carrier}, a crash of PostgreSQL"
    )
    return facts, plan


def _recover(stage: Stage, screen: Screen) -> dict[str, int]:
    """Lets the operator deal with the letters; returns how many there were of which
    fate.
    """
    operator = stage.fleet.start(
        "operator", ["-m", "examples.order_flow.recovery", str(stage.directory)]
    )
    said = 0
    with screen.waiting("Spark reconciles and replays"):
        while operator.ended() is None:
            tend(stage, screen)
            said += screen.say(operator.output()[said:])
            time.sleep(PAUSE_S)
    tend(stage, screen)
    screen.say(operator.output()[said:])
    headers = [
        json.loads(plan.read_text("ascii").partition("\n")[0])
        for plan in stage.directory.glob("*-plan.jsonl")
    ]
    return {
        "dead": sum(sum(header["letters"].values()) for header in headers),
        "replayed": sum(header["replays"] for header in headers),
        "abandoned": sum(header["letters"]["poison"] for header in headers),
    }


def _counts(stage: Stage, letters: Mapping[str, int]) -> dict[str, int]:
    """What happened in this run; `tables.MEANINGS` tells what each count is of."""
    noted = totals(stage.journals)
    [(committed, found_committed, fenced, charges, shipments)] = stage.query(TALLY)
    return {
        "attempted": noted["attempted"],
        "killed": sum(stage.fleet.killed().values()),
        "committed": committed,
        "checked back, committed": found_committed,
        "checked back, rolled back": fenced,
        "delivered": noted["deliveries"],
        "retried": noted["retries"],
        **letters,
        "duplicates": noted["duplicates"],
        "charges": charges,
        "shipments": shipments,
    }


def _keep_result(
    directory: Path, counts: Mapping[str, int], times: list[tuple[str, float]]
) -> None:
    """For programs: the same as a file."""
    result = {"counts": counts, "seconds": {title: round(seconds, 3) for title, seconds in times}}
    (directory / "result.json").write_text(json.dumps(result, indent=2), "utf-8")
