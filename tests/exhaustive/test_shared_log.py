"""All states of small shared logs: no invariant broken, every scene reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest

from tests.exhaustive.search import InvariantBroken, Search
from tests.exhaustive.shared_log import Bounds, LogWorld
from tests.reporting import Report
from tests.simulation.shared_bugs import BUGS
from txmq.store.shared import node

MOST = 60_000  # states


class Area(NamedTuple):
    """A part of the states: its bounds, and the scenes that have to be met there."""

    bounds: Bounds
    scenes: tuple[str, ...]


AREAS = {
    "slices": Area(
        Bounds(writes=3),
        (
            "confirmed",
            "a gap",
            "a question was answered",
            "a zombie's record is void",
            "DEPOSED",
        ),
    ),
    "claims": Area(Bounds(claims=3, writes=1), ("two lead", "a claim is void")),
    "copies": Area(Bounds(writes=1, copies=1), ("a late record is void", "confirmed")),
    "lost acks": Area(Bounds(writes=2, unknown=1), ("a question was answered",)),
    "errors": Area(
        Bounds(writes=2, errors=1, restarts=1),
        ("UNDELIVERED", "a record counts after its writer's end", "leads after a restart"),
    ),
    "cuts": Area(Bounds(writes=2, sizes=(2, 1)), ("a record was cut", "confirmed")),
    "lease": Area(
        Bounds(time=2, beats=2),
        ("a serves", "b serves", "a leader waits for the lease of another"),
    ),
    "resignation": Area(Bounds(time=1, beats=2, resignations=1), ("RESIGNED", "b serves")),
}


# Planted bugs of the simulation, by the states in which the search meets them.
FINDS = {
    "the epoch alone decides what counts": Bounds(writes=1, copies=1),
    "a claim does not cut the unfinished record": Bounds(writes=2, sizes=(2, 1)),
    "the expected offset comes from a report": Bounds(writes=2, copies=1),
    "an unknown offset is taken for success": Bounds(writes=2, unknown=1),
    "the middle of an append is confirmed": Bounds(writes=2, sizes=(2, 1)),
    "no wait for the lease after a claim": Bounds(time=2, beats=2),
    "leading before the claim is read": Bounds(writes=1),
    "a leader goes on after an error": Bounds(writes=2, errors=1),
    "an error is taken for certain": Bounds(writes=2, errors=1),
}


@pytest.fixture(autouse=True)
def _small_slices() -> Iterator[None]:
    with patch.object(node, "MOST_DATA", 1):
        yield


def _meets(scene: str, world: LogWorld) -> bool:
    return scene in world.scenes()


@pytest.mark.parametrize("name", AREAS)
def test_no_state_of_a_shared_log_breaks_an_invariant(name: str, report: Report) -> None:
    area = AREAS[name]
    scenes: dict[str, Callable[[LogWorld], bool]] = {
        scene: partial(_meets, scene) for scene in area.scenes
    }
    found = Search(LogWorld(area.bounds), scenes).run(MOST)
    report({"states": found.states, **found.steps})


@pytest.mark.parametrize("name", FINDS)
def test_the_search_finds_a_planted_bug(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    with bug.around(), pytest.raises(InvariantBroken):
        Search(LogWorld(FINDS[name]), {}).run(MOST)


def test_every_planted_bug_is_found_somewhere() -> None:
    assert {bug.name for bug in BUGS if bug.first is None} <= FINDS.keys()
