"""Search in the files of a log alone: it finds what the broker finds, and marks what
the broker does not show.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.broker.data_directory.random_work import KEYS, Work
from tests.broker.data_directory.retention_world import ARCHIVE, DATA
from tests.broker.search.test_catalogue_service import found, new_world
from txmq.broker.data_directory.verify import LogFiles
from txmq.broker.search.offline_search import OfflineSearch, SearchScope
from txmq.broker.search.search import SearchQuery
from txmq.core.state import log_pins
from txmq.core.transactions import large_bundles


def dug(fs: Any, directory: str, place: SearchScope, wanted: SearchQuery) -> list[dict[str, Any]]:
    return OfflineSearch(LogFiles(fs, directory), place, wanted).rows()


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
    monkeypatch.setattr(large_bundles, "KEYS_PER_PIECE", 4)
    world = new_world(hours=0.0)  # nothing is too old
    work, rng = Work(world, seed), Random(seed)
    work.some(120)
    world.turn(9 * 3_600)
    total = 0
    for topic in "tu":
        wishes = [
            SearchQuery(),
            *(SearchQuery(key=key) for key in KEYS),
            *(SearchQuery(message=one) for one in rng.sample(work.ids, 20)),
        ]
        for wanted in wishes:
            expected = places(found(world, [], topic, wanted))
            rows = dug(world.fs, DATA, SearchScope(topic), wanted)
            assert places(rows) == expected
            assert {row["state"] for row in rows if row["offset"] is None} <= {
                "stored",
                "rolled_back",
                "recalled",
            }
            total += len(expected)
    assert total > 300
    some = places(found(world, [], "t", SearchQuery(), partition=1, offset=3))
    assert places(dug(world.fs, DATA, SearchScope("t", 1, 3), SearchQuery())) == [
        one for one in some if one[0] == 1
    ]


def test_an_archive_is_searched_like_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pins, "SLACK_BYTES", 1_000)
    world = new_world(policy="archive")
    for number in range(12):
        world.send(number.to_bytes(4) * 5_000, key=f"k{number % 3}")
    world.retain()
    world.turn(2 * 3_600)
    world.send(b"new", key="new")
    world.retain()
    world.retain()
    rows = dug(world.fs, ARCHIVE, SearchScope("t"), SearchQuery(key="k1"))
    assert [row["offset"] for row in rows] == [
        number for number in (1, 4, 7, 10) if number <= rows[-1]["offset"]
    ]
    assert len(rows) > 1
    assert found(world, [], "t", SearchQuery(key="k1")) == []
    [row] = dug(
        world.fs, ARCHIVE, SearchScope("t"), SearchQuery(message=(b"p" * 8 + (1).to_bytes(8), 1))
    )
    assert (row["offset"], row["key"], row["state"]) == (1, "k1", "published")
