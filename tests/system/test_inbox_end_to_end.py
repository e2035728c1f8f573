"""Consumers killed in their handlers: each message has its effect exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.reporting import Report
from tests.system.inbox_worker import GROUP, TABLE
from tests.system.order_system import TOPIC, OrderSystem, order_system
from tests.system.orders import PlacedOrder, wrong_effects
from tests.system.supervisor import WorkerSpec
from txmq import Message
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
HITS = 20  # confirmed, at each point
POINTS = ("handler.before_effect", "handler.after_effect", "inbox.after_commit")
SURVIVOR = "survivor"
KEYS = 12
AHEAD = 3 * KEYS  # messages that may wait for their effects while more are sent


@pytest.fixture
def system(tmp_path: Path, database: str) -> Iterator[OrderSystem]:
    with order_system(tmp_path, database) as system:
        system.query(TABLE)
        yield system


@pytest.mark.parametrize("mode", ["ordered", "concurrent"])
def test_consumers_killed_in_their_handlers(system: OrderSystem, mode: str, report: Report) -> None:
    workers = [WorkerSpec(point, point, HITS, (mode,)) for point in POINTS]
    sent: list[PlacedOrder] = []
    with system.run_workers(
        *workers, WorkerSpec(SURVIVOR, arguments=(mode,)), program="inbox_worker"
    ) as running_workers:
        while running_workers.deaths() != dict.fromkeys(POINTS, HITS) | {SURVIVOR: 0}:
            send(system, sent)
            wait_until(lambda: effects(system) > len(sent) - AHEAD, what="effects")
        wait_until(lambda: effects(system) >= len(sent), what="the last effects")
    assert wrong_effects(sent, charges(system), in_order=mode == "ordered") == []
    assert system.client.call("dlq.list", group=GROUP)["letters"] == []
    report(running_workers.deaths() | {"effects": len(sent)})


def send(system: OrderSystem, sent: list[PlacedOrder]) -> None:
    """Send one more order of each key."""
    version = len(sent) // KEYS + 1
    orders = [PlacedOrder(uuid4().hex, f"customer-{number}", version) for number in range(KEYS)]
    system.client.send_batch(TOPIC, [Message(order.encode(), key=order.key) for order in orders])
    sent += orders


def effects(system: OrderSystem) -> int:
    [(count,)] = system.query("SELECT count(*) FROM charge")
    return int(str(count))


def charges(system: OrderSystem) -> list[PlacedOrder]:
    """Return the effects, in the order in which their handlers ran."""
    found = system.query(
        "SELECT replace(token::text, '-', ''), key, version FROM charge ORDER BY seq"
    )
    return [PlacedOrder(str(token), str(key), int(str(version))) for token, key, version in found]
