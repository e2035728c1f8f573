"""Progress of groups: what has not had its effect is counted, wherever it waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.test_store_reports import STORE, StoreWorld
from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core.consumers import group_views, progress
from txmq.core.consumers.commands import AbandonLetters, ResetPosition
from txmq.core.state import failed_messages
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import SECOND

FIRST = TopicPartition(1, 0)
KEYS, EACH = 200, 10
STORED = 4_100
PARTS = ("unsettled", "retrying", "at_consumers", "parked", "letters")


def shown(world: ConsumersWorld) -> dict[str, Any]:
    [found] = group_views.list_groups(world.state, world.now)
    assert next(iter(found)) == "group"
    assert found["unprocessed"] == sum(found[part] for part in PARTS)
    return found


def oldest_s(world: ConsumersWorld) -> int:
    return progress.age_ms(world.state, world.group(), FIRST, world.now) // 1_000


def test_what_waits_behind_letters_is_unprocessed() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", *list(range(KEYS)) * EACH)
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a", most=KEYS * EACH)
    for offset in range(KEYS):
        world.nack("a", offset, dead=True)
    world.return_messages("a", (KEYS, KEYS * EACH))
    world.now += 60 * SECOND
    assert world.fetch("a", most=KEYS * EACH) == []
    found = shown(world)
    assert (found["letters"], found["parked"], found["unsettled"]) == (200, 1_800, 0)
    assert (found["unprocessed"], found["age_ms"]) == (2_000, 60_000)
    assert world.group().processed.total() == 0


def test_what_a_dead_consumer_host_has_is_unprocessed() -> None:
    world = StoreWorld(t=1)
    world.publish("t", *range(STORED))
    world.join("a", mode="concurrent", retry=QUICK)
    world.fetch("a", most=STORED)
    world.report("a", *((offset, "stored") for offset in range(STORED)))
    world.leave("a")
    world.now += SECOND
    found = shown(world)
    assert (found["at_consumers"], found["stores_lost"], found["letters"]) == (STORED, 1, 0)
    assert (found["unprocessed"], found["age_ms"]) == (STORED, 1_000)
    world.adopt(STORE)
    assert shown(world)["retrying"] == shown(world)["unprocessed"] == STORED


def test_the_oldest_is_the_oldest_that_is_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 7, 8)
    world.join("a", retry=QUICK)
    world.now += SECOND
    world.publish("t", 9)
    assert oldest_s(world) == 1
    world.fetch("a")
    world.ack("a", (1, 3))
    world.nack("a", 0)
    assert oldest_s(world) == 1
    world.now += 2 * SECOND
    world.fetch("a")
    world.nack("a", 0, dead=True)
    assert (oldest_s(world), shown(world)["unprocessed"]) == (3, 1)
    assert world.group().processed == {1: 2}
    world.do(AbandonLetters("g", (("t", 0, 0),), "no use"))
    assert (oldest_s(world), shown(world)["unprocessed"]) == (0, 0)
    assert world.group().processed == {1: 2}
    world.publish("t", 7)
    world.fetch("a")
    world.nack("a", 3, dead=True)
    world.now += SECOND
    assert oldest_s(world) == 1
    monkeypatch.setattr(failed_messages, "MAX_CLOSED_READ", 1)
    assert oldest_s(world) == 0  # not looked for behind so many that are abandoned


def test_only_what_had_its_effect_is_processed() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", *range(10))
    world.join("a", retry=QUICK)
    world.fetch("a", most=10)
    world.ack("a", (0, 4))
    world.nack("a", 4, dead=True)
    world.do(AbandonLetters("g", (("t", 0, 4),), "no use"))
    world.do(ResetPosition("g", "t", "last"))
    assert (shown(world)["unprocessed"], world.group().processed) == (0, {1: 4})


def test_a_deleted_topic_has_nothing_unprocessed() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 7, 8)
    world.join("a", retry=QUICK)
    world.fetch("a")
    world.nack("a", 0, dead=True)
    world.delete_topic("t")
    assert (shown(world)["unprocessed"], world.group().failed.total()) == (0, 0)
