"""Shares of letters: whole keys in one task, in the order of publication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from txmq.model.keys import partition_of
from txmq_spark.plan import letter_shares
from txmq_spark.plan.held_letters import place_runs
from txmq_spark.plan.letter_shares import (
    PLACES,
    SourceLetters,
    in_key_order,
    share_out,
    shares_of,
    with_intervals,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = "`group` string, topic string, partition int, offset bigint, key string, stored_at bigint"
Place = tuple[str, str, int, int]
Row = tuple[str, str, int, int, str | None, int]


def letters(group: str, topic: str, partitions: Sequence[int], count: int) -> list[Row]:
    """Return letters of a topic that had the first number of partitions in the first
    part of its life, the second one in the second part, and so on.
    """
    chance, ends, rows = Random(count), dict[int, int](), list[Row]()
    for n in range(count):
        now = partitions[n * len(partitions) // count]
        key = f"k{chance.randrange(9)}" if n % 7 else None
        place = partition_of(key, now) if key else n % now
        ends[place] = ends.get(place, -1) + 1 + n % 3
        rows.append((group, topic, place, ends[place], key, 1_000 + n // 4))
    return rows


def test_each_key_is_in_one_task_in_the_order_of_publication(spark: SparkSession) -> None:
    """Topic `grown` had fewer partitions before, and two groups have letters of it."""
    kinds = {"plain": [3], "grown": [2, 5], "other": [1]}
    rows = [row for name, grown in kinds.items() for row in letters("g", name, grown, 120)]
    rows += letters("h", "grown", [2, 5], 90)
    more = [(*row, True, 0) for row in rows]
    frame = spark.createDataFrame(more, f"{COLUMNS}, replay boolean, parked bigint")
    shares = share_out(frame.repartition(4), {"plain": 3, "grown": 5})
    assert (shares.joined, shares.waits) == (True, False)
    tasks = in_key_order(frame.repartition(4), shares).rdd.glom().collect()
    assert len(tasks) == shares.tasks
    assert sum(bool(task) for task in tasks) > 1
    keys: dict[Place, tuple[str | None, int]] = {row[:4]: (row[4], row[5]) for row in rows}
    seen: dict[tuple[str, str, str], list[tuple[int, int, int, int]]] = {}
    for number, task in enumerate(tasks):
        for row in task:
            group, topic, partition = shares.sources[row["source"]][:3]
            key, at = keys.pop((group, topic, partition, row["offset"]))
            if key:
                found = seen.setdefault((group, topic, key), [])
                found.append((number, at, partition, row["offset"]))
    assert keys == {}
    assert len({(group, topic) for group, topic, _key in seen}) == 4
    assert any(len({one[2] for one in found}) > 1 for found in seen.values()), "keys cross over"
    for found in seen.values():
        assert len({one[0] for one in found}) == 1
        assert found == sorted(found)


def test_letters_of_a_partition_keep_their_order_where_a_clock_was_set_back(
    spark: SparkSession,
) -> None:
    rows = [
        ("g", "t", 0, 0, "a", 90),
        ("g", "t", 0, 1, "a", 10),
        ("g", "t", 1, 0, "b", 50),
        ("g", "t", 1, 1, "a", 95),
        ("g", "t", 0, 2, "b", 60),
    ]
    frame = spark.createDataFrame(
        [(*row, True, 0) for row in rows], f"{COLUMNS}, replay boolean, parked bigint"
    )
    shares = share_out(frame, {})
    found = [
        (shares.sources[row["source"]].partition, row["offset"])
        for row in in_key_order(frame, shares).collect()
    ]
    of_a = [place for place in found if place not in ((1, 0), (0, 2))]
    assert of_a == [(0, 0), (0, 1), (1, 1)]
    assert found.index((1, 0)) < found.index((0, 2))


def test_letters_that_others_wait_behind_are_marked_with_their_keys(spark: SparkSession) -> None:
    rows = [
        ("g", "t", 0, 0, "a", 1, True, 0),
        ("g", "t", 0, 1, "b", 2, True, 0),
        ("g", "t", 0, 2, "a", 3, False, 2),
        ("h", "t", 0, 0, "a", 1, True, 0),
    ]
    frame = spark.createDataFrame(rows, f"{COLUMNS}, replay boolean, parked bigint")
    shares = share_out(frame, {"t": 1})
    assert (shares.joined, shares.waits) == (False, True)
    found = {
        (shares.sources[row["source"]].group, row["offset"]): row["waits"]
        for row in in_key_order(frame, shares).collect()
    }
    assert found == {("g", 0): True, ("g", 1): False, ("h", 0): False}


def test_the_largest_shares_come_first_and_tasks_are_balanced() -> None:
    counts = [5, 90, 10, 40, 60, 0]
    found = [SourceLetters("g", "t", n, count, False, False) for n, count in enumerate(counts)]
    shares = shares_of(found, 2)
    assert shares.tasks == 2
    assert [one.partition for one in shares.sources] == [1, 4, 3, 2, 0]
    loads = [0, 0]
    for one in shares.sources:
        loads[one.task] += counts[one.partition]
    assert loads == [105, 100]
    strayed = [one._replace(strays=one.partition == 3) for one in found]
    [only] = {one.share for one in shares_of(strayed, 2).sources}
    assert (only, shares_of(strayed, 2).joined, shares_of([], 2).tasks) == (0, True, 0)


def places(rows: Iterable[tuple[int, int]]) -> pa.RecordBatch:
    sources, offsets = zip(*rows, strict=True)
    waits = [offset % 5 == 4 for offset in offsets]
    columns = (pa.array(sources, pa.int32()), pa.array(offsets, pa.int64()), pa.array(waits))
    return pa.RecordBatch.from_pydict(dict(zip(PLACES, columns, strict=True)))


def test_places_of_one_partition_are_one_run_over_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [places([(0, 1), (0, 2), (1, 7)]), places([(1, 9), (0, 3), (0, 4)]), places([(0, 2)])]
    found = [(run.source, run.offsets.tolist(), run.waits.tolist()) for run in place_runs(batches)]
    assert found == [
        (0, [1, 2], [False, False]),
        (1, [7, 9], [False, True]),
        (0, [3, 4], [False, True]),
        (0, [2], [False]),
    ]
    monkeypatch.setattr("txmq_spark.plan.held_letters.RUN_PLACES", 2)
    many = [places([(0, n)]) for n in range(5)]
    assert [run.offsets.tolist() for run in place_runs(many)] == [[0, 1], [2, 3], [4]]


def intervals(rows: Sequence[tuple[int, int, int | None]]) -> list[int]:
    """Return the intervals of rows: share, source, chain; they come in two batches."""
    batches = []
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        shares, sources, chains = zip(*part, strict=True)
        named = {
            "share": pa.array(shares, pa.int32()),
            "source": pa.array(sources, pa.int32()),
            "offset": pa.array(range(len(part)), pa.int64()),
            "waits": pa.array([False] * len(part)),
            "chain": pa.array(chains, pa.int64()),
        }
        batches.append(pa.RecordBatch.from_pydict(named))
    return [one for batch in with_intervals(iter(batches)) for one in batch["interval"].to_pylist()]


def test_an_interval_ends_before_a_key_is_in_another_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(0, 0, 1), (0, 1, 2), (0, 0, None), (0, 1, None), (0, 1, 1), (0, 0, 2), (0, 0, 1)]
    assert intervals([*rows, (1, 2, 1)]) == [0, 0, 0, 0, 1, 1, 2, 0]
    chance = Random(5)
    many = [(0, chance.randrange(3), chance.randrange(40)) for _ in range(400)]
    for most in (letter_shares.MOST_CHAINS, 3):
        monkeypatch.setattr(letter_shares, "MOST_CHAINS", most)
        homes: dict[tuple[int, int], set[int]] = {}
        found = intervals(many)
        for (_share, source, chain), interval in zip(many, found, strict=True):
            homes.setdefault((interval, chain), set()).add(source)
        assert found == sorted(found)
        assert all(len(sources) == 1 for sources in homes.values())
    monkeypatch.setattr(letter_shares, "MOST_CHAINS", 2)
    assert intervals([(0, 0, n) for n in range(6)]) == [0, 0, 1, 1, 2, 2]
