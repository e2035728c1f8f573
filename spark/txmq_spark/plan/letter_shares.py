"""Shares of a plan's letters: those that one task sends, in the order of publication.

A key is in one partition of its topic, where offsets are its order. So a partition is a
share, and no message is shuffled or sorted. Where a topic was grown, or producers chose
partitions, a key may be in several: then all partitions of the topic are one share. Its
letters are cut into intervals of time, in each of which every key is in one partition.
A task goes through an interval partition by partition, by offsets as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

WAITS: Final = "waits"  # a column of places: messages of the letter's key wait behind it
SOURCE: Final = ["group", "topic", "partition"]
PLACES: Final = ["source", "offset", WAITS]
SOURCES: Final = pa.schema(
    {
        "group": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "share": pa.int32(),
        "task": pa.int32(),
        "source": pa.int32(),
    }
)
KEY: Final = ["group", "topic", "key"]
MOST_CHAINS: Final = 1 << 20  # of an interval; their homes are in memory
TASKS_PER_CORE: Final = 4
INTERVALS: Final = f"share int, source int, `offset` bigint, {WAITS} boolean, interval bigint"


class LetterSource(NamedTuple):
    """A partition with letters of a group, and their share and task."""

    group: str
    topic: str
    partition: int
    share: int
    task: int


class LetterShares(NamedTuple):
    """The shares of a plan. `joined`: some have several partitions; `waits`: messages
    wait behind letters.
    """

    sources: tuple[LetterSource, ...]
    tasks: int
    joined: bool = False
    waits: bool = False


class SourceLetters(NamedTuple):
    """Letters of a plan in one partition. `strays`: keys may be in other ones, too."""

    group: str
    topic: str
    partition: int
    letters: int
    strays: bool
    waits: bool


def share_out(letters: DataFrame, partitions: Mapping[str, int]) -> LetterShares:
    """Return the shares of a plan's letters; `partitions` are their numbers by topic,
    as far as they are known.
    """
    # A frame to join with would be two more stages.
    pairs = [f.lit(one) for topic, number in partitions.items() for one in (topic, number)]
    known = f.create_map(*pairs).cast("map<string, int>")
    by_hash = f.pmod(f.xxhash64("key"), known[f.col("topic")]) == f.col("partition")
    stray = f.col("replay") & (f.length("key") > 0) & ~f.coalesce(by_hash, f.lit(False))
    rows = (
        letters.groupBy(*SOURCE)
        .agg(
            f.count_if("replay"),
            f.coalesce(f.bool_or(stray), f.lit(False)),
            f.coalesce(f.bool_or(f.col("parked") > 0), f.lit(False)),
        )
        .collect()
    )
    most = TASKS_PER_CORE * letters.sparkSession.sparkContext.defaultParallelism
    return shares_of([SourceLetters(*row) for row in rows], most)


def shares_of(found: Sequence[SourceLetters], most: int) -> LetterShares:
    """Return the shares of what a plan has, in at most so many tasks.

    The largest shares come first, each in the task that has the fewest letters so far.
    """
    grown = {(one.group, one.topic) for one in found if one.strays}
    members: dict[tuple[str, str, int], list[SourceLetters]] = {}
    for one in sorted(found):
        if one.letters:
            joined = -1 if (one.group, one.topic) in grown else one.partition
            members.setdefault((one.group, one.topic, joined), []).append(one)
    shares = sorted(members.values(), key=lambda share: -sum(one.letters for one in share))
    tasks = [(0, task) for task in range(min(most, len(shares)))]
    heapify(tasks)
    sources: list[LetterSource] = []
    for number, share in enumerate(shares):
        letters, task = tasks[0]
        heapreplace(tasks, (letters + sum(one.letters for one in share), task))
        sources += [LetterSource(*one[:3], number, task) for one in share]
    several = any(len(share) > 1 for share in shares)
    return LetterShares(tuple(sources), len(tasks), several, any(one.waits for one in found))


def in_key_order(letters: DataFrame, shares: LetterShares) -> DataFrame:
    """Return the places of letters so that each key is in one task, in the order of
    publication. Column `source` is the index of their partition in `shares`.
    """
    sources = [{**one._asdict(), "source": number} for number, one in enumerate(shares.sources)]
    known = letters.sparkSession.createDataFrame(pa.Table.from_pylist(sources, SOURCES))
    chosen = letters.where("replay").join(f.broadcast(known), SOURCE)
    if shares.waits:
        waiting = letters.where("parked > 0").select(*KEY).distinct().withColumn(WAITS, f.lit(True))
        chosen = chosen.join(f.broadcast(waiting), KEY, "left")
        chosen = chosen.withColumn(WAITS, f.coalesce(WAITS, f.lit(False)))
    else:
        chosen = chosen.withColumn(WAITS, f.lit(False))
    if not shares.joined:
        spread = chosen.select("task", *PLACES).repartitionById(shares.tasks, f.col("task"))
        return spread.sortWithinPartitions("source", "offset").select(*PLACES)
    # A clock that was set back does not turn the letters of a partition round.
    before = Window.partitionBy("source").orderBy("offset")
    timed = chosen.select(
        *("task", "share", *PLACES),
        *(_chain().alias("chain"), f.max("stored_at").over(before).alias("at")),
    )
    spread = timed.repartitionById(shares.tasks, f.col("task"))
    ordered = spread.sortWithinPartitions("share", "at", "source", "offset")
    cut: DataFrame = ordered.mapInArrow(with_intervals, INTERVALS)
    return cut.sortWithinPartitions("share", "interval", "source", "offset").select(*PLACES)


def _chain() -> Column:
    """Return the hash of a letter's key; null for one without a key, which is in no
    order.
    """
    return f.when(f.length("key") > 0, f.xxhash64("key"))


def with_intervals(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add the interval of each letter, of shares in the order of publication.

    An interval ends before a letter whose key has been in another partition since the
    interval began.
    """
    share, interval = -1, 0
    homes: dict[int, int] = {}  # the source of each chain in this interval
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("share", "source", "chain"))
        intervals = []
        for of, source, chain in zip(*columns, strict=True):
            if of != share:
                share, interval, homes = of, 0, {}
            if chain is not None:
                if homes.get(chain, source) != source or len(homes) >= MOST_CHAINS:
                    interval, homes = interval + 1, {}
                homes[chain] = source
            intervals.append(interval)
        named = {name: batch.column(name) for name in ("share", *PLACES)}
        yield pa.RecordBatch.from_pydict(named | {"interval": pa.array(intervals, pa.int64())})
