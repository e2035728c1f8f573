"""Catalogues of keys and ids: what is found by them is what looking through everything
finds, whatever has happened.
"""

from __future__ import annotations

import heapq
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.broker.random_work import KEYS, Work
from tests.broker.retention_world import DATA, World
from tests.simulation.node import recover
from txmq.batch import BatchView
from txmq.broker.catalogues import catalogue_build
from txmq.broker.catalogues.catalogue_build import Source, gaps, update
from txmq.broker.data_directory.storage import roll_forward
from txmq.broker.search import search as finding
from txmq.broker.search.candidate_batches import Candidates
from txmq.broker.search.search import Page, Search, Wanted
from txmq.core import machine
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import large_bundles
from txmq.errors import StoreError, UnsupportedFormat
from txmq.store import catalogue_writing
from txmq.store.catalogue import (
    KEY_ROW,
    OFFSET_BITS,
    Catalogue,
    base_of,
    blocks,
    folder_of,
    hash_of_key,
    hashes_of_id,
    numbers,
    open_catalogues,
    remove_catalogues,
)
from txmq.store.pages import PAGE
from txmq.testing.simfs import SimFS, crash_points

HOUR = 3_600


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogues of a few batches, merged three at a time; groups are large with a few
    keys.
    """
    monkeypatch.setattr(catalogue_build, "MOST_BYTES", 2_000)
    monkeypatch.setattr(catalogue_writing, "MERGED", 3)
    monkeypatch.setattr(catalogue_writing, "TIERS", (3_000, 9_000, 40_000))
    monkeypatch.setattr(large_bundles, "KEYS", 4)


def new_world(**settings: Any) -> World:
    fs = SimFS()
    fs.makedirs(DATA)
    world = World(fs.copy(), **settings)
    for name in ("t", "u"):
        world.do(CreateTopic(name, 3))
    return world


def source(world: World) -> Source:
    machine.save(world.state)
    return Source(world.log.log_id, world.log.durable, world.state.tables, world.log.read)


def catalogue(world: World, fs: SimFS | None = None) -> list[Catalogue]:
    """Make whatever is to be made."""
    disk = fs or world.fs
    while update(disk, DATA, source(world)):
        pass
    return open_catalogues(disk, DATA, world.log.log_id)


def found(
    world: World, catalogues: list[Catalogue], topic: str, wanted: Wanted, **place: int
) -> list[Any]:
    """All pages, from a place on."""
    spot, offset, rows = place.get("partition", 0), place.get("offset", 0), list[Any]()
    while True:
        search = Search(world.log, world.state, world.state.topics[topic], wanted, catalogues)
        page: Page = search.page(range(spot, 3), offset)
        rows += page.messages
        if page.following is None:
            return rows
        spot, offset = page.following


def compare(
    world: World, catalogues: list[Catalogue], ids: list[tuple[bytes, int]], rng: Random
) -> int:
    """How many were found, both ways alike."""
    total = 0
    lasting = world.now() - HOUR // 3 * 1_000_000
    for topic in "tu":
        wishes = [Wanted(key=key) for key in (*KEYS, "ü" * 9, "nobody")]
        wishes += [Wanted(found=one) for one in rng.sample(ids, min(40, len(ids)))]
        wishes += [
            Wanted(key=rng.choice(KEYS), start=lasting),
            Wanted(key=rng.choice(KEYS), end=lasting),
        ]
        wishes += [
            Wanted(key="k1", limit=1),
            Wanted(key="k2", found=rng.choice(ids), limit=2),
            Wanted(),
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
    monkeypatch.setattr(finding, "BATCHES", 20)
    world, rng = new_world(), Random(seed)
    work, total, merged = Work(world, seed), 0, 0
    for _ in range(5):
        work.some(40)
        before = numbers(world.fs, DATA)
        catalogues = catalogue(world)
        merged += len(set(before) - set(numbers(world.fs, DATA)))
        total += compare(world, catalogues, work.ids, rng)
        work.some(4)  # what no catalogue has yet
        total += compare(world, catalogues, work.ids, rng)
        few = [one for one in catalogues if rng.random() < 0.5]
        total += compare(world, few, work.ids, rng)
    assert total > 1_500
    assert merged > 2


@pytest.mark.parametrize("left_out", ["_between", "_entries"])
def test_the_comparison_notices_what_is_left_out(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Candidates, left_out, lambda *_: iter(()))
    with pytest.raises(AssertionError):
        test_the_index_finds_what_a_scan_finds_after_any_work(1, monkeypatch)


def test_nothing_that_is_catalogued_is_read_for_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = new_world()
    for number in range(60):
        world.send(b"x", key=f"only{number}")
    catalogues, looked, view_of = catalogue(world), list[Any](), finding.view_of

    def look(*place: Any) -> BatchView:
        looked.append(place)
        return view_of(*place)

    monkeypatch.setattr(finding, "view_of", look)
    assert [row["offset"] for row in found(world, catalogues, "t", Wanted(key="only31"))] == [31]
    assert len(looked) == 1
    assert [
        row["offset"] for row in found(world, catalogues, "t", Wanted(found=(looked_id(world), 7)))
    ] == [7]
    assert len(looked) == 2


def looked_id(world: World) -> bytes:
    return b"p" * 8 + world.engine.state.boot_epoch.to_bytes(8)


def test_a_killed_process_leaves_catalogues_that_find_all() -> None:
    """Every crash point over making, merging and removing catalogues: the process dies,
    or the power goes.
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
                some = Wanted(key=KEYS[number % len(KEYS)])
                assert found(world, left, "t", some) == found(world, [], "t", some)
                after = catalogue(world, image)
                assert found(world, after, "t", some) == found(world, [], "t", some)
                assert not [
                    name for name in image.listdir(folder_of(DATA)) if name.endswith(".tmp")
                ]
        catalogue(world)
    assert points > 60


def test_an_error_at_any_call_is_told_and_the_next_try_succeeds() -> None:
    world = new_world()
    Work(world, 5).some(30)
    wanted, failed = Wanted(key="k3"), 0
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


def test_a_damaged_catalogue_is_thrown_away_and_made_again() -> None:
    world = new_world()
    Work(world, 3).some(60)
    making, expected = world.assembly.cataloguing, world.ask("message.find", topic="t", key="k4")
    assert expected["messages"]
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
        making.make_with(fs, make, world._at_once, lambda: world.log.durable, catalogues)
        assert world.ask("message.find", topic="t", key="k4") == expected
        assert path not in [one.path for one in making.catalogues]
        assert path.rpartition("/")[2] not in fs.listdir(folder_of(DATA))
        world.turn(60)
        making.tick()
        assert world.ask("message.find", topic="t", key="k4") == expected
        assert len(making.catalogues) > 0


def test_catalogues_of_another_log_or_of_a_log_that_is_shorter_now_are_not_believed() -> None:
    world, other = new_world(), new_world()
    Work(world, 1).some(30)
    [first, *_] = catalogue(world)
    assert open_catalogues(world.fs.copy(), DATA, world.log.log_id, first.about.position - 1) == []
    assert open_catalogues(world.fs.copy(), DATA, other.log.log_id) == []
    version = first.path
    world.fs.open(version, write=True).pwrite([b"\x09"], 12)
    with pytest.raises(UnsupportedFormat):
        open_catalogues(world.fs, DATA, world.log.log_id)


def test_catalogues_go_with_what_they_name() -> None:
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
    expected = [found(world, [], "t", Wanted(key=key)) for key in KEYS]
    world.log.close()
    log, state = recover(world.fs, world.now())
    assert roll_forward(state, log, log.end) == 0
    world.log, world.state = log, state
    assert [found(world, catalogues, "t", Wanted(key=key)) for key in KEYS] == expected


def led(world: World, catalogues: list[Catalogue], ids: list[tuple[bytes, int]]) -> list[Any]:
    """Of what is kept: the batches that keys and ids lead to, and the offsets that are
    in no catalogue.
    """
    found = list[Any]()
    for topic in world.state.topics.values():
        for one in [*KEYS, *ids]:
            places = {
                place
                for each in catalogues
                for hashed in _hashes(topic.topic_id, one, each.about.levels)
                for place in each.places(hashed, 0)
                if base_of(place) >= topic.firsts[place >> OFFSET_BITS]
            }
            found.append((topic.name, one, sorted(places)))
        for partition, (first, end) in enumerate(zip(topic.firsts, topic.ends, strict=True)):
            ranges = sorted((r.first, r.end) for each in catalogues for r in each.ranges(topic.topic_id)
                            if r.partition == partition)  # fmt: skip
            found.append((topic.name, partition, list(gaps(ranges, first, end))))
    return found


def _hashes(topic_id: int, one: Any, levels: int) -> list[bytes]:
    if isinstance(one, str):
        return [hash_of_key(topic_id, one.encode())]
    producer_id, sequence = one
    return list(hashes_of_id(topic_id, producer_id, sequence, levels))


def test_catalogues_made_anew_lead_to_what_those_lead_to_that_grew_with_the_log() -> None:
    world = new_world()
    work, merged = Work(world, 11), 0
    for _ in range(12):
        work.some(12)
        before = set(numbers(world.fs, DATA))
        catalogue(world)
        merged += len(before - set(numbers(world.fs, DATA)))
    assert merged > 2
    grown = led(world, catalogue(world), work.ids)
    anew = world.fs.copy()
    remove_catalogues(anew, DATA)
    assert led(world, catalogue(world, anew), work.ids) == grown
    assert sum(len(places) for _topic, _one, places in grown) > 50


def test_the_comparison_notices_what_a_merge_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:

    def forgetful(*sources: Any) -> Any:
        return (
            row
            for number, row in enumerate(heapq.merge(*sources))
            if number % 3 or len(row) != KEY_ROW
        )

    monkeypatch.setattr(catalogue_writing, "merge", forgetful)
    with pytest.raises(AssertionError):
        test_catalogues_made_anew_lead_to_what_those_lead_to_that_grew_with_the_log()


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
        for level, block in blocks(sequence, count):
            assert block << level == at
            assert 0 <= level < 20
            at += 1 << level
        assert at == sequence + count
