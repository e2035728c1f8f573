"""The sends of producers, the messages of the topic, and the faults between the two.

The module knows nothing of brokers or clients. Bodies are unique texts
`<key>/<number>`, and the numbers of a key rise in the order of its sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

Place = tuple[int, int]  # partition and offset


class TopicRow(NamedTuple):
    """A message of the topic, with its place."""

    partition: int
    offset: int
    key: str | None
    body: str

    @property
    def place(self) -> Place:
        return self.partition, self.offset


@dataclass(slots=True)
class SendHistory:
    """The sends so far, and their outcomes.

    Any number of threads fill it, as each step is one assignment. `acknowledged` maps
    bodies to their places, or to None if the receipt has none. `refused` were reported
    as not done. `bundles` are bodies of one transaction. `observed` has the bodies that
    readers saw.
    """

    attempted: set[str] = field(default_factory=set)
    acknowledged: dict[str, Place | None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    bundles: list[tuple[str, ...]] = field(default_factory=list)
    observed: dict[Place, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    duplicates: int = 0

    def observe(self, row: TopicRow) -> None:
        """Note a message that a reader saw, and whether the place had another one
        before.
        """
        before = self.observed.setdefault(row.place, row.body)
        if before != row.body:
            self.changed.append(f"{row.place} was {before} and became {row.body}")

    def counts(self) -> dict[str, int]:
        """Return the figures for a report."""
        return {
            "attempted": len(self.attempted),
            "acknowledged": len(self.acknowledged),
            "unknown": len(self.unknown),
            "refused": len(self.refused),
            "bundles": len(self.bundles),
            "duplicates": self.duplicates,
            "observed": len(self.observed),
        }


def find_faults(history: SendHistory, topic: Sequence[TopicRow]) -> list[str]:
    """Return the faults of the topic at the end, of which a correct broker has none.

    The rows may be in any order.
    """
    rows = sorted(topic)
    return [
        *history.changed,
        *_lost_or_misplaced(history, rows),
        *_invented(history, rows),
        *_doubled(rows),
        *_partial(history, rows),
        *_gaps(rows),
        *_disorder(rows),
        *_rewritten(history, rows),
    ]


def _lost_or_misplaced(history: SendHistory, rows: Sequence[TopicRow]) -> Iterator[str]:
    there = {row.body for row in rows}
    at = {row.place: row.body for row in rows}
    for body, place in history.acknowledged.items():
        if body not in there:
            yield f"{body} was acknowledged and is lost"
        elif place is not None and at.get(place) != body:
            yield f"{body} is not at {place}, where its receipt says: there is {at.get(place)}"


def _invented(history: SendHistory, rows: Sequence[TopicRow]) -> Iterator[str]:
    for row in rows:
        if row.body not in history.attempted:
            yield f"{row.body} was never sent"
        elif row.body in history.refused:
            yield f"{row.body} is there, though it was reported as not stored"


def _doubled(rows: Sequence[TopicRow]) -> Iterator[str]:
    for body, times in Counter(row.body for row in rows).items():
        if times > 1:
            yield f"{body} is there {times} times"


def _partial(history: SendHistory, rows: Sequence[TopicRow]) -> Iterator[str]:
    there = {row.body for row in rows}
    for bundle in history.bundles:
        found = sum(body in there for body in bundle)
        if 0 < found < len(bundle):
            yield f"of the bundle {bundle} only {found} are there"


def _gaps(rows: Sequence[TopicRow]) -> Iterator[str]:
    expected: dict[int, int] = {}
    for row in rows:
        if row.offset != expected.get(row.partition, 0):
            yield (
                f"{row.body} is at offset {row.offset} of partition {row.partition},"
                " not next to its neighbour"
            )
        expected[row.partition] = row.offset + 1


def _disorder(rows: Sequence[TopicRow]) -> Iterator[str]:
    by_key: dict[str, list[TopicRow]] = {}
    for row in rows:
        key, _, _ = row.body.rpartition("/")
        if row.key != key:
            yield f"{row.body} has the key {row.key}"
        by_key.setdefault(key, []).append(row)
    for key, own in by_key.items():
        if len({row.partition for row in own}) > 1:
            yield f"the messages of {key} are in several partitions"
        for before, after in pairwise(own):
            if _number(before) > _number(after):
                yield f"{after.body} is behind {before.body}"


def _rewritten(history: SendHistory, rows: Sequence[TopicRow]) -> Iterator[str]:
    at = {row.place: row.body for row in rows}
    for place, body in history.observed.items():
        if at.get(place) != body:
            yield f"readers saw {body} at {place}, where now {at.get(place)} is"


def _number(row: TopicRow) -> int:
    return int(row.body.rpartition("/")[2])
