"""Who reads which partitions: strategies, as pure functions.

A strategy gives every partition of a topic to one of the members that want the topic.
All are functions of the members' names, so that every broker and every replay comes to
the same result; only `sticky` looks at who had what before.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from txmq.core.state.consumer_groups import Spot

POINTS = 64  # of each member on the hash ring: shares then differ by about an eighth


class Subscriber(NamedTuple):
    """A member as a strategy sees it; `before` are the partitions it has now."""

    name: str
    topics: Collection[int]
    before: Collection[Spot] = ()

    def of_topic(self, topic_id: int) -> list[int]:
        """The partitions of a topic that it has now."""
        return [partition for topic, partition in self.before if topic == topic_id]


Owners = dict["Spot", str]


def average(members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners) -> list[str]:
    """Neighbouring partitions to one member, as even as can be."""
    del topic_id, taken
    bounds = [number * count // len(members) for number in range(len(members) + 1)]
    shares = zip(members, pairwise(bounds), strict=True)
    return [member.name for member, (low, high) in shares for _ in range(low, high)]


def circular(members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners) -> list[str]:
    """In turn, beginning where the topic before left off."""
    del topic_id
    return [members[(len(taken) + partition) % len(members)].name for partition in range(count)]


def consistent_hash(
    members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners
) -> list[str]:
    """By a ring of hashes: a member that comes or goes moves only its own share."""
    del taken
    ring = sorted(
        (_hash(f"{member.name}#{point}"), member.name)
        for member in members
        for point in range(POINTS)
    )
    points = [point for point, _name in ring]
    spots = (_hash(f"{topic_id}/{partition}") for partition in range(count))
    return [ring[bisect_right(points, spot) % len(ring)][1] for spot in spots]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sticky(members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners) -> list[str]:
    """As even as can be, and whoever has a partition keeps it if that allows."""
    share, extra = divmod(count, len(members))
    before: dict[int, str] = {}
    for member in members:
        for partition in member.of_topic(topic_id):
            before.setdefault(partition, member.name)
    owners: list[str | None] = [None] * count
    held = dict.fromkeys((member.name for member in members), 0)
    for partition in range(count):
        name = before.get(partition)
        if name is not None and (held[name] < share or (held[name] == share and extra > 0)):
            extra -= held[name] == share
            held[name] += 1
            owners[partition] = name
    load = dict.fromkeys(held, 0)
    for name in taken.values():
        load[name] = load.get(name, 0) + 1
    for partition in range(count):
        if owners[partition] is None:
            name = min(held, key=lambda member: (held[member], load[member], member))
            held[name] += 1
            owners[partition] = name
    return [owner for owner in owners if owner is not None]


STRATEGIES: dict[str, Callable[[Sequence[Subscriber], int, int, Owners], list[str]]] = {
    "average": average,
    "circular": circular,
    "consistent": consistent_hash,
    "sticky": sticky,
}


def assign(
    strategy: str, members: Sequence[Subscriber], topics: Mapping[int, int], *, share: bool
) -> dict[str, tuple[Spot, ...]]:
    """Partitions of each member. `topics` gives their numbers of partitions.

    `share`: members beyond the number of partitions read along with others, member i
    with partition i mod n; without it they wait for a partition to come free. Members
    may want different topics: each partition goes to one that wants it.
    """
    members = sorted(members)
    owners: Owners = {}
    spots: dict[str, list[Spot]] = {member.name: [] for member in members}
    for topic_id, count in sorted(topics.items()):
        wanting = [member for member in members if topic_id in member.topics]
        if not wanting:
            continue
        names = STRATEGIES[strategy](wanting, topic_id, count, owners)
        for partition, name in enumerate(names):
            owners[topic_id, partition] = name
            spots[name].append((topic_id, partition))
        if share:
            idle = [member for member in wanting if member.name not in names]
            for name, partition in _read_along(
                idle, topic_id, count, keep=strategy == "sticky"
            ).items():
                spots[name].append((topic_id, partition))
    return {name: tuple(sorted(mine)) for name, mine in spots.items()}


def _read_along(
    idle: Sequence[Subscriber], topic_id: int, count: int, *, keep: bool
) -> dict[str, int]:
    """A partition for each member beyond their number, evenly; `keep`: the one that it
    has, if that allows.
    """
    share, extra = divmod(len(idle), count)
    readers = [0] * count
    found: dict[str, int] = {}
    for member in idle if keep else ():
        for partition in member.of_topic(topic_id)[:1]:
            if readers[partition] < share or (readers[partition] == share and extra > 0):
                extra -= readers[partition] == share
                readers[partition] += 1
                found[member.name] = partition
    for member in idle:
        if member.name not in found:
            found[member.name] = partition = readers.index(min(readers))
            readers[partition] += 1
    return found
