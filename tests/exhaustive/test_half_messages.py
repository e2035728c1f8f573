"""All states of small worlds of half messages, and rules whose lack is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tests.exhaustive.half_messages import (
    BROKER_STEPS,
    STEPS,
    Bounds,
    HalfWorld,
    Producer,
    core_after,
    seen,
)
from tests.exhaustive.search import InvariantBroken, Search
from tests.reporting import Report
from txmq.core.topics import key_order
from txmq.model.message import Decision

MOST = 40_000
AREAS = {
    "copies": (
        Bounds(copies=1, refusals=1),
        (
            "a bundle came twice",
            "a bundle came after its transaction",
            "a bundle waits for an earlier ticket",
            "a decision came twice",
            "a fence stopped a transaction",
        ),
    ),
    "deaths": (
        Bounds(deaths=1),
        ("a COMMIT came after its producer's death", "a row came between proof and fence"),
    ),
    "restarts": (
        Bounds(restarts=1),
        ("a restart lost Store", "a restart lost Decide"),
    ),
}


def _search(area: str) -> Search[HalfWorld]:
    bounds, scenes = AREAS[area]
    conditions: dict[str, Callable[[HalfWorld], bool]] = {
        scene: partial(_has_seen, scene) for scene in scenes
    }
    return Search(HalfWorld(bounds), conditions)


def _has_seen(scene: str, world: HalfWorld) -> bool:
    return scene in world.seen


@pytest.mark.parametrize("area", AREAS)
def test_no_state_of_half_messages_breaks_an_invariant(area: str, report: Report) -> None:
    found = _search(area).run(MOST)
    report({"states": found.states, **found.steps})


class Bug(NamedTuple):
    """A rule that is missing, the area that finds it, and what it breaks."""

    name: str
    around: Callable[[], AbstractContextManager[Any]]
    area: str
    breaks: str


def _step(name: str, guard: object = None, step: object = None) -> Callable[[], Any]:
    table = BROKER_STEPS if name in BROKER_STEPS else STEPS
    before: Any = table[name]
    return lambda: patch.dict(table, {name: (guard or before[0], step or before[1])})


def _no_fence(world: HalfWorld, me: Producer) -> None:
    world.put(me._replace(looked=False, verdict=Decision.ROLLBACK))


def _commit_before_the_receipt(_world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx == "inserted"


def _commit_before_it_is_durable(world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx == "inserted" and world.state(me) is not None


def _a_death_is_a_rollback(world: HalfWorld, me: Producer) -> None:
    world.spend("deaths")
    world.put(me._replace(alive=False, told=Decision.ROLLBACK))


def _fence_does_not_wait(_world: HalfWorld, me: Producer) -> bool:
    return me.looked


def _locks_are_ignored(_world: HalfWorld, me: Producer) -> bool:
    return me.alive and me.tx == "none"


@contextmanager
def _no_tickets() -> Iterator[None]:
    """Publish each bundle when it is decided, whatever came before it."""
    with patch.object(key_order, "hold_keys", lambda *_: None):
        core_after.cache_clear()
        seen.cache_clear()
        yield
    core_after.cache_clear()
    seen.cache_clear()


BUGS = (
    Bug("no fence", _step("fence", step=_no_fence), "deaths", "contradict"),
    Bug(
        "COMMIT before the receipt",
        _step("commit", _commit_before_the_receipt),
        "copies",
        "is not delivered",
    ),
    Bug(
        "COMMIT before the bundle is durable",
        _step("commit", _commit_before_it_is_durable),
        "restarts",
        "not in the order of the commits",
    ),
    Bug("a death is a rollback", _step("die", step=_a_death_is_a_rollback), "deaths", "contradict"),
    Bug("a fence beside an open row", _step("fence", _fence_does_not_wait), "deaths", "contradict"),
    Bug("no locks", _step("begin", _locks_are_ignored), "copies", "not in the order"),
    Bug("no tickets", _no_tickets, "copies", "not in the order"),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_missing_rule_of_half_messages_is_found(bug: Bug) -> None:
    with bug.around(), pytest.raises(InvariantBroken, match=bug.breaks):
        _search(bug.area).run(MOST)
