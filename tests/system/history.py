"""What producers did, what stands in the topic, and whether the two agree. Knows
nothing of brokers or clients.

Bodies are unique texts `<key>/<number>`: the numbers of a key rise in the order of
their sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

Place = tuple[int, int]  # partition and offset


class Row(NamedTuple):
    """A message as it stands in the topic."""

    partition: int
    offset: int
    key: str | None
    body: str

    @property
    def place(self) -> Place:
        return self.partition, self.offset


@dataclass(slots=True)
class History:
    """What happened. Filled by any number of threads: each step is one assignment.

    `acknowledged` maps bodies to their places, None where the receipt names none;
    `refused` were said not to be done; `groups` are bodies that were to appear
    together; `observed` is what readers saw meanwhile.
    """

    attempted: set[str] = field(default_factory=set)
    acknowledged: dict[str, Place | None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    observed: dict[Place, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    duplicates: int = 0

    def see(self, row: Row) -> None:
        """A reader saw a message: it must be the one that was seen there before, if
        any.
        """
        before = self.observed.setdefault(row.place, row.body)
        if before != row.body:
            self.changed.append(f"{row.place} was {before} and became {row.body}")

    def counts(self) -> dict[str, int]:
        """The figures of a report."""
        return {
            "attempted": len(self.attempted),
            "acknowledged": len(self.acknowledged),
            "unknown": len(self.unknown),
            "refused": len(self.refused),
            "groups": len(self.groups),
            "duplicates": self.duplicates,
            "observed": len(self.observed),
        }


def faults(history: History, topic: Sequence[Row]) -> list[str]:
    """What is wrong with the topic at the end; nothing, if all invariants hold. The
    rows may be in any order.
    """
    rows = sorted(topic)
    return [
        *history.changed,
        *_lost_or_misplaced(history, rows),
        *_invented(history, rows),
        *_doubled(rows),
        *_torn(history, rows),
        *_gaps(rows),
        *_disorder(rows),
        *_rewritten(history, rows),
    ]


def _lost_or_misplaced(history: History, rows: Sequence[Row]) -> Iterator[str]:
    there = {row.body for row in rows}
    at = {row.place: row.body for row in rows}
    for body, place in history.acknowledged.items():
        if body not in there:
            yield f"{body} was acknowledged and is lost"
        elif place is not None and at.get(place) != body:
            yield f"{body} is not at {place}, where its receipt says: there is {at.get(place)}"


def _invented(history: History, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.body not in history.attempted:
            yield f"{row.body} was never sent"
        elif row.body in history.refused:
            yield f"{row.body} is there, though its sender was told that it was not stored"


def _doubled(rows: Sequence[Row]) -> Iterator[str]:
    for body, times in Counter(row.body for row in rows).items():
        if times > 1:
            yield f"{body} is there {times} times"


def _torn(history: History, rows: Sequence[Row]) -> Iterator[str]:
    there = {row.body for row in rows}
    for group in history.groups:
        found = sum(body in there for body in group)
        if 0 < found < len(group):
            yield f"of the group {group} only {found} are there"


def _gaps(rows: Sequence[Row]) -> Iterator[str]:
    expected: dict[int, int] = {}
    for row in rows:
        if row.offset != expected.get(row.partition, 0):
            yield f"{row.body} is at offset {row.offset} of partition {row.partition}, not next to its neighbour"
        expected[row.partition] = row.offset + 1


def _disorder(rows: Sequence[Row]) -> Iterator[str]:
    by_key: dict[str, list[Row]] = {}
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
                yield f"{after.body} stands behind {before.body}"


def _rewritten(history: History, rows: Sequence[Row]) -> Iterator[str]:
    at = {row.place: row.body for row in rows}
    for place, body in history.observed.items():
        if at.get(place) != body:
            yield f"readers saw {body} at {place}, where now {at.get(place)} is"


def _number(row: Row) -> int:
    return int(row.body.rpartition("/")[2])
