"""Killed coordinators of transactions over two databases and two brokers."""

from __future__ import annotations

from collections.abc import Iterable

from tests.client import killed_coordinators
from tests.recover.world import RecoveryWorld


def killed(world: RecoveryWorld, points: Iterable[str]) -> dict[str, str]:
    """Kill one coordinator at each crash point; return the tokens by the points."""
    for client in world.clients:
        client.call("topic.describe", names=[world.topic], create=True)
    urls, dsns = [broker.url for broker in world.brokers], list(world.dsns.values())
    return killed_coordinators.killed(
        killed_coordinators.Plan(urls, dsns, world.topic, "INSERT INTO effects VALUES (%s)"), points
    )
