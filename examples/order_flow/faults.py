"""The faults of a run and their times, drawn from a seed before the run.

Services crash at crash points (`txmq.crashpoints`): the process kills itself with
SIGKILL when it reaches such a point for the n-th time. The other faults happen when a
share of the orders is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Final, NamedTuple

from examples.order_flow import watch
from examples.order_flow.data import InputSummary
from examples.order_flow.services.context import BATCH_MESSAGES

ORDERS_PER_BAD_PART: Final = 7_500  # each part is in about 30 orders
REFUSED_SHARE: Final = 0.003  # of the customers
ORDERS_PROCESSES: Final = 2
CRASHES_OF_ORDERS: Final = 3  # of each process
AFTER_GROUP, AFTER_COMMIT = "tx.after_group", "tx.after_commit"
MID_CHARGE, MID_SHIPMENT = "order_flow.charging", "order_flow.shipping"
BEFORE_ACK = "inbox.after_commit"
BETWEEN_SINKS = "spark.alerts_stored"
SPOOLED = "spool.after_write"  # only while the broker is away


class Fault(StrEnum):
    """Faults from outside the services."""

    CARRIER_OUT = "carrier outage"
    BROKER_KILLED = "broker killed"
    POSTGRES_CRASHED = "PostgreSQL crashed"


class ScheduledFault(NamedTuple):
    """A fault; `at` is the share of the orders that is placed by then."""

    at: float
    fault: Fault


class FaultPlan(NamedTuple):
    """All faults of a run.

    `crash_points` has, by process, the crash point of each start except the last.
    """

    crash_points: Mapping[str, Sequence[str]]
    scheduled: Sequence[ScheduledFault]
    carrier: str
    bad_parts: Sequence[int]
    refused: Sequence[int]

    @property
    def kills(self) -> int:
        """The number of processes that are killed."""
        return sum(map(len, self.crash_points.values())) + sum(
            event.fault is Fault.BROKER_KILLED for event in self.scheduled
        )


def draw_plan(seed: int, facts: InputSummary) -> FaultPlan:
    """Draw the plan of a seed."""
    random = Random(seed)
    return FaultPlan(
        crash_points=_crash_points(random, facts.orders),
        scheduled=_scheduled_faults(random),
        carrier=random.choice(facts.carriers),
        bad_parts=_sample(random, facts.parts, facts.orders / ORDERS_PER_BAD_PART),
        refused=_sample(random, facts.customers, len(facts.customers) * REFUSED_SHARE),
    )


def _crash_points(random: Random, orders: int) -> dict[str, list[str]]:
    points: dict[str, list[str]] = {}
    share = orders // ORDERS_PROCESSES
    for number in range(ORDERS_PROCESSES):
        places = [AFTER_GROUP, AFTER_COMMIT] * CRASHES_OF_ORDERS
        life = share // (CRASHES_OF_ORDERS + 1)
        points[f"orders-{number}"] = [
            _crash_point(random, places[number + death], life // 2, life)
            for death in range(CRASHES_OF_ORDERS)
        ]
    # of both processes of a service, at least, because many batches are not full
    batches = max(8, orders // BATCH_MESSAGES)
    points["payment-0"] = [_crash_point(random, MID_CHARGE, batches // 8, batches // 4)]
    points["payment-1"] = [_crash_point(random, BEFORE_ACK, batches // 8, batches // 4)]
    points["tracking-0"] = [_crash_point(random, SPOOLED, 2, 4)]
    points[watch.NAME] = [BETWEEN_SINKS]
    points["shipping-0"] = [_crash_point(random, MID_SHIPMENT, batches // 8, batches // 4)]
    return points


def _crash_point(random: Random, place: str, least: int, most: int) -> str:
    return f"{place}:{random.randint(least, most)}"


def _scheduled_faults(random: Random) -> list[ScheduledFault]:
    return [
        ScheduledFault(random.uniform(0.15, 0.25), Fault.CARRIER_OUT),
        ScheduledFault(random.uniform(0.4, 0.5), Fault.BROKER_KILLED),
        ScheduledFault(random.uniform(0.65, 0.8), Fault.POSTGRES_CRASHED),
    ]


def _sample(random: Random, of: Sequence[int], count: float) -> list[int]:
    return sorted(random.sample(of, max(1, round(count))))
