"""Consumers killed in the middle of their work: each message has its effect exactly
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.reporting import Report
from tests.system.charging import GROUP, TABLE
from tests.system.farm import Lane
from tests.system.orders import Order, wrong_effects
from tests.system.shop import TOPIC, Shop, opened
from txmq import Message
from txmq.testing.wait import wait_until

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
HITS = 20  # confirmed, at each point
POINTS = ("handler.before_effect", "handler.after_effect", "inbox.after_commit")
SURVIVOR = "survivor"
KEYS = 12
AHEAD = 3 * KEYS  # messages that may wait for their effects while more are sent
PATIENCE_S = 60.0


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Iterator[Shop]:
    with opened(tmp_path, database) as shop:
        shop.query(TABLE)
        yield shop


@pytest.mark.parametrize("mode", ["ordered", "concurrent"])
def test_consumers_killed_in_mid_handler(shop: Shop, mode: str, report: Report) -> None:
    lanes = [Lane(point, point, HITS, (mode,)) for point in POINTS]
    sent: list[Order] = []
    with shop.farm(*lanes, Lane(SURVIVOR, arguments=(mode,)), work="charging") as farm:
        while farm.hits() != dict.fromkeys(POINTS, HITS) | {SURVIVOR: 0}:
            send(shop, sent)
            wait_until(lambda: effects(shop) > len(sent) - AHEAD, PATIENCE_S, what="effects")
        wait_until(lambda: effects(shop) >= len(sent), PATIENCE_S, what="the last effects")
    assert wrong_effects(sent, charges(shop), in_order=mode == "ordered") == []
    assert shop.client.call("dlq.list", group=GROUP)["letters"] == []
    report(farm.hits() | {"effects": len(sent)})


def send(shop: Shop, sent: list[Order]) -> None:
    """One more order of each key."""
    version = len(sent) // KEYS + 1
    orders = [Order(uuid4().hex, f"customer-{number}", version) for number in range(KEYS)]
    shop.client.send_batch(TOPIC, [Message(order.encode(), key=order.key) for order in orders])
    sent += orders


def effects(shop: Shop) -> int:
    [(count,)] = shop.query("SELECT count(*) FROM charge")
    return int(str(count))


def charges(shop: Shop) -> list[Order]:
    """In the order in which their handlers ran."""
    found = shop.query(
        "SELECT replace(token::text, '-', ''), key, version FROM charge ORDER BY seq"
    )
    return [Order(str(token), str(key), int(str(version))) for token, key, version in found]
