"""Catalogues of keys and ids: a search with them finds what a scan of everything
finds.
"""

from __future__ import annotations

import heapq
from functools import cache, partial
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from tests.broker.data_directory.random_work import KEYS, Work
from tests.broker.data_directory.retention_world import DATA, RetentionWorld
from tests.simulation.simulated_broker import recover
from tests.store.simfs import SimFS, crash_points
from txmq.batch import BatchView, encode, verify
from txmq.broker.data_directory.storage import roll_forward
from txmq.broker.search import catalogue_build, search
from txmq.broker.search.candidate_batches import CandidateBatches, VisibleTopic
from txmq.broker.search.catalogue_build import CatalogueSource, gaps, update
from txmq.broker.search.message_view import read_view
from txmq.broker.search.search import Search, SearchPage, SearchQuery
from txmq.core import machine
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import large_bundles
from txmq.errors import StoreError, UnsupportedFormat
from txmq.model.content import content_of
from txmq.model.message import Message
from txmq.store.catalogue import writer as catalogue_writer
from txmq.store.catalogue.catalogue import (
    KEY_ROW,
    OFFSET_BITS,
    Catalogue,
    catalogue_directory,
    catalogue_numbers,
    covering_blocks,
    hash_of_key,
    hashes_of_id,
    open_catalogues,
    place_offset,
    remove_catalogues,
)
from txmq.store.catalogue.pages import PAGE

HOUR = 3_600


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make catalogues of a few batches, merged three at a time; bundles are large with
    a few keys.
    """
    monkeypatch.setattr(catalogue_build, "MAX_CATALOGUE_BYTES", 2_000)
    monkeypatch.setattr(catalogue_writer, "MERGED", 3)
    monkeypatch.setattr(catalogue_writer, "TIERS", (3_000, 9_000, 40_000))
    monkeypatch.setattr(large_bundles, "KEYS_PER_PIECE", 4)


def new_world(**settings: Any) -> RetentionWorld:
    fs = SimFS()
    fs.makedirs(DATA)
    world = RetentionWorld(fs.copy(), **settings)
    for name in ("t", "u"):
        world.do(CreateTopic(name, 3))
    return world


def source(world: RetentionWorld) -> CatalogueSource:
    machine.save(world.state)
    return CatalogueSource(world.log.log_id, world.log.durable, world.state.tables, world.log.read)


def catalogue(world: RetentionWorld, fs: SimFS | None = None) -> list[Catalogue]:
    """Build until no batch is uncatalogued."""
    disk = fs or world.fs
    while update(disk, DATA, source(world)):
        pass
    return open_catalogues(disk, DATA, world.log.log_id)


def found(
    world: RetentionWorld,
    catalogues: list[Catalogue],
    topic: str,
    wanted: SearchQuery,
    **place: int,
) -> list[Any]:
    """Return all pages, from a place on."""
    spot, offset, rows = place.get("partition", 0), place.get("offset", 0), list[Any]()
    while True:
        search = Search(world.log, world.state, world.state.topics[topic], wanted, catalogues)
        page: SearchPage = search.page(range(spot, 3), offset)
        rows += page.messages
        if page.following is None:
            return rows
        spot, offset = page.following


def compare(
    world: RetentionWorld, catalogues: list[Catalogue], ids: list[tuple[bytes, int]], rng: Random
) -> int:
    """Return the number of messages found, the same with and without catalogues."""
    with patch.object(search, "read_view", cache(read_view)):
        return _compare(world, catalogues, ids, rng)


def _compare(
    world: RetentionWorld, catalogues: list[Catalogue], ids: list[tuple[bytes, int]], rng: Random
) -> int:
    total = 0
    lasting = world.now() - HOUR // 3 * 1_000_000
    for topic in "tu":
        wishes = [SearchQuery(key=key) for key in (*KEYS, "ü" * 9, "nobody")]
        wishes += [SearchQuery(message=one) for one in rng.sample(ids, min(40, len(ids)))]
        wishes += [
            SearchQuery(key=rng.choice(KEYS), start=lasting),
            SearchQuery(key=rng.choice(KEYS), end=lasting),
        ]
        wishes += [
            SearchQuery(key="k1", limit=1),
            SearchQuery(key="k2", message=rng.choice(ids), limit=2),
            SearchQuery(),
        ]
        for wanted in wishes:
            place = {
                "partition": rng.choice([0, 0, 1, 2]),
                "offset": rng.choice([0, 0, rng.randrange(40)]),
            }
            looked_through = found(world, [], topic, wanted, **place)
            assert found(world, catalogues, topic, wanted, **place) == looked_through, (
                topic,
                wanted,
                place,
            )
            total += len(looked_through)
    return total


@pytest.mark.parametrize("seed", range(2))
def test_the_index_finds_what_a_scan_finds_after_any_work(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PAGE_BATCHES", 20)
    world, rng = new_world(), Random(seed)
    work, total, merged = Work(world, seed), 0, 0
    for _ in range(5):
        work.some(40)
        before = catalogue_numbers(world.fs, DATA)
        catalogues = catalogue(world)
        merged += len(set(before) - set(catalogue_numbers(world.fs, DATA)))
        total += compare(world, catalogues, work.ids, rng)
        work.some(4)  # what no catalogue has yet
        total += compare(world, catalogues, work.ids, rng)
        few = [one for one in catalogues if rng.random() < 0.5]
        total += compare(world, few, work.ids, rng)
    assert total > 1_500
    assert merged > 2


@pytest.mark.parametrize("left_out", ["_between", "_entries"])
def test_the_comparison_notices_missing_candidates(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CandidateBatches, left_out, lambda *_: iter(()))
    with pytest.raises(AssertionError):
        test_the_index_finds_what_a_scan_finds_after_any_work(1, monkeypatch)


def test_nothing_that_is_catalogued_is_read_for_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = new_world()
    for number in range(60):
        world.send(b"x", key=f"only{number}")
    catalogues, looked, view_of = catalogue(world), list[Any](), read_view

    def look(*place: Any) -> BatchView:
        looked.append(place)
        return view_of(*place)

    monkeypatch.setattr(search, "read_view", look)
    assert [row["offset"] for row in found(world, catalogues, "t", SearchQuery(key="only31"))] == [
        31
    ]
    assert len(looked) == 1
    assert [
        row["offset"]
        for row in found(world, catalogues, "t", SearchQuery(message=(looked_id(world), 7)))
    ] == [7]
    assert len(looked) == 2


def looked_id(world: RetentionWorld) -> bytes:
    return b"p" * 8 + world.engine.state.boot_epoch.to_bytes(8)


def test_a_killed_process_leaves_catalogues_that_find_all() -> None:
    """Kill the process, or cut the power, at every crash point of building, merging and
    removing catalogues.
    """
    world, points = new_world(), 0
    work = Work(world, 7)
    for steps in (50, 12, 12):
        work.some(steps)
        for number, (fs, _) in enumerate(
            crash_points(world.fs, lambda disk, _: catalogue(world, disk), list)
        ):
            points += 1
            for image in (fs.crash(Random(number)), fs.restart()):
                left = open_catalogues(image, DATA, world.log.log_id)
                some = SearchQuery(key=KEYS[number % len(KEYS)])
                assert found(world, left, "t", some) == found(world, [], "t", some)
                after = catalogue(world, image)
                assert found(world, after, "t", some) == found(world, [], "t", some)
                assert not [
                    name
                    for name in image.listdir(catalogue_directory(DATA))
                    if name.endswith(".tmp")
                ]
        catalogue(world)
    assert points > 60


def test_an_error_at_any_call_is_reported_and_the_next_try_succeeds() -> None:
    world = new_world()
    Work(world, 5).some(30)
    wanted, failed = SearchQuery(key="k3"), 0
    for call in range(1, 60):
        fs = world.fs.copy()
        fs.errors = {fs.calls + call: 28}
        try:
            catalogue(world, fs)
        except StoreError:
            failed += 1
        fs.errors = {}
        assert found(world, catalogue(world, fs), "t", wanted) == found(world, [], "t", wanted)
    assert failed > 20


def test_what_follows_from_a_message_is_found_by_the_catalogue() -> None:
    world, sequence = new_world(), 0
    for number in range(40):
        headers = {"correlation": f"c{number % 8}", "other": "x"} if number % 2 else {"other": "c1"}
        data = encode(
            [Message(b"m", None, None, headers)] * 2,
            producer_id=b"p" * 16, epoch=0, sequence=sequence, born_at=1,
        )  # fmt: skip
        sequence += 2
        world.do(StoreBatch("t", 0, 1, data, verify(data)))
    catalogues = catalogue(world)
    wanted = SearchQuery(content=content_of(None, None, ("c1", "c3", "c2")), limit=1_000)
    rows = found(world, catalogues, "t", wanted)
    assert rows == found(world, [], "t", wanted)
    assert len(rows) == 2 * (40 // 4)
    where = VisibleTopic(world.state, world.state.topics["t"].topic_id, world.log.durable)
    candidates = CandidateBatches(where, catalogues, None, None, ("c1",))
    assert len(list(candidates.within(1, 0))) == 5, "only these are read"


def test_a_damaged_catalogue_is_thrown_away_and_made_again() -> None:
    world = new_world()
    Work(world, 3).some(60)
    making = world.assembly.catalogues

    def messages() -> Any:
        return world.ask("message.find", topic="t", key="k4")["messages"]

    expected = messages()
    assert expected
    path = catalogue(world)[0].path
    for page in range(world.fs.open(path).size() // PAGE):
        fs = world.fs.copy()
        make, catalogues = (
            partial(catalogue, world, fs),
            open_catalogues(fs, DATA, world.log.log_id),
        )
        fs.open(path, write=True).pwrite([b"\x55"], page * PAGE + 30)
        if page == 0:
            catalogues = open_catalogues(fs, DATA, world.log.log_id)
        making.start_building(fs, make, world._at_once, lambda: world.log.durable, catalogues)
        assert messages() == expected
        assert path not in [one.path for one in making.catalogues]
        assert path.rpartition("/")[2] not in fs.listdir(catalogue_directory(DATA))
        world.turn(60)
        making.tick()
        assert messages() == expected
        assert len(making.catalogues) > 0


def test_catalogues_of_another_log_or_of_a_log_that_is_shorter_now_are_not_believed() -> None:
    world, other = new_world(), new_world()
    Work(world, 1).some(30)
    [first, *_] = catalogue(world)
    assert open_catalogues(world.fs.copy(), DATA, world.log.log_id, first.header.position - 1) == []
    assert open_catalogues(world.fs.copy(), DATA, other.log.log_id) == []
    version = first.path
    world.fs.open(version, write=True).pwrite([b"\x09"], 12)
    with pytest.raises(UnsupportedFormat):
        open_catalogues(world.fs, DATA, world.log.log_id)


def test_catalogues_are_removed_with_their_messages() -> None:
    world = new_world()
    for number in range(12):
        world.send(number.to_bytes(4) * 2_000, key=f"k{number}")
    assert len(catalogue(world)) > 1
    world.turn(2 * HOUR)
    world.send(b"new", key="new")
    world.retain()
    world.retain()
    catalogues = catalogue(world)
    assert [(one.first, one.end) for each in catalogues for one in each.ranges()] == [(12, 13)]


def test_a_rebuilt_state_finds_by_the_same_catalogues() -> None:
    world = new_world()
    Work(world, 9).some(80)
    catalogues = catalogue(world)
    expected = [found(world, [], "t", SearchQuery(key=key)) for key in KEYS]
    world.log.close()
    log, state = recover(world.fs, world.now())
    assert roll_forward(state, log, log.end) == 0
    world.log, world.state = log, state
    assert [found(world, catalogues, "t", SearchQuery(key=key)) for key in KEYS] == expected


def led(
    world: RetentionWorld, catalogues: list[Catalogue], ids: list[tuple[bytes, int]]
) -> list[Any]:
    """Return the batches that keys and ids lead to, and the offsets that are in no
    catalogue.
    """
    found = list[Any]()
    for topic in world.state.topics.values():
        for one in [*KEYS, *ids]:
            places = {
                place
                for each in catalogues
                for hashed in _hashes(topic.topic_id, one, each.header.levels)
                for place in each.places(hashed, 0)
                if place_offset(place) >= topic.start_offsets[place >> OFFSET_BITS]
            }
            found.append((topic.name, one, sorted(places)))
        for partition, (first, end) in enumerate(
            zip(topic.start_offsets, topic.end_offsets, strict=True)
        ):
            ranges = sorted(
                (r.first, r.end)
                for each in catalogues
                for r in each.ranges(topic.topic_id)
                if r.partition == partition
            )
            found.append((topic.name, partition, list(gaps(ranges, first, end))))
    return found


def _hashes(topic_id: int, one: Any, levels: int) -> list[bytes]:
    if isinstance(one, str):
        return [hash_of_key(topic_id, one.encode())]
    producer_id, sequence = one
    return list(hashes_of_id(topic_id, producer_id, sequence, levels))


def test_rebuilt_catalogues_lead_to_the_same_batches_as_those_that_grew_with_the_log() -> None:
    world = new_world()
    work, merged = Work(world, 11), 0
    for _ in range(12):
        work.some(12)
        before = set(catalogue_numbers(world.fs, DATA))
        catalogue(world)
        merged += len(before - set(catalogue_numbers(world.fs, DATA)))
    assert merged > 2
    grown = led(world, catalogue(world), work.ids)
    anew = world.fs.copy()
    remove_catalogues(anew, DATA)
    assert led(world, catalogue(world, anew), work.ids) == grown
    assert sum(len(places) for _topic, _one, places in grown) > 50


def test_the_comparison_notices_a_merge_that_loses_rows(monkeypatch: pytest.MonkeyPatch) -> None:

    def forgetful(*sources: Any) -> Any:
        return (
            row
            for number, row in enumerate(heapq.merge(*sources))
            if number % 3 or len(row) != KEY_ROW
        )

    monkeypatch.setattr(catalogue_writer, "merge", forgetful)
    with pytest.raises(AssertionError):
        test_rebuilt_catalogues_lead_to_the_same_batches_as_those_that_grew_with_the_log()


def test_blocks_of_sequences_cover_a_batch_exactly() -> None:
    rng = Random(4)
    spans = [
        (rng.randrange(1 << rng.randrange(1, 60)), rng.randrange(1, 2_000)) for _ in range(300)
    ]
    for sequence, count in [
        (0, 1),
        (0, 1_000_000),
        (1, 1_000_000),
        (2**63 - 1_000_000, 1_000_000),
        *spans,
    ]:
        at = sequence
        for level, block in covering_blocks(sequence, count):
            assert block << level == at
            assert 0 <= level < 20
            at += 1 << level
        assert at == sequence + count
