"""Coordinators of two databases and two brokers that are killed on their way."""

from __future__ import annotations

from collections.abc import Iterable

from tests.client import dying
from tests.recovery.world import World


def killed(world: World, points: Iterable[str]) -> dict[str, str]:
    """One is killed at each of these crash points; gives their tokens by the points."""
    for client in world.clients:
        client.call("topic.describe", names=[world.topic], create=True)
    urls, dsns = [broker.url for broker in world.brokers], list(world.dsns.values())
    return dying.killed(
        dying.Plan(urls, dsns, world.topic, "INSERT INTO effects VALUES (%s)"), points
    )
