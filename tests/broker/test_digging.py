"""Messages found in the files of a log alone: those that the broker finds, and what it
does not show is told apart.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.broker.random_work import KEYS, Work
from tests.broker.retention_world import ARCHIVE, DATA
from tests.broker.test_catalogues import found, new_world
from txmq.broker.data_directory.verify import LogFiles
from txmq.broker.search.offline_search import Digging, Place
from txmq.broker.search.search import Wanted
from txmq.core.state import log_pins
from txmq.core.transactions import large_bundles


def dug(fs: Any, directory: str, place: Place, wanted: Wanted) -> list[dict[str, Any]]:
    return Digging(LogFiles(fs, directory), place, wanted).rows()


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return sorted(
        (row["partition"], row["offset"], row["message_id"])
        for row in rows
        if row["offset"] is not None
    )


@pytest.mark.parametrize("seed", range(2))
def test_published_messages_have_the_offsets_that_the_broker_gave_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bundles, "KEYS", 4)
    world = new_world(hours=0.0)  # nothing is too old
    work, rng = Work(world, seed), Random(seed)
    work.some(120)
    world.turn(9 * 3_600)
    total = 0
    for topic in "tu":
        wishes = [
            Wanted(),
            *(Wanted(key=key) for key in KEYS),
            *(Wanted(found=one) for one in rng.sample(work.ids, 20)),
        ]
        for wanted in wishes:
            expected = places(found(world, [], topic, wanted))
            rows = dug(world.fs, DATA, Place(topic), wanted)
            assert places(rows) == expected
            assert {row["state"] for row in rows if row["offset"] is None} <= {
                "stored",
                "rolled_back",
                "recalled",
            }
            total += len(expected)
    assert total > 300
    some = places(found(world, [], "t", Wanted(), partition=1, offset=3))
    assert places(dug(world.fs, DATA, Place("t", 1, 3), Wanted())) == [
        one for one in some if one[0] == 1
    ]


def test_an_archive_is_searched_like_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pins, "SLACK", 1_000)
    world = new_world(policy="archive")
    for number in range(12):
        world.send(number.to_bytes(4) * 5_000, key=f"k{number % 3}")
    world.retain()
    world.turn(2 * 3_600)
    world.send(b"new", key="new")
    world.retain()
    world.retain()
    rows = dug(world.fs, ARCHIVE, Place("t"), Wanted(key="k1"))
    assert [row["offset"] for row in rows] == [
        number for number in (1, 4, 7, 10) if number <= rows[-1]["offset"]
    ]
    assert len(rows) > 1
    assert found(world, [], "t", Wanted(key="k1")) == []
    [row] = dug(world.fs, ARCHIVE, Place("t"), Wanted(found=(b"p" * 8 + (1).to_bytes(8), 1)))
    assert (row["offset"], row["key"], row["state"]) == (1, "k1", "published")
