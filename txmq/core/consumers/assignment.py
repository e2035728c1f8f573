"""Assignment of partitions to members: strategies, as pure functions.

A strategy gives every partition of a topic to one of the members that want the topic.
All strategies are functions of the members' names, so every broker and every replay
comes to the same result. Only `sticky` also depends on the previous assignment.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


RING_POINTS = 64  # of each member on the hash ring: shares then differ by about an eighth


class Subscriber(NamedTuple):
    """A member with the topics it wants; `before` are its partitions so far."""

    name: str
    topics: Collection[int]
    before: Collection[TopicPartition] = ()

    def of_topic(self, topic_id: int) -> list[int]:
        """Return the partitions of a topic that it has so far."""
        return [partition for topic, partition in self.before if topic == topic_id]


Owners = dict["TopicPartition", str]


def average(members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners) -> list[str]:
    """Assign neighbouring partitions to one member, as evenly as possible."""
    del topic_id, taken
    bounds = [number * count // len(members) for number in range(len(members) + 1)]
    shares = zip(members, pairwise(bounds), strict=True)
    return [member.name for member, (low, high) in shares for _ in range(low, high)]


def circular(members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners) -> list[str]:
    """Assign partitions in turn, beginning after the last member of the topic
    before.
    """
    del topic_id
    return [members[(len(taken) + partition) % len(members)].name for partition in range(count)]


def consistent_hash(
    members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners
) -> list[str]:
    """Assign by a ring of hashes: a member that comes or goes moves few partitions."""
    del taken
    ring = sorted(
        (_hash(f"{member.name}#{point}"), member.name)
        for member in members
        for point in range(RING_POINTS)
    )
    points = [point for point, _name in ring]
    hashes = (_hash(f"{topic_id}/{partition}") for partition in range(count))
    return [ring[bisect_right(points, hash_) % len(ring)][1] for hash_ in hashes]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sticky(members: Sequence[Subscriber], topic_id: int, count: int, taken: Owners) -> list[str]:
    """Assign as evenly as possible, and keep previous owners where that allows."""
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
) -> dict[str, tuple[TopicPartition, ...]]:
    """Return the partitions of each member. `topics` maps ids to numbers of partitions.

    `share`: members beyond the number of partitions read along with others, member i
    with partition i mod n. Without it they wait for a partition to come free. Members
    may want different topics: each partition goes to a member that wants its topic.
    """
    members = sorted(members)
    owners: Owners = {}
    assigned: dict[str, list[TopicPartition]] = {member.name: [] for member in members}
    for topic_id, count in sorted(topics.items()):
        wanting = [member for member in members if topic_id in member.topics]
        if not wanting:
            continue
        names = STRATEGIES[strategy](wanting, topic_id, count, owners)
        for partition, name in enumerate(names):
            owners[TopicPartition(topic_id, partition)] = name
            assigned[name].append(TopicPartition(topic_id, partition))
        if share:
            idle = [member for member in wanting if member.name not in names]
            for name, partition in _shared_partitions(
                idle, topic_id, count, keep=strategy == "sticky"
            ).items():
                assigned[name].append(TopicPartition(topic_id, partition))
    return {name: tuple(sorted(own)) for name, own in assigned.items()}


def _shared_partitions(
    idle: Sequence[Subscriber], topic_id: int, count: int, *, keep: bool
) -> dict[str, int]:
    """Return a partition for each member beyond the number of partitions, evenly.

    `keep`: a member keeps its previous partition where that allows.
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
