"""What goes wrong, and when: drawn from a seed before anything runs.

Deaths of services are crash points (`txmq.crashpoints`): the process kills itself with
SIGKILL at a place where it hurts, the so-manieth time it gets there. The rest happens
when a part of the orders is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Final, NamedTuple

from examples.order_flow.data import Facts
from examples.order_flow.services.setting import AT_ONCE

ORDERS_PER_BAD_PART: Final = 7_500  # a part is in about 30 orders
REFUSED_SHARE: Final = 0.003  # of the customers
ORDERS_PROCESSES: Final = 2
DEATHS_OF_ORDERS: Final = 3  # of each process
AFTER_GROUP, AFTER_COMMIT = "tx.after_group", "tx.after_commit"
MID_CHARGE, MID_SHIPMENT = "order_flow.charging", "order_flow.shipping"
BEFORE_ACK = "inbox.after_commit"


class Blow(StrEnum):
    """What strikes from outside."""

    CARRIER_OUT = "carrier outage"
    BROKER_KILLED = "broker killed"
    POSTGRES_CRASHED = "PostgreSQL crashed"


class Event(NamedTuple):
    """`at`: the share of the orders that is placed by then."""

    at: float
    blow: Blow


class Plan(NamedTuple):
    """All that goes wrong in one run. `deaths`: by process, the crash point of each of
    its lives but the last.
    """

    deaths: Mapping[str, Sequence[str]]
    events: Sequence[Event]
    carrier: str
    bad_parts: Sequence[int]
    refused: Sequence[int]

    @property
    def kills(self) -> int:
        """How many processes are killed."""
        return sum(map(len, self.deaths.values())) + sum(
            event.blow is Blow.BROKER_KILLED for event in self.events
        )


def draw(seed: int, facts: Facts) -> Plan:
    """The plan of that seed."""
    random = Random(seed)
    return Plan(
        deaths=_deaths(random, facts.orders),
        events=_events(random),
        carrier=random.choice(facts.carriers),
        bad_parts=_some(random, facts.parts, facts.orders / ORDERS_PER_BAD_PART),
        refused=_some(random, facts.customers, len(facts.customers) * REFUSED_SHARE),
    )


def _deaths(random: Random, orders: int) -> dict[str, list[str]]:
    deaths: dict[str, list[str]] = {}
    share = orders // ORDERS_PROCESSES
    for number in range(ORDERS_PROCESSES):
        places = [AFTER_GROUP, AFTER_COMMIT] * DEATHS_OF_ORDERS
        life = share // (DEATHS_OF_ORDERS + 1)
        deaths[f"orders-{number}"] = [
            _point(random, places[number + death], life // 2, life)
            for death in range(DEATHS_OF_ORDERS)
        ]
    batches = max(
        8, orders // AT_ONCE
    )  # of both processes of a service, at least: many are not full
    deaths["payment-0"] = [_point(random, MID_CHARGE, batches // 8, batches // 4)]
    deaths["payment-1"] = [_point(random, BEFORE_ACK, batches // 8, batches // 4)]
    deaths["shipping-0"] = [_point(random, MID_SHIPMENT, batches // 8, batches // 4)]
    return deaths


def _point(random: Random, place: str, least: int, most: int) -> str:
    return f"{place}:{random.randint(least, most)}"


def _events(random: Random) -> list[Event]:
    return [
        Event(random.uniform(0.15, 0.25), Blow.CARRIER_OUT),
        Event(random.uniform(0.4, 0.5), Blow.BROKER_KILLED),
        Event(random.uniform(0.65, 0.8), Blow.POSTGRES_CRASHED),
    ]


def _some(random: Random, of: Sequence[int], count: float) -> list[int]:
    return sorted(random.sample(of, max(1, round(count))))
