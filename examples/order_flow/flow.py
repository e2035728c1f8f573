"""The director: prepares the stage, lets the services run under faults, reconciles, replays, audits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from examples.order_flow import data, faults, recovery
from examples.order_flow.audit import audit
from examples.order_flow.data import Facts
from examples.order_flow.faults import ORDERS_PROCESSES, Blow, Plan
from examples.order_flow.journal import totals
from examples.order_flow.messages import ORDER_PLACED
from examples.order_flow.screen import Screen
from examples.order_flow.stage import Stage
from examples.order_flow.tables import counts_table, findings_table, groups_table
from txmq.errors import TxmqError

CONSUMERS: Final = {"payment": 2, "shipping": 2, "analytics": 1}  # processes
PARTITIONS: Final = 8
OUTAGE_S: Final = 2.5  # less than the retries last
STUCK_S: Final = 60.0
PAUSE_S: Final = 0.2

TALLY: Final = """
SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM txmq_token WHERE state = 'D'),
       (SELECT count(*) FROM txmq_token WHERE state = 'R'),
       (SELECT count(*) FROM charges) + (SELECT count(*) FROM shipments)
"""
COUNTS: Final = """
SELECT (SELECT count(*) FROM orders) AS placed, (SELECT count(*) FROM charges) AS charged,
       (SELECT count(*) FROM shipments) AS shipped, (SELECT coalesce(sum(orders), 0)::int8 FROM sales) AS counted
"""


class Stuck(TxmqError):
    """Nothing moved any more, though something should have."""


class Standing(NamedTuple):
    """How far everything is."""

    counts: Mapping[str, int]  # of rows, by what they stand for
    groups: Mapping[str, Mapping[str, Any]]  # consumer groups, as the broker tells
    undecided: int

    @property
    def settled(self) -> bool:
        """Whether only letters and what waits behind them are left."""
        moving = ("lag", "leased", "retrying")
        return not self.undecided and all(not group[name] for group in self.groups.values() for name in moving)

    @property
    def drained(self) -> bool:
        """Whether nothing is left at all."""
        left = ("parked", "fences", "letters")
        return self.settled and all(not group[name] for group in self.groups.values() for name in left)


def standing(stage: Stage) -> Standing:
    """Asks database and broker."""
    [row] = stage.query(COUNTS)
    with stage.client() as client:
        groups = {group["group"]: group for group in client.call("group.list")["groups"]}
        undecided = sum(
            len(client.call("tx.list", state=state)["transactions"]) for state in ("undecided", "waiting", "in-doubt")
        )
    return Standing(dict(zip(("placed", "charged", "shipped", "counted"), row, strict=True)), groups, undecided)


def prepare(stage: Stage, screen: Screen, scale: float, seed: int) -> tuple[Facts, Plan]:
    """Input, faults and the first row of everything."""
    data.generate(stage.data, scale)
    facts = data.load(stage.data, stage.dsn)
    plan = faults.draw(seed, facts)
    stage.query("UPDATE parts SET customs_code = NULL WHERE part_id = ANY(%s)", (list(plan.bad_parts),))
    stage.query("UPDATE customers SET blocked = true WHERE customer_id = ANY(%s)", (list(plan.refused),))
    with stage.client() as client:
        client.call("topic.create", name=ORDER_PLACED, partitions=PARTITIONS)
    screen.event(f"{facts.orders:,} orders with {facts.lines:,} lines of {len(facts.customers):,} customers")
    screen.event(
        f"seed {seed}: {len(plan.bad_parts)} parts without a customs code, {len(plan.refused)} customers blocked,"
        f" {plan.kills} kills to come, an outage of {plan.carrier}, a crash of PostgreSQL"
    )
    return facts, plan


class Traffic:
    """The services at work, and what strikes them."""

    def __init__(self, stage: Stage, screen: Screen, facts: Facts, plan: Plan) -> None:
        self._stage, self._screen, self._facts, self._plan = stage, screen, facts, plan
        self._events = deque(plan.events)
        self._outage_ends: float | None = None
        self.blows: dict[Blow, int] = dict.fromkeys(Blow, 0)

    def start(self) -> None:
        for service, processes in {**CONSUMERS, "orders": ORDERS_PROCESSES}.items():
            for number in range(processes):
                name = f"{service}-{number}"
                self._stage.start_service(name, self._plan.deaths.get(name, ()), of=processes)

    def step(self, now: Standing) -> bool:
        """Strikes where it is time to; whether all that was to happen has happened."""
        while self._events and now.counts["placed"] >= self._events[0].at * self._facts.orders:
            self._strike(self._events.popleft().blow)
        if self._outage_ends is not None and time.monotonic() >= self._outage_ends:
            self._outage_ends = None
            self._set_carrier(available=True)
        done = now.counts["placed"] == self._facts.orders and not self._events and self._outage_ends is None
        return done and all(process.ended() == 0 for process in self._stage.fleet.named("orders")) and now.settled

    def _strike(self, blow: Blow) -> None:
        self._screen.event(str(blow), "red")
        self.blows[blow] += 1
        match blow:
            case Blow.CARRIER_OUT:
                self._set_carrier(available=False)
                self._outage_ends = time.monotonic() + OUTAGE_S
            case Blow.BROKER_KILLED:
                self._stage.crash_broker()
                self._screen.event("broker serves again")
            case Blow.POSTGRES_CRASHED:
                crashed = self._stage.crash_postgres()
                self._screen.event("PostgreSQL serves again" if crashed else "PostgreSQL is not ours to crash")

    def _set_carrier(self, *, available: bool) -> None:
        statement = "UPDATE carriers SET available = %s WHERE carrier = %s"
        self._stage.query(statement, (available, self._plan.carrier))
        self._screen.event(f"{self._plan.carrier} {'is back' if available else 'takes nothing'}")


def watch(stage: Stage, screen: Screen, orders: int, done: Callable[[Standing], bool]) -> Standing:
    """Looks on until it is done, starting again what dies as planned. Raises Stuck where nothing moves any more."""
    names = ("placed", "charged", "shipped", "counted")
    before: Standing | None = None
    moved_at = time.monotonic()
    with screen.bars(dict.fromkeys(names, orders)) as update:
        while True:
            for name, point in stage.fleet.tend():
                screen.event(f"{name} killed at {point}, started again", "red")
            now = standing(stage)
            update(now.counts)
            if done(now):
                return now
            if now != before:
                before, moved_at = now, time.monotonic()
            elif time.monotonic() > moved_at + STUCK_S:
                raise Stuck(f"nothing moved for {STUCK_S:.0f} s", hint=f"{now.counts}, {dict(now.groups)}")
            time.sleep(PAUSE_S)


def run(directory: Path, *, scale: float, seed: int, keep: bool) -> bool:
    """The whole flow; whether the audit found nothing. Raises TxmqError where it could not be brought to its end."""
    screen, stage = Screen(), Stage(directory)
    screen.event(f"logs and reports: {directory}")
    passed = False
    try:
        passed = _act(stage, screen, scale=scale, seed=seed)
    finally:
        stage.close(clear=passed) if not (keep and passed) else stage.leave_running()
    return passed


def _act(stage: Stage, screen: Screen, *, scale: float, seed: int) -> bool:
    with screen.phase("PostgreSQL and broker"):
        screen.event(f"PostgreSQL serves: {stage.start_postgres()}")
        screen.event(f"broker serves: {stage.start_broker()}")
    with screen.phase("Input"):
        facts, plan = prepare(stage, screen, scale, seed)
    traffic = Traffic(stage, screen, facts, plan)
    with screen.phase("Services under faults"):
        traffic.start()
        standing = watch(stage, screen, facts.orders, traffic.step)
        screen.show(groups_table(standing.groups))
    letters = _recover(stage, screen)
    with screen.phase("Drain"):
        watch(stage, screen, facts.orders, lambda now: now.drained)
        stage.fleet.stop(*CONSUMERS)
    with screen.phase("Audit"):
        findings = audit(stage)
        screen.show(findings_table(findings))
    screen.show(counts_table(_counts(stage, letters)))
    screen.show(screen.times_table())
    return not any(finding.contradictions for finding in findings)


def _recover(stage: Stage, screen: Screen) -> dict[str, int]:
    """What an operator does about the letters; returns how many there were of which fate."""
    with screen.phase("Reconcile"):
        plans = recovery.reconcile(stage, screen)
    with screen.phase("Fix and replay"):
        recovery.fix(stage, screen)
        replayed = recovery.replay(stage, screen, plans)
        abandoned = recovery.abandon(stage, screen, plans)
    dead = sum(len(plan.entries) for plan in plans)
    return {"messages dead-lettered": dead, "replayed": replayed, "abandoned with a reason": abandoned}


def _counts(stage: Stage, letters: Mapping[str, int]) -> dict[str, int]:
    """What happened in this run."""
    noted = totals(stage.journals)
    [(committed, found_committed, fenced, effects)] = stage.query(TALLY)
    return {
        "transactions attempted": noted["attempted"],
        "processes killed": sum(stage.fleet.killed().values()),
        "orders committed": committed,
        "checked back: committed": found_committed,
        "checked back: rolled back": fenced,
        "deliveries to handlers": noted["deliveries"],
        "of them again, after a failure or a crash": noted["retries"],
        **letters,
        "duplicates delivered, and dropped by the inbox": noted["duplicates"],
        "effects (charges and shipments)": effects,
    }
