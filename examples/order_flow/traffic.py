"""The services at work under faults, and how far they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from examples.order_flow.data import Facts
from examples.order_flow.faults import ORDERS_PROCESSES, Blow, Plan
from examples.order_flow.screen import Screen
from examples.order_flow.stage import Stage
from txmq.errors import TxmqError

CONSUMERS: Final = {"payment": 2, "shipping": 2, "analytics": 1}  # processes
OUTAGE_S: Final = 2.5  # less than the retries last
STUCK_S: Final = 60.0
PAUSE_S: Final = 0.3
LOOKS: Final = 0.2  # of the time at most: counting a million rows is work, too
NAMES: Final = ("placed", "charged", "shipped", "counted")
COUNTS: Final = """
SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM charges), (SELECT count(*) FROM shipments),
       (SELECT coalesce(sum(orders), 0)::int8 FROM sales)
"""
MOVING: Final = ("lag", "leased", "retrying")
WAITING: Final = ("parked", "fences", "letters")
OPEN: Final = ("undecided", "waiting", "in-doubt")


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
        here = self.groups.keys() >= CONSUMERS.keys() and not self.undecided
        return here and not self._any(*MOVING)

    @property
    def drained(self) -> bool:
        """Whether nothing is left at all."""
        return self.settled and not self._any(*WAITING)

    def left(self) -> str:
        """What is not done, in words."""
        left = [f"{self.undecided} transactions undecided"] if self.undecided else []
        for name, group in self.groups.items():
            left += [f"{name}: {what} {group[what]}" for what in (*MOVING, *WAITING) if group[what]]
        return ", ".join([*(f"{count} {what}" for what, count in self.counts.items()), *left])

    def _any(self, *names: str) -> bool:
        return any(group[name] for group in self.groups.values() for name in names)


def standing(stage: Stage) -> Standing:
    """Asks database and broker."""
    [row] = stage.query(COUNTS)
    with stage.client() as client:
        groups = {group["group"]: group for group in client.call("group.list")["groups"]}
        undecided = sum(len(client.call("tx.list", state=state)["transactions"]) for state in OPEN)
    return Standing(dict(zip(NAMES, row, strict=True)), groups, undecided)


class Traffic:
    """The services at work, and what strikes them."""

    def __init__(self, stage: Stage, screen: Screen, facts: Facts, plan: Plan) -> None:
        self._stage, self._screen, self._facts, self._plan = stage, screen, facts, plan
        self._events = deque(plan.events)
        self._outage_ends: float | None = None

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
        done = (
            now.counts["placed"] == self._facts.orders
            and not self._events
            and self._outage_ends is None
        )
        return (
            done
            and all(process.ended() == 0 for process in self._stage.fleet.named("orders"))
            and now.settled
        )

    def _strike(self, blow: Blow) -> None:
        self._screen.event(str(blow), "red")
        match blow:
            case Blow.CARRIER_OUT:
                self._set_carrier(available=False)
                self._outage_ends = time.monotonic() + OUTAGE_S
            case Blow.BROKER_KILLED:
                self._stage.crash_broker()
                self._screen.event("broker serves again")
            case Blow.POSTGRES_CRASHED:
                crashed = self._stage.crash_postgres()
                self._screen.event(
                    "PostgreSQL serves again" if crashed else "PostgreSQL is not ours to crash"
                )

    def _set_carrier(self, *, available: bool) -> None:
        statement = "UPDATE carriers SET available = %s WHERE carrier = %s"
        self._stage.query(statement, (available, self._plan.carrier))
        self._screen.event(f"{self._plan.carrier} {'is back' if available else 'takes nothing'}")


def watch(stage: Stage, screen: Screen, orders: int, done: Callable[[Standing], bool]) -> Standing:
    """Looks on until it is done, starting again what dies as planned. Raises Stuck
    where nothing moves any more.
    """
    before: Standing | None = None
    moved_at = time.monotonic()
    with screen.bars(dict.fromkeys(NAMES, orders)) as update:
        while True:
            tend(stage, screen)
            began = time.monotonic()
            now = standing(stage)
            took = time.monotonic() - began
            update(now.counts)
            if done(now):
                return now
            if now != before:
                before, moved_at = now, time.monotonic()
            elif time.monotonic() > moved_at + STUCK_S:
                raise Stuck(
                    f"nothing moved for {STUCK_S:.0f} s: {now.left()}", hint="the logs may tell why"
                )
            time.sleep(max(PAUSE_S, took / LOOKS - took))


def tend(stage: Stage, screen: Screen) -> None:
    """Starts again what died as planned. Raises ProcessEnded for what ended
    otherwise.
    """
    for name, point in stage.fleet.tend():
        screen.event(f"{name} killed at {point}, started again", "red")
