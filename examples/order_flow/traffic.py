"""The services under faults, and their progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from examples.order_flow import watch
from examples.order_flow.data import InputSummary
from examples.order_flow.deployment import Deployment
from examples.order_flow.faults import ORDERS_PROCESSES, Fault, FaultPlan
from examples.order_flow.screen import Screen
from txmq.errors import TxmqError

CONSUMERS: Final = {"payment": 2, "shipping": 2, "analytics": 1}  # processes
TRACKING: Final = "tracking"
OUTAGE_S: Final = 2.5  # shorter than all retries
STALL_LIMIT_S: Final = 120.0  # a Spark process that starts anew on a busy machine
PAUSE_S: Final = 0.3
POLL_SHARE: Final = 0.2  # of the time at most, because counting a million rows is expensive
NAMES: Final = ("placed", "charged", "shipped", "counted")
COUNTS: Final = """
SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM charges),
       (SELECT count(*) FROM shipments), (SELECT coalesce(sum(orders), 0)::int8 FROM sales)
"""
UNSETTLED_COUNTS: Final = ("unsettled", "leased", "retrying", "at_consumers")
FAILURE_COUNTS: Final = ("parked", "fences", "letters")
OPEN_STATES: Final = ("undecided", "waiting", "in-doubt")


class FlowStalled(TxmqError):
    """No progress within the time limit, although work was left."""


class FlowState(NamedTuple):
    """The progress of the flow."""

    counts: Mapping[str, int]  # of rows, by name
    groups: Mapping[str, Mapping[str, Any]]  # consumer groups, as the broker reports them
    undecided: int
    alerted: frozenset[str] = frozenset()  # groups with alerts

    @property
    def settled(self) -> bool:
        """True where only letters, and messages behind them, are left."""
        here = self.groups.keys() >= CONSUMERS.keys() and not self.undecided
        return here and not self._any(*UNSETTLED_COUNTS)

    @property
    def drained(self) -> bool:
        """True where no work is left."""
        return self.settled and not self._any(*FAILURE_COUNTS)

    @property
    def watched(self) -> bool:
        """True where each group with letters has alerts."""
        with_letters = {name for name in watch.GROUPS if self.groups[name]["letters"]}
        return with_letters <= self.alerted

    def left(self) -> str:
        """Return a description of the work that is left."""
        left = [f"{self.undecided} transactions undecided"] if self.undecided else []
        for name, group in self.groups.items():
            left += [
                f"{name}: {what} {group[what]}"
                for what in (*UNSETTLED_COUNTS, *FAILURE_COUNTS)
                if group[what]
            ]
        return ", ".join([*(f"{count} {what}" for what, count in self.counts.items()), *left])

    def _any(self, *names: str) -> bool:
        return any(group[name] for group in self.groups.values() for name in names)


def read_state(deployment: Deployment) -> FlowState:
    """Read the state from database and broker."""
    [row] = deployment.query(COUNTS)
    with deployment.client() as client:
        groups = {group["group"]: group for group in client.call("group.list")["groups"]}
        undecided = sum(
            len(client.call("tx.list", state=state)["transactions"]) for state in OPEN_STATES
        )
    alerted = frozenset(name for (name,) in deployment.query(watch.ALERTED))
    return FlowState(dict(zip(NAMES, row, strict=True)), groups, undecided, alerted)


class Traffic:
    """The services, and the faults that are injected."""

    def __init__(
        self, deployment: Deployment, screen: Screen, facts: InputSummary, plan: FaultPlan
    ) -> None:
        self._deployment, self._screen, self._facts, self._plan = deployment, screen, facts, plan
        self._events = deque(plan.scheduled)
        self._outage_ends: float | None = None
        self._watching = False

    def start(self) -> None:
        services = {**CONSUMERS, "orders": ORDERS_PROCESSES, TRACKING: 1}
        for service, processes in services.items():
            for number in range(processes):
                name = f"{service}-{number}"
                self._deployment.start_service(
                    name, self._plan.crash_points.get(name, ()), of=processes
                )

    def step(self, now: FlowState) -> bool:
        """Inject the faults that are due; return whether all work and all faults are
        done.
        """
        if not self._watching and now.groups.keys() >= set(watch.GROUPS):
            self._deployment.start_watch(self._plan.crash_points[watch.NAME])
            self._watching = True
        while self._events and now.counts["placed"] >= self._events[0].at * self._facts.orders:
            self._inject(self._events.popleft().fault)
        if self._outage_ends is not None and time.monotonic() >= self._outage_ends:
            self._outage_ends = None
            self._set_carrier(available=True)
        done = (
            now.counts["placed"] == self._facts.orders
            and not self._events
            and self._outage_ends is None
        )
        return (
            done
            and all(
                process.exit_status() == 0 for process in self._deployment.fleet.named("orders")
            )
            and now.settled
            and now.watched
        )

    def _inject(self, fault: Fault) -> None:
        self._screen.event(str(fault), "red")
        match fault:
            case Fault.CARRIER_OUT:
                self._set_carrier(available=False)
                self._outage_ends = time.monotonic() + OUTAGE_S
            case Fault.BROKER_KILLED:
                self._screen.event(self._deployment.crash_broker())
            case Fault.POSTGRES_CRASHED:
                crashed = self._deployment.crash_postgres()
                self._screen.event(
                    "PostgreSQL is ready again"
                    if crashed
                    else "PostgreSQL is not crashed: TXMQ_DSN names it"
                )

    def _set_carrier(self, *, available: bool) -> None:
        statement = "UPDATE carriers SET available = %s WHERE carrier = %s"
        self._deployment.query(statement, (available, self._plan.carrier))
        state = "accepts shipments again" if available else "accepts no shipments"
        self._screen.event(f"{self._plan.carrier} {state}")


def run_until(
    deployment: Deployment, screen: Screen, orders: int, done: Callable[[FlowState], bool]
) -> FlowState:
    """Wait until `done`, and start processes again that crash as planned.

    Raises FlowStalled where there is no progress.
    """
    before: FlowState | None = None
    moved_at = time.monotonic()
    with screen.bars(dict.fromkeys(NAMES, orders)) as update:
        while True:
            restart_crashed(deployment, screen)
            began = time.monotonic()
            now = read_state(deployment)
            took = time.monotonic() - began
            update(now.counts)
            if done(now):
                return now
            if now != before:
                before, moved_at = now, time.monotonic()
            elif time.monotonic() > moved_at + STALL_LIMIT_S:
                raise FlowStalled(
                    f"no progress for {STALL_LIMIT_S:.0f} s: {now.left()}", hint="read the logs"
                )
            time.sleep(max(PAUSE_S, took / POLL_SHARE - took))


def restart_crashed(deployment: Deployment, screen: Screen) -> None:
    """Start processes again that crashed as planned.

    Raises ProcessEnded for any other failure.
    """
    for name, point in deployment.fleet.restart_crashed():
        screen.event(f"{name} killed at {point}, started again", "red")
